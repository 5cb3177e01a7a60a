# Which file the loader opens under the name that NCCL asks for.
declared=nccl_spectrum-x_plugin
show() {
  perl -e 'require DynaLoader; DynaLoader::dl_load_file("libnccl-net.so", 0) or die DynaLoader::dl_error(), "\n";
    open(my $maps, "<", "/proc/self/maps"); while (<$maps>) { print "$1\n" if m{(/\S*libnccl-net\S*)} }' | sort -u
}
for way in "env" "env -u LD_LIBRARY_PATH"; do
  path=$($way bash -c "$(declare -f show); show")
  echo "$way: $path"
  case $path in /opt/hpcx/$declared/*) ;; *) exit 1 ;; esac
done
