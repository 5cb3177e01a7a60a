# Which file the loader opens under the name that NCCL asks for: that of the first folder in LD_LIBRARY_PATH that has one.
for folder in ${LD_LIBRARY_PATH//:/ }; do
  if [ -e "$folder/libnccl-net.so" ]; then declared=$folder; break; fi
done
echo "declared: ${declared:?no folder in LD_LIBRARY_PATH has a libnccl-net.so}"
show() {
  perl -e 'require DynaLoader; DynaLoader::dl_load_file("libnccl-net.so", 0) or die DynaLoader::dl_error(), "\n";
    open(my $maps, "<", "/proc/self/maps"); while (<$maps>) { print "$1\n" if m{(/\S*libnccl-net\S*)} }' | sort -u
}
for way in "env" "env -u LD_LIBRARY_PATH"; do
  path=$($way bash -c "$(declare -f show); show")
  echo "$way: $path"
  case $path in "$declared"/*) ;; *) exit 1 ;; esac
done
