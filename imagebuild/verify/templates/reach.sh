# shellcheck shell=bash
# Wait for at most $TIMEOUT seconds until root and mpiuser can log in to all $NODES.
# A server that was just started may not answer yet. If a server refuses a key, do not try again.
for user in root mpiuser; do
  id -u $user > /dev/null 2>&1 || continue
  as_user=(setpriv --reuid="$user" --regid="$(id -g $user)" --init-groups)
  for node in $NODES; do
    until answer=$("${as_user[@]}" ssh -o BatchMode=yes -o ConnectTimeout=2 "$node" true 2>&1); do
      if ((SECONDS > TIMEOUT)) || [[ $answer == *'Permission denied'* ]]; then
        echo "$node: sshd does not let $user in: $answer"
        exit 1
      fi
      sleep 0.5
    done
  done
done
