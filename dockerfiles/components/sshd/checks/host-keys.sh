# Containers of one image must have different host keys, which are made when sshd starts.
read -r -a nodes <<< "$IMAGEBUILD_NODES"
keys=$(ssh-keyscan -t ed25519,rsa,ecdsa "${nodes[@]}" 2> /dev/null | grep -v '^#' | sort)
echo "$keys"
[ "$(wc -l <<< "$keys")" = $((3 * ${#nodes[@]})) ]
[ -z "$(cut -d' ' -f3 <<< "$keys" | sort | uniq -d)" ]
