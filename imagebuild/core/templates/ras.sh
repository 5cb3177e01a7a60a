# shellcheck shell=bash
# Print the status of all ranks, which NCCL 2.24 and later states at a socket of each host. NCCL before 2.28 refuses JSON
# and answers with a text. The prefix tells the lines from the output of a benchmark. While a rank is stopped, NCCL loses
# some requests, so ask again.
ask_ras() { # [SECONDS]: the time since the last line of output
  local address=${NCCL_RAS_ADDR:-localhost:28028} answer='' line seconds
  date -u "+(imagebuild-ras) asked at %F %T UTC (%s)${1:+, $1 s after the last line}"
  for seconds in 8 4; do
    if [ -n "$answer" ]; then break; fi
    # shellcheck disable=SC2016
    answer=$(timeout "$seconds" bash -c '
      exec 3<> "/dev/tcp/${1%:*}/${1##*:}" && printf "CLIENT PROTOCOL 2\nTIMEOUT 5\nSET FORMAT json\nSTATUS\n" >&3 && head -c 64M <&3
    ' ras "$address" 2> /dev/null)
  done
  if [ -z "$answer" ]; then answer=$(stopped_ranks); fi
  while IFS= read -r line; do printf '(imagebuild-ras) %s\n' "$line"; done <<< "${answer:-no answer at $address}"
}
stopped_ranks() { # a stopped process can hold the socket, so look for stopped processes that use a GPU
  local folder rank variables found=''
  for folder in /proc/[0-9]*; do
    if grep -qs '^State:[[:space:]]*[Tt]' "$folder/status" && grep -qs -e /libnccl -e /dev/nvidia "$folder/maps"; then
      variables=$(tr '\0' '\n' < "$folder/environ")
      if [ "$(sed -n 's/^NCCL_RAS_ADDR=//p' <<< "$variables")" != "${NCCL_RAS_ADDR-}" ]; then continue; fi # another job
      rank=$(sed -nE 's/^(OMPI_COMM_WORLD_RANK|SLURM_PROCID|PMIX_RANK|RANK)=//p' <<< "$variables" | head -n 1)
      found+=" rank=$rank process=${folder#/proc/} host=$(uname -n)"
    fi
  done
  if [ -n "$found" ]; then echo "stopped$found"; fi
}
