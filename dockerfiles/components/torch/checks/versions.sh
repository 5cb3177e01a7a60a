python3 - <<'EOF'
import ctypes
import glob

import torch

ctypes.CDLL("libucp.so.0")  # as MPI does
print("PyTorch", torch.__version__)
with open("/proc/self/maps") as maps:
    loaded = {line.split()[-1] for line in maps if "/" in line}
for name in "libnccl.so", "libcudart.so", "libucp.so", "libcudnn.so":
    files = sorted(path for path in loaded if f"/{name}" in path)
    print(*files)
    # The wheel of cuDNN is the image's cuDNN, unless a component brings another one.
    wheel = name == "libcudnn.so" and not glob.glob("/usr/lib/*/libcudnn.so.9")
    assert len(files) == 1 and files[0].startswith("/opt/venv/") == wheel, f"{name}: not only the image's: {files}"
version = ctypes.c_int()
assert ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version)) == 0
# PyTorch states the version of NCCL that it was compiled with. Later versions of NCCL 2 run with it, earlier ones may not.
major, minor, patch = torch.cuda.nccl.version()
print(f"compiled with NCCL {major}.{minor}.{patch}, runs with {version.value}")
assert major * 10000 + minor * 100 + patch <= version.value < (major + 1) * 10000
assert torch.equal(torch.eye(3) @ torch.eye(3), torch.eye(3))
EOF
