# Compare the environment of the container with those of a login shell and of sshd, and with the files of the image.
env | grep -E '^(HPCX|OMPI|OPAL|OSHMEM|SHMEM|MPI)_|PATH=' | sort > /tmp/here
if [ -x /opt/hpcx/ompi/bin/mpirun ]; then
  grep -x 'OPAL_PREFIX=/opt/hpcx/ompi' /tmp/here || { echo "OPAL_PREFIX must be /opt/hpcx/ompi"; exit 1; }
elif grep -E '[=:]/opt/hpcx/ompi(/|:|$)' /tmp/here; then
  echo "these variables name Open MPI of HPC-X, which is not in the image"
  exit 1
fi
env -i HOME=/root TERM=dumb bash -lc env | sort > /tmp/login
if [ -e /etc/ssh/sshd_config.d/20-environment.conf ]; then
  sed 's/^SetEnv //; s/" /\n/g; s/"//g' /etc/ssh/sshd_config.d/20-environment.conf | sort > /tmp/ssh
fi
for other in login ssh; do
  [ -e /tmp/$other ] || continue
  if comm -23 /tmp/here /tmp/$other | grep .; then echo "$other lacks these variables"; exit 1; fi
  echo "$other: same as the container"
done
grep -o '/opt/hpcx[^:]*' /tmp/here | sort -u | while read -r path; do
  [ -e "$path" ] || { echo "$path does not exist"; exit 1; }
done
# Slurm sets variables PMIX_*, so the image must not.
if env | grep -E '^(PMIX_|OLD_|MANPATH).*/opt/hpcx'; then exit 1; fi
