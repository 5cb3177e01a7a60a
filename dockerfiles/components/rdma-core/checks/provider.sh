library=$(ldconfig -p | sed -n 's/.*libmlx5\.so\.1 .*=> //p' | head -n 1)
[ -n "$library" ] || { echo "the loader finds no libmlx5.so.1; install ibverbs-providers"; exit 1; }
echo "$(readlink -f "$library") has: $(grep -a -o 'MLX5_1\.[0-9]*' "$library" | sort -uV | xargs)"
