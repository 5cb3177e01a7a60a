# The libraries in NAMES must come from the first folder in LD_LIBRARY_PATH that contains them, which must be HPC-X's.
for name in $NAMES; do
  declared=
  for folder in ${LD_LIBRARY_PATH//:/ }; do
    if [ -e "$folder/$name" ]; then declared=$folder; break; fi
  done
  echo "declared: ${declared:?no folder in LD_LIBRARY_PATH has a $name}/$name"
  case $declared in /opt/hpcx/*) ;; *) echo "expected it in /opt/hpcx"; exit 1 ;; esac
  for way in "env" "env -u LD_LIBRARY_PATH"; do
    path=$($way perl -e 'require DynaLoader; DynaLoader::dl_load_file($ARGV[0], 0) or die DynaLoader::dl_error(), "\n";
      open(my $maps, "<", "/proc/self/maps"); while (<$maps>) { print "$1\n" if m{(/\S*\Q$ARGV[1]\E\S*)} }' \
      "$name" "${name%%.so*}" | sort -u)
    echo "$way: $path"
    case $path in "$declared"/*) ;; *) echo "expected it in $declared"; exit 1 ;; esac
  done
done
for program in $PROGRAMS; do
  path=$(command -v "$program")
  echo "$program: $path"
  case $path in /opt/hpcx/*) ;; *) echo "expected it in /opt/hpcx"; exit 1 ;; esac
done
