# Containers of one image must have different host keys, which are made when sshd starts.
read -r -a nodes <<< "$IMAGEBUILD_NODES"
keys=$(ssh-keyscan -t ed25519,ecdsa "${nodes[@]}" 2> /dev/null | grep -v '^#' | sort)
echo "$keys"
[ "$(wc -l <<< "$keys")" = $((2 * ${#nodes[@]})) ] || { echo "not every node has two host keys"; exit 1; }
same=$(cut -d' ' -f3 <<< "$keys" | sort | uniq -d)
[ -z "$same" ] || { echo "several nodes have the same host key: $same"; exit 1; }
