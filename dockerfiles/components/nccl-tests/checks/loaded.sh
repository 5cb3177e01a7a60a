# Ranks load their libraries and then lack only the driver. glibc's loader reports each library that a process opens, also
# by dlopen. Two files for one library, such as the NCCL of the image and one of a wheel, would share a process.
folder=$(mktemp -d)
test=(env LD_DEBUG=libs "LD_DEBUG_OUTPUT=$folder/rank" /opt/nccl-tests/build/all_reduce_perf -b 8 -e 8 -g 1)
timeout 60 "${test[@]}" > /dev/null 2>&1 || true
mpirun=(mpirun -n 2 --oversubscribe --allow-run-as-root)
timeout 60 "${mpirun[@]}" sh -c '"$@"; sleep 3' test "${test[@]}" > /dev/null 2>&1 || true
ranks=0
for file in "$folder"/rank.*; do
  if [ ! -e "$file" ]; then break; fi
  sed -n 's/.*calling init: //p' "$file" | sort -u > "$folder/paths"
  if ! grep -q '/libnccl\.so' "$folder/paths"; then continue; fi # env and other programs
  ranks=$((ranks + 1))
  for name in libnccl libcudart libmpi libpmix libucp libucs libuct libibverbs libfabric; do
    while read -r path; do readlink -f "$path"; done < <(grep -E "/$name(-[0-9a-f]{8})?\.so" "$folder/paths") | sort -u > "$folder/files"
    sed "s/^/$name: /" "$folder/files"
    if [ "$(wc -l < "$folder/files")" -gt 1 ]; then
      echo "a process loads two $name; link everything to one of them"
      exit 1
    fi
  done
done
if [ "$ranks" != 3 ]; then
  echo "$ranks of 3 ranks, of which mpirun starts two, loaded libnccl.so; run /opt/nccl-tests/build/all_reduce_perf to see why"
  exit 1
fi
