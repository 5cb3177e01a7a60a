library=$(ldconfig -p | sed -n 's/.*libmlx5\.so\.1 .*=> //p' | head -n 1)
echo "${library:-The loader finds no libmlx5.so.1; it} has: $(grep -a -o 'MLX5_1\.[0-9]*' "$library" | sort -uV | xargs)"
