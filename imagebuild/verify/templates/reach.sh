# shellcheck shell=bash
# Wait for at most $TIMEOUT seconds until all $NODES answer, and root and mpiuser can log in to the last one. The nodes
# are of one image, so one login of each user proves the setup.
for node in $NODES; do
  until (: < "/dev/tcp/$node/22") 2> /dev/null; do
    if ((SECONDS > TIMEOUT)); then
      echo "$node: sshd does not answer"
      exit 1
    fi
    sleep 0.1
  done
done
for user in root mpiuser; do
  id -u $user > /dev/null 2>&1 || continue
  as_user=(setpriv --reuid="$user" --regid="$(id -g $user)" --init-groups)
  answer=$("${as_user[@]}" ssh -o BatchMode=yes -o ConnectTimeout=10 "$node" true 2>&1) || {
    echo "$node: sshd does not let $user in: $answer"
    exit 1
  }
done
