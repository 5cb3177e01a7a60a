# Every environment variable of the image must have the same value in a login shell.
names=$(sed -n 's/^export \([^=]*\)=.*/\1/p' /etc/profile.d/imagebuild.sh)
[ -n "$names" ] || { echo "/etc/profile.d/imagebuild.sh exports no variable"; exit 1; }
for name in $names; do
  here=$(printenv "$name")
  there=$(env -i HOME=/root TERM=dumb bash -lc "printenv $name")
  echo "$name=$here"
  if [ "$here" != "$there" ]; then
    echo "a login shell has $name=$there"
    exit 1
  fi
done
