# A server on another node lets nobody in without the right key, and does not even ask for a password. It is not the
# server that other checks use: sshd keeps away for a while who has come with a wrong key.
read -r -a nodes <<< "$IMAGEBUILD_NODES"
there=${nodes[1]}
port=2201
work=$(mktemp -d)
ssh-keygen -q -t ed25519 -N '' -f "$work/wrong"
server=$(ssh "$there" "/usr/sbin/sshd -D -e -p $port > /dev/null 2>&1 < /dev/null & echo \$!")
trap 'ssh "$there" kill "$server"' EXIT
key=(-F /dev/null -o IdentityAgent=none -o IdentitiesOnly=yes -i)
# A normal user's server has a key of its own.
options=(-v -p "$port" -o BatchMode=yes -o UserKnownHostsFile="$work/known" -o StrictHostKeyChecking=accept-new)
for _ in $(seq 100); do
  if ssh-keyscan -p "$port" "$there" 2> /dev/null | grep . > /dev/null; then break; fi
  sleep 0.1
done
[ "$(ssh "${key[@]}" ~/.ssh/id_ed25519 "${options[@]}" "$there" hostname 2> "$work/log")" = "$there" ]
refused() {
  if ssh "$@" "${options[@]}" "$there" true 2> "$work/log"; then
    echo "let in with $*"
    exit 1
  fi
  grep -E 'Offering public key|Permission denied' "$work/log"
  # Nothing else is offered.
  grep -F 'Permission denied (publickey).' "$work/log" > /dev/null
}
refused "${key[@]}" "$work/wrong"
grep -F "Offering public key: $work/wrong" "$work/log" > /dev/null
refused -o PubkeyAuthentication=no -o PreferredAuthentications=password,keyboard-interactive
