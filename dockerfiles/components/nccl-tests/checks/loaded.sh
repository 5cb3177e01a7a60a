# One rank loads its libraries and then lacks only the driver. glibc's loader reports each library that it opens, also by
# dlopen. Two files for one library, such as the NCCL of the image and one of a wheel, would share a process.
folder=$(mktemp -d)
LD_DEBUG=libs LD_DEBUG_OUTPUT=$folder/rank timeout 60 /opt/nccl-tests/build/all_reduce_perf -b 8 -e 8 -g 1 > /dev/null 2>&1 || true
sed -n 's/.*calling init: //p' "$folder"/rank.* | sort -u > "$folder/paths"
if ! grep -q '/libnccl\.so' "$folder/paths"; then
  echo "/opt/nccl-tests/build/all_reduce_perf loaded no libnccl.so; run it to see why"
  exit 1
fi
for name in libnccl libcudart libmpi libpmix libucp libucs libuct libibverbs libfabric; do
  while read -r path; do readlink -f "$path"; done < <(grep -E "/$name(-[0-9a-f]{8})?\.so" "$folder/paths") | sort -u > "$folder/files"
  sed "s/^/$name: /" "$folder/files"
  if [ "$(wc -l < "$folder/files")" -gt 1 ]; then
    echo "a process loads two $name; link everything to one of them"
    exit 1
  fi
done
