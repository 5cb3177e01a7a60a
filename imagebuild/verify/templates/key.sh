# shellcheck shell=bash
# Make the SSH key of a cluster, and print it.
for tool in ssh ssh-keygen /usr/sbin/sshd; do
  command -v $tool > /dev/null || { echo "no $tool"; exit 1; }
done
ssh-keygen -q -t ed25519 -N '' -f ~root/.ssh/id_ed25519
cat ~root/.ssh/id_ed25519
