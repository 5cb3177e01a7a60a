# Collect what `imagebuild bug-report` packs in addition to logs and results. $1: the folder to write to, $2: the folder
# of builds, then the command that runs imagebuild on the project. A missing program is also an answer.
out=$1 builds=$2
shift 2
for command in "uname -srvm" "cat /etc/os-release" nproc "free -m" "df -h . /tmp" "id -u" "python3 --version" "docker version" \
  "docker buildx version" "docker buildx ls" "docker info" "git --version" "gpg --version" "mmdebstrap --version" "syft version" \
  "cosign version" "unshare --version" "sysctl kernel.apparmor_restrict_unprivileged_userns" "nvidia-smi -L"; do
  echo "\$ $command"
  timeout 20 $command 2>&1 | head -n 60
done > "$out/machine.txt"
for name in DOCKER_CONTEXT DOCKER_HOST HTTP_PROXY HTTPS_PROXY IMAGEBUILD_PROJECT LANG NO_PROXY TERM http_proxy https_proxy no_proxy; do
  # A proxy without `https://` can also contain a password.
  if [ -n "${!name+x}" ]; then echo "$name=$(sed 's/.*@/(redacted)@/' <<< "${!name}")"; fi
done > "$out/environment.txt"
timeout 60 "$@" doctor > "$out/doctor.txt" 2>&1
mkdir "$out/dockerfiles"
targets=$(find "$builds" -mindepth 1 -maxdepth 1 -type d ! -name '.*' -printf '%f\n' | sort)
if [ -f "$builds/lock-report.json" ]; then
  targets="$targets $(sed -n '/^ "targets": \[/,/^ \]/s/^  "\([^"]*\)",\{0,1\}$/\1/p' "$builds/lock-report.json")"
fi
# Anybody can have written the folder of builds: a target names a file below, so it must not contain a slash.
for target in $(printf '%s\n' $targets | grep -x '[A-Za-z0-9][A-Za-z0-9._-]*' | sort -u | head -n 8); do
  timeout 60 "$@" render --unresolved -- "$target" > "$out/dockerfiles/$target" 2> "$out/dockerfiles/$target.txt"
done 2> /dev/null
timeout 60 "$@" plan > "$out/plan.txt" 2>&1
timeout 60 "$@" lock --check --offline > "$out/lock-check.txt" 2>&1
true
