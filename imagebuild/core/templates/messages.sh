# shellcheck shell=bash
keep_messages() { # [FOLDER]: write NCCL's messages to a file, so that they do not cut rows of a table, until the rank ends
  local rank=${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:-0}} top=${TMPDIR:-/tmp} step
  step=$(printf %s "${PMIX_NAMESPACE:-${SLURM_JOB_ID:-0}-${SLURM_STEP_ID:-0}}" | tr -c '[:alnum:]' -)
  # The process that shares FOLDER prints the messages.
  if [ -d "${1:-}" ]; then top=$1; else trap 'end_messages $?' EXIT; fi # also if the rank is told to stop
  messages=$(mktemp -d "$top/nccl.$rank.$step.XXXXXX") && export NCCL_DEBUG_FILE=$messages/%h.%p
}
end_messages() { # STATUS
  sleep 0.2 # until the launcher has read the earlier output
  if [ -d "$messages" ]; then print_messages "$messages"; rm -rf "$messages"; fi
  # The launcher stops the other ranks as soon as one fails. First give them time to fail and to print, too.
  if [ "$1" != 0 ] && [ "${OMPI_COMM_WORLD_SIZE:-${SLURM_NTASKS:-1}}" != 1 ]; then sleep 5; print_other_messages; fi
}
print_other_messages() { # of ranks on this node that hang: mpirun of Open MPI 5 drops what ranks print when it stops them
  local folder step=${messages##*/nccl.}
  step=${step#*.}
  for folder in "${messages%/*}"/nccl.*."${step%.*}".??????; do
    if [ -O "$folder" ] && [ ! -L "$folder" ] && mv "$folder" "$folder.printed" 2> /dev/null; then # only one rank prints them
      print_messages "$folder.printed"
      rm -rf "$folder.printed"
    fi
  done
}
print_messages() { # FOLDER...: with the rank before each message
  local folder rank
  for folder; do
    rank=${folder##*/nccl.}
    # Blocks of 4096 bytes, filled with blanks: pipes and mpirun do not cut them, so messages of ranks do not mix.
    LC_ALL=C awk -v rank="${rank%%.*}" '
      function put() { if (size) { printf "%s%" (4096 - size) "s\n", substr(block, 1, size - 1), ""; fflush() } }
      !NF { next }
      {
        line = substr("(rank " rank ") " $0, 1, 4095) "\n"
        if (size + length(line) > 4096) { put(); block = ""; size = 0 }
        block = block line
        size += length(line)
      }
      END { put() }' "$folder"/* 2> /dev/null
  done
}
