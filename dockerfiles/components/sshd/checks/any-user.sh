# Use an id that is not in /etc/passwd, in the group root, with a home folder that is not writable.
setpriv --reuid 12345 --regid 0 --clear-groups env HOME=/ with-user bash -eu <<'EOF'
[ ~ = "${XDG_RUNTIME_DIR:-/tmp}/user-12345" ] # the folder that is removed at the end
trap 'kill %1; rm -r ~' EXIT
install -d -m 0700 ~/.ssh
ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519
cp ~/.ssh/id_ed25519.pub ~/.ssh/authorized_keys
/usr/sbin/sshd -D -e -p 2202 2> ~/log &
for _ in $(seq 100); do
  if (: < /dev/tcp/localhost/2202) 2> /dev/null; then break; fi
  sleep 0.1
done
[ "$(ssh -p 2202 -o BatchMode=yes localhost 'id -un; id -u')" = $'mpi\n12345' ] || { cat ~/log; exit 1; }
EOF
