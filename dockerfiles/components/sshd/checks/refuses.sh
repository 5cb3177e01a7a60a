# A server on another node must refuse logins without the right key, and must not ask for a password. This check starts
# its own server, as sshd delays later connections of a client that used a wrong key.
read -r -a nodes <<< "$IMAGEBUILD_NODES"
there=${nodes[1]}
port=2201
work=$(mktemp -d)
ssh-keygen -q -t ed25519 -N '' -f "$work/wrong"
server=$(ssh "$there" "/usr/sbin/sshd -D -e -p $port > /dev/null 2>&1 < /dev/null & echo \$!")
trap 'ssh "$there" kill "$server"' EXIT
key=(-F /dev/null -o IdentityAgent=none -o IdentitiesOnly=yes -i)
# The server of a normal user has its own host key.
options=(-v -p "$port" -o BatchMode=yes -o UserKnownHostsFile="$work/known" -o StrictHostKeyChecking=accept-new)
for _ in $(seq 100); do
  if (: < "/dev/tcp/$there/$port") 2> /dev/null; then break; fi
  sleep 0.1
done
[ "$(ssh "${key[@]}" ~/.ssh/id_ed25519 "${options[@]}" "$there" hostname 2> "$work/log")" = "$there" ]
refused() {
  if ssh "$@" "${options[@]}" "$there" true 2> "$work/log"; then
    echo "the server accepted a login with $*"
    exit 1
  fi
  grep -E 'Offering public key|Permission denied' "$work/log"
  # The server must offer no other method.
  grep -F 'Permission denied (publickey).' "$work/log" > /dev/null
}
refused "${key[@]}" "$work/wrong"
grep -F "Offering public key: $work/wrong" "$work/log" > /dev/null
refused -o PubkeyAuthentication=no -o PreferredAuthentications=password,keyboard-interactive
