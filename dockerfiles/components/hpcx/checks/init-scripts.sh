# Source each init script in an empty environment, and look for the folders in its variables. Runtime images have no
# headers, so only the first folder below /opt/hpcx must exist, and the second one for the variants of UCX.
wrong=
look() { # SCRIPT PATH...
  script=$1
  shift
  for path in "$@"; do
    [[ $path =~ ^/opt/hpcx/(ucx/(debug|mt|prof)|[^/]*) ]] # not with sed: hundreds of processes take a minute
    folder=${BASH_REMATCH[0]}
    [ -e "$folder" ] || wrong="$wrong; $script names $path, but $folder does not exist"
  done
}
for script in /opt/hpcx/hpcx*init*.sh; do
  found=$(env -i PATH=/usr/bin:/bin bash -c '. "$0" > /dev/null; if type hpcx_load > /dev/null 2>&1; then hpcx_load; fi; env' "$script" |
    tr ':=' '\n\n' | grep '^/opt/hpcx/' | sort -u | xargs)
  echo "$script: $(wc -w <<< "$found") paths"
  [ "$found" ] || wrong="$wrong; $script sets no path in /opt/hpcx"
  # shellcheck disable=SC2086
  look "$script" $found
done
# Modulefiles are not run: Tcl is not in the image.
while IFS=: read -r file path; do
  look "$file" "/opt/hpcx/${path#*/}"
done < <(grep -rIoE '\$\{?(hpcx_dir|HPCX_DIR|HPCX_HOME)\}?/[A-Za-z0-9_.+/-]+' /opt/hpcx/modulefiles /opt/hpcx/hpcx*.sh)
[ -z "$wrong" ] || { echo "${wrong#; }"; exit 1; }
