# gIB and TCPXO are mounted from the node into a folder in LD_LIBRARY_PATH, often with their own NCCL.
node=$(mktemp -d)
trap 'rm -r "$node"' EXIT
cp -L "$(ldconfig -p | sed -n 's/.*libnccl\.so\.2 .*=> //p' | head -n 1)" "$node/libnccl.so.2"
LD_LIBRARY_PATH=$node${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} ldd /opt/nccl_tests/build/all_reduce_perf | tee /tmp/loaded
grep -F "libnccl.so.2 => $node/" /tmp/loaded
