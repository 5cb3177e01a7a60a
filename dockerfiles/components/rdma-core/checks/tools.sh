# The tools in TOOLS must find their libraries, and ibv_devices must start.
for tool in $TOOLS; do
  path=$(command -v "$tool") || { echo "$tool is not in PATH"; exit 1; }
  if ldd "$path" | grep 'not found'; then exit 1; fi
done
ibv_devices 2>&1 || true
