# A server that is started here must accept the right key and refuse another. A login must have the container's
# environment, as ranks that mpirun starts in another container get that of a login.
work=$(mktemp -d)
install -d -m 0700 ~/.ssh
ssh-keygen -q -t ed25519 -N '' -f "$work/right"
ssh-keygen -q -t ed25519 -N '' -f "$work/wrong"
cp "$work/right.pub" "$work/authorized_keys"
chmod 0600 "$work/authorized_keys"
# The server makes host keys. Remove them at the end, if there were none before.
keys() { { find /etc/ssh ~/.local/state/sshd -name 'ssh_host_*_key*' 2> /dev/null || true; } | sort; }
keys > "$work/before"
/usr/sbin/sshd -D -e -p 2200 -o AuthorizedKeysFile="$work/authorized_keys" -o StrictModes=no 2> "$work/log" &
server=$!
trap 'kill "$server"; cat "$work/log"; keys | comm -13 "$work/before" - | xargs -r rm' EXIT
login() {
  ssh -p 2200 -i "$work/$1" -o IdentitiesOnly=yes -o BatchMode=yes -o UserKnownHostsFile="$work/known" localhost "$2"
}
for _ in $(seq 100); do
  if (: < /dev/tcp/localhost/2200) 2> /dev/null; then break; fi
  sleep 0.1
done
# shellcheck disable=SC2016 # expanded by the remote shell
[ "$(login right 'id -un')" = "$(id -un)" ]
if login wrong true; then
  echo 'the server accepted a key that is not authorized'
  exit 1
fi
login right env | sort > "$work/remote"
while read -r _ name; do
  if [ "$(sed -n "s/^$name=//p" "$work/remote")" != "$(printenv "$name")" ]; then
    echo "$name differs between the container and an ssh session"
    exit 1
  fi
done < <(sed 's/=.*//' /etc/profile.d/imagebuild.sh)
