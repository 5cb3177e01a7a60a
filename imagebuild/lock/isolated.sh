# Run a command without a network, other processes and the files of this machine.
# Usage: isolated.sh USER ROOT FOLDER COMMAND [ARGUMENT]...
# `unshare` must have made new namespaces for mounts, processes and the network. The command sees only the programs and
# libraries of this machine, /dev/null and FOLDER, as USER, without privileges. ROOT is an empty folder.
set -eu
user=$1 root=$2 folder=$3
shift 3
mount -t tmpfs -o size=16m,mode=755 tmpfs "$root"
for path in /usr /bin /sbin /lib /lib32 /lib64 /libx32 /etc/alternatives; do
    if [ -L "$path" ]; then
        cp -P "$path" "$root$path"
    elif [ -d "$path" ]; then
        mkdir -p "$root$path"
        mount --rbind "$path" "$root$path"
        mount -o remount,bind,ro,nosuid,nodev "$root$path"
    fi
done
mkdir -p "$root/dev" "$root$folder"
: > "$root/dev/null"
mount --bind /dev/null "$root/dev/null"
mount --bind "$folder" "$root$folder"
cd "$root"
# In a namespace of users, groups cannot be changed, and the only user is 0, who is the caller outside.
groups=--clear-groups
[ "$user" != 0 ] || groups=--keep-groups
exec chroot . setpriv --no-new-privs --reuid="$user" --regid="$user" "$groups" --bounding-set=-all -- "$@"
