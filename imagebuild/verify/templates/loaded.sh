# shellcheck shell=sh
# shellcheck disable=SC2154  # names, texts, renamed, known, named and folders are set before this script
# Print which files processes have loaded, and facts about these files. The arguments are `pid` and process ids, or
# `run` and a command. Each fact is a line that starts with `imagebuild-loaded:`; its fields are separated by tabs.
scratch=$(mktemp -d) || exit 1
chmod 1777 "$scratch"
trap 'rm -rf "$scratch"' EXIT
tab=$(printf '\t')
# A launcher such as mpirun may start this script on several hosts, and mixes their output.
instance=$(uname -n):$$
say() { sed "s/^/imagebuild-loaded:$instance$tab$1$tab/"; }
# Put a backslash before the characters that `s|…|…|` of sed would act on.
escaped() { sed 's/[|&\\]/\\&/g'; }
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
  echo "$at"
}
# The variables of the loader are for the command, not for the programs in this script.
here=$(pwd | escaped) # for names of libraries that are relative to the current folder
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
  # glibc writes what it loads, and why, to one file for each process. So processes that end at once are seen, too.
  env ${preload:+LD_PRELOAD="$preload"} ${library_path:+LD_LIBRARY_PATH="$library_path"} \
    LD_DEBUG=libs,files LD_DEBUG_OUTPUT="$scratch/debug" "$@" &
  child=$!
  trap 'kill $child' TERM HUP INT
  while kill -0 $child; do
    for file in "$scratch"/debug.*; do
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
  for file in "$scratch"/debug.*; do
    [ -e "$file" ] || continue
    pid=${file##*.}
    if grep -qE "$names" "$file" || { [ "$renamed" ] && grep -q 'dynamically loaded by' "$file"; }; then
      set -- "$@" "$pid"
      [ -e "$scratch/environ.$pid" ] || cp "/proc/$$/environ" "$scratch/environ.$pid"
      grep -E '	(file=.*(needed by|loaded by|generating link map)|find library=| search path=| search cache=|  trying file=|transferring control: |[^ ]*: error: )' "$file" \
        | grep -vE 'trying file=.*/(glibc-hwcaps|tls|x86_64|haswell|atomics)/' \
        | sed "s/^ *[0-9]*:	//; s|file=\([^/ ][^/ ]*/\)|file=$here/\1|" > "$scratch/lines.$pid"
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
      [ -r "/proc/$pid/maps" ] || { echo "$pid" | say unreadable; continue; }
      set -- "$@" "$pid"
      root=/proc/$pid/root
      next="$next $(cat /proc/"$pid"/task/*/children 2> /dev/null)"
      cp "/proc/$pid/environ" "$scratch/environ.$pid"
      cp "/proc/$pid/cmdline" "$scratch/cmdline.$pid"
      sed -n 's/^[^/]* \(\/.*\.so.*\)$/\1/p' "/proc/$pid/maps" | sort -u > "$scratch/maps"
      say "map$tab$pid" < "$scratch/maps"
      cat "$scratch/maps" >> "$scratch/paths"
    done
    todo=$(echo "$next" | tr -s '[:space:]' ' ' | sed 's/^ //; s/ $//')
  done
  [ "$(readlink /proc/self/ns/mnt)" != "$(readlink "${root%/root}/ns/mnt")" ] || root=
fi
for pid in "$@"; do
  tr '\n\0' ' \n' < "$scratch/environ.$pid" | say "environ$tab$pid"
  [ ! -e "$scratch/cmdline.$pid" ] || { tr '\n\0' '  ' < "$scratch/cmdline.$pid"; echo; } | say "command$tab$pid"
  tr '\n\0' ' \n' < "$scratch/environ.$pid" | sed -nE "s/^($named)=//p" | tr ':,' '\n\n' >> "$scratch/places"
done
touch "$scratch/paths" "$scratch/places"
# Other files that the variables, the cache of the loader and the folders of wheels offer.
{
  ldconfig -p 2> /dev/null | sed -n 's/.* => //p'
  while read -r place; do
    case $place in /*) ;; *) continue ;; esac
    if [ -d "$root$place" ]; then
      for folder in "$place" "$place/lib" "$place/lib64"; do ls -d "$root$folder"/lib*.so* 2> /dev/null; done
    else
      echo "$root$place"
    fi
  done < "$scratch/places"
  sed -n 's/\(.*\/\(site\|dist\)-packages\)\/.*/\1/p' "$scratch/paths" | sort -u | while read -r site; do
    ls -d "$root$site"/nvidia/*/lib/lib*.so* 2> /dev/null
  done
  for folder in $folders; do ls -d "$root$folder"/libnccl-*.so* 2> /dev/null; done
} | grep -E "$names" | sed "s|^$root/|/|" | sort -u > "$scratch/offered"
say offered < "$scratch/offered"
sort -u "$scratch/paths" | grep -E "$names" > "$scratch/wanted"
if [ "$renamed" ]; then
  sort -u "$scratch/paths" | grep -v -E "$names|$known" | while read -r path; do
    [ -f "$root$path" ] && [ ! -L "$root$path" ] && grep -qaE "$renamed" "$root$path" && echo "$path"
  done >> "$scratch/wanted"
fi
set --
sort -u "$scratch/wanted" "$scratch/offered" | while read -r path; do
  real=$(resolve "$path")
  [ ! -f "$root$real" ] || printf '%s\t%s\n' "$root$path" "$root$real"
done > "$scratch/real"
cut -f2 "$scratch/real" | sort -u > "$scratch/files"
while read -r path; do set -- "$@" "$path"; done < "$scratch/files"
mountinfo=/proc/self/mountinfo
[ ! "$root" ] || mountinfo=${root%/root}/mountinfo
cut -d' ' -f3,4,5 "$mountinfo" | say mount
echo "$root" | say root
# The component of each folder with libraries, in images of imagebuild
sed 'N; s/^# *\(.*\)\n\(.*\)/\2\t\1/' "$root/etc/ld.so.conf.d/imagebuild.conf" 2> /dev/null | say component
uname -m | say machine
cat /sys/module/mlx5_core/version 2> /dev/null | say ofed
sed -n 's/^NVRM version:.*  \([0-9][0-9.]*\) .*/\1/p' /proc/driver/nvidia/version 2> /dev/null | say driver
if [ $# -gt 0 ]; then
  say real < "$scratch/real"
  stat -L -c "%n$tab%s$tab%d:%i" -- "$@" | say stat
  # The code for GPUs, which lies between the texts of a large library, is left out: it would take seconds.
  for path in "$@"; do
    { head -c 32M -- "$path"; tail -c 64K -- "$path"; } | LC_ALL=C grep -zaoE "$texts" | tr '\0' '\n' | sort -u | sed "s|^|$(echo "$path" | escaped):|"
  done | say text
  for path in "$@"; do
    note=$(head -c 4096 -- "$path" | od -An -v -tx1 | tr -d ' \n' | sed -n 's/.*040000001400000003000000474e5500\(.\{40\}\).*/\1/p')
    printf '%s\t%s\n' "$path" "$note"
  done | say build
  # Packages list libraries below /lib as well as below /usr/lib.
  sed "s|^$root/|/|; p; s|^/usr/lib|/lib|" "$scratch/files" | sort -u > "$scratch/names"
  grep -xF -f "$scratch/names" -- "$root"/var/lib/dpkg/info/*.list 2> /dev/null > "$scratch/owners"
  sed 's|.*/info/||; s|\.list:|\t|' "$scratch/owners" | say owner
  sed 's|.*/info/||; s|\.list:.*||' "$scratch/owners" | sort -u | while read -r package; do
    dpkg-query --admindir="$root/var/lib/dpkg" -W -f '${Package}\t${Version}\n' "$package" 2> /dev/null | sed "s|^|$package\t|"
    sed 's|^/||' "$scratch/names" | grep -Ff - -- "$root/var/lib/dpkg/info/$package.md5sums" | say md5
  done | sed "/^imagebuild-loaded:/!s/^/imagebuild-loaded:$instance${tab}package$tab/"
  if [ -s "$scratch/owners" ]; then
    sed "s|.*\.list:|$root|" "$scratch/owners" | sort -u | while read -r path; do md5sum -- "$path"; done | say sum
  fi
  if command -v rpm > /dev/null 2>&1; then
    for path in "$@"; do rpm -qf --qf "$path\t%{NAME}\t%{VERSION}-%{RELEASE}\n" -- "$path" 2> /dev/null | grep -v 'not owned' | say rpm; done
  fi
  # Wheels list files below their folder, and those in the folder `lib` of a virtual environment.
  {
    sed -n 's/\(.*\/\(site\|dist\)-packages\)\/.*/\1/p' "$scratch/files"
    sed -n 's|\(.*/lib\)/[^/]*$|\1|p' "$scratch/files" | sort -u | while read -r folder; do
      ls -d "$folder"/python*/site-packages 2> /dev/null
    done
  } | sort -u | while read -r site; do
    # shellcheck disable=SC2062
    sed -n "s|^$site/||p; s|^${site%/*/*}/|../../../lib/|p" "$scratch/files" | grep -H -F -f - -- "$site"/*.dist-info/RECORD 2> /dev/null | say record
  done
  # SHA-256 of a large library takes seconds; its size and version are compared instead.
  for path in "$@"; do
    case $path in *-packages/*) find "$path" -size -32M -exec sha256sum {} \; | say sum ;; esac
  done
fi
echo . | say end
if [ "$mode" = run ]; then
  # The hosts print one after the other and line by line, because a launcher cuts lines that come at the same time.
  sleep "${SLURM_NODEID:-$((${OMPI_COMM_WORLD_RANK:-0} / ${OMPI_COMM_WORLD_LOCAL_SIZE:-1}))}"
  sed -u '' "$scratch/result" >&3
fi
