# shellcheck shell=sh
# shellcheck disable=SC2154  # names, texts, renamed, known, named and folders are set before this script
# Print which files processes have loaded, and facts about these files. The arguments are `pid` and process ids, or
# `run` and a command. Each fact is a line that starts with `imagebuild-loaded:`; its fields are separated by tabs. So a
# path is kept as one word of one line: a tab in it as `\011`, and a line break as `\012`, as the kernel writes it in maps.
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
tab=$(printf '\t') break='
'
# A launcher such as mpirun may start this script on several hosts, and mixes their output.
instance=$(uname -n):$$
say() { sed "s/^/imagebuild-loaded:$instance$tab$1$tab/"; }
# Put a backslash before the characters that `s|…|…|` of sed would act on.
escaped() { sed 's/[][|&\\.*^$]/\\&/g'; }
# Print paths as lines.
lines() { # PATH...
  for path; do
    case $path in
      *["$break$tab"]*) printf '%s\n' "$path" | sed -e ':a' -e '$!{ N; ba' -e '}' -e "s/\n/\\\\012/g; s/$tab/\\\\011/g" ;;
      *) printf '%s\n' "$path" ;;
    esac
  done
}
# Print the path that a line stands for. A name can also contain a backslash and these digits.
raw() { # LINE
  case $1 in
    *\\01[12]*) if [ -e "$1" ]; then printf %s "$1"; else printf %s "$1" | sed 's/\\012/\n/g; s/\\011/\t/g'; fi ;;
    *) printf %s "$1" ;;
  esac
}
# Print the path of a file without links. readlink would follow the links of a container to files of this machine.
resolve() { # PATH
  at='' rest=$1 hops=0
  while [ "$rest" ]; do
    part=${rest%%/*} rest=${rest#"${rest%%/*}"}
    rest=${rest#/}
    case $part in '' | .) continue ;; ..) at=${at%/*} && continue ;; esac
    at=$at/$part
    [ -L "$root$at" ] || continue
    hops=$((hops + 1)) target=$(readlink -- "$root$at")
    [ $hops -le 40 ] || return 0
    rest=$target${rest:+/$rest} at=${at%/*}
    case $target in /*) at='' ;; esac
  done
  printf '%s\n' "$at"
}
# The variables of the loader are for the command, not for the programs in this script.
here=$(lines "$(pwd)" | escaped) # for names of libraries that are relative to the current folder
preload=$LD_PRELOAD library_path=$LD_LIBRARY_PATH
unset LD_PRELOAD LD_LIBRARY_PATH
root=
mode=$1
shift
if [ "$mode" = run ]; then
  # One rank of each host is enough.
  if [ "${OMPI_COMM_WORLD_LOCAL_RANK:-${SLURM_LOCALID:-0}}" != 0 ]; then
    rm -rf "$scratch"
    exec env ${preload:+LD_PRELOAD="$preload"} ${library_path:+LD_LIBRARY_PATH="$library_path"} "$@"
  fi
  # glibc writes what it loads, and why, to one file for each process. So processes that end at once are seen, too. The
  # command may change its user, so every user can write these files, but no others: links there would lead elsewhere.
  chmod 711 "$scratch" && mkdir -m 1777 "$scratch/debug"
  env ${preload:+LD_PRELOAD="$preload"} ${library_path:+LD_LIBRARY_PATH="$library_path"} \
    LD_DEBUG=libs,files LD_DEBUG_OUTPUT="$scratch/debug/of" "$@" &
  child=$!
  trap 'kill $child 2> /dev/null' TERM HUP INT
  while kill -0 $child; do
    for file in "$scratch"/debug/of.*; do
      pid=${file##*.}
      cat "/proc/$pid/environ" > "$scratch/new" && [ -s "$scratch/new" ] && mv "$scratch/new" "$scratch/environ.$pid"
      cat "/proc/$pid/cmdline" > "$scratch/new" && [ -s "$scratch/new" ] && mv "$scratch/new" "$scratch/cmdline.$pid"
    done
    sleep 0.05
  done 2> /dev/null &
  watcher=$!
  wait $child
  echo $? | say status
  kill $watcher 2> /dev/null
  wait $watcher 2> /dev/null
  exec 3>&1 > "$scratch/result"
  # The first process may have ended before the watcher saw it.
  [ -s "$scratch/cmdline.$child" ] || printf '%s\0' "$@" > "$scratch/cmdline.$child"
  set --
  for file in "$scratch"/debug/of.*; do
    if [ ! -f "$file" ] || [ -L "$file" ]; then continue; fi
    # A name that contains line breaks takes several lines, of which only the first begins with the process.
    sed -i -e ':a' -e '$!N' -e "/\n *[0-9]*:$tab/!{ s/\n/\\\\012/; ta" -e '}' -e 'P; D' "$file"
    pid=${file##*.}
    if grep -qE "$names" "$file" || { [ "$renamed" ] && grep -q 'dynamically loaded by' "$file"; }; then
      set -- "$@" "$pid"
      [ -e "$scratch/environ.$pid" ] || cp "/proc/$$/environ" "$scratch/environ.$pid"
      grep -E '	(file=.*(needed by|loaded by|generating link map)|find library=| search path=| search cache=|  trying file=|transferring control: |[^ ]*: error: )' "$file" \
        | grep -vE 'trying file=.*/(glibc-hwcaps|tls|x86_64|haswell|atomics)/' \
        | sed "s/^ *[0-9]*:	//; /file=/s/	/\\\\011/g; s|file=\([^/ ][^/ ]*/\)|file=$here/\1|" > "$scratch/lines.$pid"
      say "debug$tab$pid" < "$scratch/lines.$pid"
      sed -n 's/.*  *trying file=//p; s/^file=\(\/.*\) \[[0-9]*\];  generating link map/\1/p' "$scratch/lines.$pid" >> "$scratch/paths"
    fi
  done
else
  # A launcher uses nothing itself: look into its children, too.
  todo=$*
  set --
  while [ "$todo" ]; do
    next=
    for pid in $todo; do
      next="$next $(cat /proc/"$pid"/task/*/children 2> /dev/null)"
      # The process may end at any time, and its first thread before the others. Its files can have any mode, and still
      # only some users can read them.
      for task in "/proc/$pid" "/proc/$pid"/task/*; do
        cat "$task/maps" > "$scratch/new" && [ -s "$scratch/new" ] && cat "$task/environ" > "$scratch/environ.$pid" && break
      done 2> /dev/null
      if [ ! -s "$scratch/new" ] || ! [ -e "$task/root/." ]; then
        rm -f "$scratch/environ.$pid"
        echo "$pid" | say unreadable
        continue
      fi
      set -- "$@" "$pid"
      root=$task/root
      cat "$task/cmdline" > "$scratch/cmdline.$pid" 2> /dev/null
      sed -n "s/^[^/]* \(\/.*\.so.*\)$/\1/; s/$tab/\\\\011/g; /^\//p" "$scratch/new" | sort -u > "$scratch/lines"
      # The kernel adds this word to the names of files that were deleted, but a name can also end with it.
      grep -v ' (deleted)$' "$scratch/lines" > "$scratch/maps"
      grep ' (deleted)$' "$scratch/lines" | while IFS= read -r line; do
        if [ -e "$(raw "$root$line")" ]; then printf '%s\n' "$line" >> "$scratch/maps"; else printf '%s\n' "${line% (deleted)}"; fi
      done | tee -a "$scratch/maps" | say "deleted$tab$pid"
      say "map$tab$pid" < "$scratch/maps"
      cat "$scratch/maps" >> "$scratch/paths"
    done
    todo=$(echo "$next" | tr -s '[:space:]' ' ' | sed 's/^ //; s/ $//')
  done
  # The processes of a container see the same files, so one that still runs is enough.
  for pid; do if [ -e "/proc/$pid/root/." ]; then root=/proc/$pid/root; fi; done
  if [ ! -e "$root/." ]; then
    for pid; do echo "$pid" | say unreadable; done
    set --
  fi
  [ "$(readlink /proc/self/ns/mnt)" != "$(readlink "${root%/root}/ns/mnt")" ] || root=
fi
for pid in "$@"; do
  # `tr` swaps the separators, and the second `sed` turns what were line breaks into words.
  tr '\n\t\0' '\001\002\n' < "$scratch/environ.$pid" \
    | sed "s/$(printf '\001')/\\\\012/g; s/$(printf '\002')/\\\\011/g" > "$scratch/variables"
  say "environ$tab$pid" < "$scratch/variables"
  [ ! -e "$scratch/cmdline.$pid" ] || { tr '\n\0' '  ' < "$scratch/cmdline.$pid"; echo; } | say "command$tab$pid"
  sed -nE "s/^($named)=//p" "$scratch/variables" | tr ':,' '\n\n' >> "$scratch/places"
done
touch "$scratch/paths" "$scratch/places"
# Other files that the variables, the cache of the loader and the folders of wheels offer.
{
  ldconfig -p 2> /dev/null | sed -n 's/.* => //p'
  while IFS= read -r line; do
    case $line in /*) place=$(raw "$root$line") ;; *) continue ;; esac
    if [ -d "$place" ]; then
      lines "$place"/lib*.so* "$place"/lib/lib*.so* "$place"/lib64/lib*.so*
    else
      lines "$place"
    fi
  done < "$scratch/places"
  sed -n 's/\(.*\/\(site\|dist\)-packages\)\/.*/\1/p' "$scratch/paths" | sort -u | while IFS= read -r line; do
    lines "$(raw "$root$line")"/nvidia/*/lib/lib*.so*
  done
  for folder in $folders; do lines "$root$folder"/libnccl-*.so*; done
} | grep -E "$names" | sed "s|^$root/|/|" | sort -u > "$scratch/offered"
say offered < "$scratch/offered"
sort -u "$scratch/paths" | grep -E "$names" > "$scratch/wanted"
if [ "$renamed" ]; then
  sort -u "$scratch/paths" | grep -v -E "$names|$known" | while IFS= read -r line; do
    path=$(raw "$root$line")
    [ -f "$path" ] && [ ! -L "$path" ] && [ -r "$path" ] && grep -qaE "$renamed" -- "$path" && printf '%s\n' "$line"
  done >> "$scratch/wanted"
fi
sort -u "$scratch/wanted" "$scratch/offered" | while IFS= read -r line; do
  path=$(raw "$root$line")
  real=$root$(resolve "${path#"$root"}")
  [ ! -f "$real" ] || printf '%s\t%s\n' "$root$line" "$(lines "$real")"
done > "$scratch/real"
cut -f2 "$scratch/real" | sort -u > "$scratch/files"
each_file() { # FUNCTION: call it with the line and the path of each file
  while IFS= read -r line; do "$1" "$line" "$(raw "$line")"; done < "$scratch/files"
}
mountinfo=/proc/self/mountinfo
[ ! "$root" ] || mountinfo=${root%/root}/mountinfo
sed -n "s/^[^ ]* [^ ]* [^ ]* \([^ ]*\) \([^ ]*\) .*/\1$tab\2/; s/\\\\040/ /g; s/\\\\134/\\\\/g; p" "$mountinfo" 2> /dev/null | say mount
echo "$root" | say root
# The component of each folder with libraries, in images of imagebuild
configuration=$root$(resolve /etc/ld.so.conf.d/imagebuild.conf)
[ ! -f "$configuration" ] || sed 'N; s/^# *\(.*\)\n\(.*\)/\2\t\1/' -- "$configuration" 2> /dev/null | say component
uname -m | say machine
cat /sys/module/mlx5_core/version 2> /dev/null | say ofed
sed -n 's/^NVRM version:.*  \([0-9][0-9.]*\) .*/\1/p' /proc/driver/nvidia/version 2> /dev/null | say driver
if [ -s "$scratch/files" ]; then
  say real < "$scratch/real"
  size_of() { if size=$(stat -L -c "%s$tab%d:%i" -- "$2" 2> /dev/null); then printf '%s\t%s\n' "$1" "$size"; fi; }
  each_file size_of | say stat
  # The code for GPUs, which lies between the texts of a large library, is left out: it would take seconds.
  texts_of() {
    { head -c 32M -- "$2"; tail -c 64K -- "$2"; } 2> /dev/null | LC_ALL=C grep -zaoE "$texts" | tr '\0' '\n' | sort -u | sed "s|^|$(printf '%s\n' "$1" | escaped):|"
  }
  each_file texts_of | say text
  build_id_of() {
    note=$(head -c 4096 -- "$2" 2> /dev/null | od -An -v -tx1 | tr -d ' \n' | sed -n 's/.*040000001400000003000000474e5500\(.\{40\}\).*/\1/p')
    printf '%s\t%s\n' "$1" "$note"
  }
  each_file build_id_of | say build
  sum_of() { # LINE PATH PROGRAM
    if [ -f "$2" ] && [ -r "$2" ] && sum=$("$3" < "$2"); then printf '%s  %s\n' "${sum%% *}" "$1"; fi
  }
  # Packages list libraries below /lib as well as below /usr/lib.
  sed "s|^$root/|/|; p; s|^/usr/lib|/lib|" "$scratch/files" | sort -u > "$scratch/names"
  packages=$root$(resolve /var/lib/dpkg)
  # The files of a container can have any name and be of any kind. Only names of packages may become words of commands.
  grep -D skip -HxF -f "$scratch/names" -- "$packages"/info/*.list 2> /dev/null \
    | sed -nE 's|.*/info/([a-z0-9][a-z0-9.+-]*(:[a-z0-9-]+)?)\.list:(/.*)|\1\t\3|p' > "$scratch/owners"
  say owner < "$scratch/owners"
  cut -f1 "$scratch/owners" | sort -u | while read -r package; do
    [ ! -f "$packages/status" ] || dpkg-query --admindir="$packages" -W -f '${Package}\t${Version}\n' "$package" 2> /dev/null | sed "s|^|$package\t|"
    sed 's|^/||' "$scratch/names" | grep -D skip -Ff - -- "$packages/info/$package.md5sums" 2> /dev/null | say md5
  done | sed "/^imagebuild-loaded:/!s/^/imagebuild-loaded:$instance${tab}package$tab/"
  if [ -s "$scratch/owners" ]; then
    cut -f2 "$scratch/owners" | sed "s|^|$root|" | sort -u | while read -r path; do sum_of "$path" "$path" md5sum; done | say sum
  fi
  if command -v rpm > /dev/null 2>&1; then
    owner_of() {
      rpm -qf --qf '%{NAME}\t%{VERSION}-%{RELEASE}\n' -- "$2" 2> /dev/null | grep -v 'not owned' | sed "s|^|$(printf '%s\n' "$1" | escaped)$tab|"
    }
    each_file owner_of | say rpm
  fi
  # Wheels list files below their folder, and those in the folder `lib` of a virtual environment.
  {
    sed -n 's/\(.*\/\(site\|dist\)-packages\)\/.*/\1/p' "$scratch/files"
    sed -n 's|\(.*/lib\)/[^/]*$|\1|p' "$scratch/files" | sort -u | while IFS= read -r line; do
      lines "$(raw "$line")"/python*/site-packages
    done
  } | sort -u | while IFS= read -r line; do
    site=$(printf '%s\n' "$line" | escaped) lib=$(printf '%s\n' "${line%/*/*}" | escaped)
    # shellcheck disable=SC2062
    sed -n "s|^$site/||p; s|^$lib/|../../../lib/|p" "$scratch/files" \
      | (cd "$(raw "$line")" && grep -D skip -HFf - -- *.dist-info/RECORD) 2> /dev/null | sed "s|^|$site/|" | say record
  done
  # SHA-256 of a large library takes seconds; its size and version are compared instead.
  small_sum_of() {
    case $1 in *-packages/*) [ ! "$(find "$2" -size -32M 2> /dev/null)" ] || sum_of "$@" sha256sum ;; esac
  }
  each_file small_sum_of | say sum
fi
echo . | say end
if [ "$mode" = run ]; then
  # The hosts print one after the other and line by line, because a launcher cuts lines that come at the same time.
  sleep "${SLURM_NODEID:-$((${OMPI_COMM_WORLD_RANK:-0} / ${OMPI_COMM_WORLD_LOCAL_SIZE:-1}))}"
  sed -u '' "$scratch/result" >&3
fi
