library=$(ldconfig -p | sed -n 's/.*libmlx5\.so\.1 .*=> //p' | head -n 1)
[ -n "$library" ] || { echo "the loader finds no libmlx5.so.1; install ibverbs-providers"; exit 1; }
library=$(readlink -f "$library")
echo "$library has: $(grep -a -o 'MLX5_1\.[0-9]*' "$library" | sort -uV | xargs)"
grep -a -q 'MLX5_1\.25\b' "$library" || { echo "$library lacks MLX5_1.25; install the packages of a newer rdma-core"; exit 1; }
