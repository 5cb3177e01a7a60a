# Start a host engine only for this command, as one that already runs may have another version.
port=5577
pid=$(mktemp -d)/pid
nv-hostengine --port "$port" --bind-interface 127.0.0.1 --pid "$pid" > /dev/null
trap 'nv-hostengine --term --pid "$pid" > /dev/null' EXIT
# shellcheck disable=SC2086 # arguments are words
dcgmi $ARGUMENTS --host "127.0.0.1:$port"
