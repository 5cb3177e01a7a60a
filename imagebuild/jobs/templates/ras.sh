# shellcheck shell=bash
# Print the status of all ranks, which NCCL 2.24 and later states at a socket of each host. NCCL before 2.28 refuses JSON
# and answers with a text. The prefix tells the lines from the output of a benchmark.
ask_ras() {
  local address=${NCCL_RAS_ADDR:-localhost:28028} answer line
  # shellcheck disable=SC2016
  answer=$(timeout 10 bash -c '
    exec 3<> "/dev/tcp/${1%:*}/${1##*:}" && printf "CLIENT PROTOCOL 2\nTIMEOUT 5\nSET FORMAT json\nSTATUS\n" >&3 && cat <&3
  ' ras "$address" 2> /dev/null)
  if [ -z "$answer" ]; then answer=$(silent_process "${address##*:}"); fi
  while IFS= read -r line; do printf '(imagebuild-ras) %s\n' "$line"; done <<< "${answer:-no answer at $address}"
}
silent_process() { # PORT: a stopped process still holds the socket, so name the process
  local inode link pid rank state place found=''
  while read -r _ place _ state _ _ _ _ _ inode _; do
    if [ "${place##*:} $state" = "$(printf %04X "$1") 0A" ]; then found=$inode; fi
  done < <(cat /proc/net/tcp /proc/net/tcp6 2> /dev/null)
  link=$(find /proc/[0-9]*/fd -lname "socket:\[${found:-none}\]" -print -quit 2> /dev/null)
  if [ -n "$link" ]; then
    pid=${link#/proc/}
    pid=${pid%%/*}
    rank=$(tr '\0' '\n' < "/proc/$pid/environ" | sed -nE 's/^(OMPI_COMM_WORLD_RANK|SLURM_PROCID|PMIX_RANK|RANK)=//p' | head -n 1)
    echo "silent rank=$rank process=$pid host=$(uname -n)"
  fi
}
