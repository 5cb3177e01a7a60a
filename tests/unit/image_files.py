"""Minimal images and ELF files for tests."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagebuild.oci.tar import decompressed

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
PLAIN = "application/vnd.oci.image.layer.v1.tar"
LAYERS = {b"\x1f\x8b": f"{PLAIN}+gzip", b"\x28\xb5": f"{PLAIN}+zstd"}
"""Maps the first bytes of a layer to its media type."""


@dataclass
class Node:
    """A member of a layer: a file, a link or another type."""

    content: bytes = b""
    mode: int = 0o644
    type: bytes = tarfile.REGTYPE
    target: str = ""
    pax: dict[str, str] = field(default_factory=dict)


def folder(mode: int = 0o755) -> Node:
    return Node(mode=mode, type=tarfile.DIRTYPE)


def symlink(target: str) -> Node:
    return Node(mode=0o777, type=tarfile.SYMTYPE, target=target)


def hardlink(target: str) -> Node:
    return Node(type=tarfile.LNKTYPE, target=target)


Files = Mapping[str, Node | bytes]


def layer(files: Files) -> bytes:
    """Return a layer as a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, value in files.items():
            node = value if isinstance(value, Node) else Node(value)
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.type, info.linkname = len(node.content), node.mode, node.type, node.target
            info.pax_headers = node.pax
            archive.addfile(info, io.BytesIO(node.content))
    return buffer.getvalue()


def diff_id(data: bytes) -> str:
    """Return the digest of a stored layer after decompression."""
    plain = b"".join(decompressed(io.BytesIO(data)))
    return f"sha256:{hashlib.sha256(plain).hexdigest()}"


class Layout:
    """An OCI layout in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests: list[dict[str, Any]] = []
        (root / "blobs" / "sha256").mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes, media_type: str = "") -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs" / "sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def json(self, document: Any, media_type: str = "") -> dict[str, Any]:
        return self.blob(json.dumps(document).encode(), media_type)

    def image(
        self, layers: Iterable[bytes], config: Mapping[str, Any] | None = None, platform: str = "linux/amd64",
        annotations: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Add an image of stored layers."""
        system, arch = platform.split("/")
        layers = list(layers)
        root = {"type": "layers", "diff_ids": list(map(diff_id, layers))}
        about = {"os": system, "architecture": arch, "config": {}, "rootfs": root, **(config or {})}
        manifest = {
            "config": self.json(about),
            "layers": [self.blob(data, LAYERS.get(data[:2], PLAIN)) for data in layers],
        } | ({"annotations": annotations} if annotations else {})
        found = self.json(manifest, MANIFEST) | {"platform": {"os": system, "architecture": arch}}
        self.manifests.append(found)
        self.write()
        return found

    def write(self) -> None:
        (self.root / "index.json").write_text(json.dumps({"manifests": self.manifests}))


def saved(layout: Path, more: Files | None = None) -> bytes:
    """Return a layout as the archive that an engine saves, with additional members."""
    paths = sorted(path for path in layout.rglob("*") if path.is_file())
    return layer({path.relative_to(layout).as_posix(): path.read_bytes() for path in paths} | dict(more or {}))


def layout(root: Path, *layers: Files, platform: str = "linux/amd64", **settings: Any) -> Path:
    """Write a layout with one image. Settings are Env, User, … of its configuration."""
    Layout(root).image([gzip.compress(layer(files), 1, mtime=0) for files in layers], {"config": settings}, platform)
    return root


NEEDED, STRTAB, STRSZ, SONAME, RPATH, RUNPATH = 1, 5, 10, 14, 15, 29
INTERP, DYNAMIC, LOAD, STACK = 3, 2, 1, 0x6474E551
SECTIONS = {".dynstr": 3, ".dynamic": 6, ".nv_fatbin": 1, ".dynsym": 11, ".rodata": 1, ".shstrtab": 3}
"""Maps each section to its type."""
REAL = {path.name: path.read_bytes() for path in (Path(__file__).parents[1] / "data/elf").glob("*.so")}
"""Libraries by a real linker, with symbol versions."""


def elf(
    *,
    machine: int = 62,
    soname: str = "",
    needed: Sequence[str] = (),
    rpath: str = "",
    runpath: str = "",
    interpreter: str = "",
    fatbin: bytes = b"",
    defines: Sequence[str] = (),
    uses: Sequence[str] = (),
    texts: Sequence[str] = (),
    executable_stack: bool = False,
) -> bytes:
    """Return a 64-bit library, or a program if there is an interpreter."""
    values = [*((NEEDED, name) for name in needed), (SONAME, soname), (RPATH, rpath), (RUNPATH, runpath)]
    strings, tags = b"\0", list[tuple[int, int]]()
    for tag, text in values:
        if text:
            tags.append((tag, len(strings)))
            strings += text.encode() + b"\0"
    symbols = bytes(24)
    for name in (*defines, *uses):
        symbols += struct.pack("<IBBHQQ", len(strings), 0x11, 0, name in defines, 0, 8)
        strings += name.encode() + b"\0"
    names = b"\0" + "".join(f"{name}\0" for name in SECTIONS).encode()
    # The size of the dynamic segment is known before its tags say where the strings are.
    parts = {".dynstr": strings, ".dynamic": bytes(16 * (len(tags) + 3)), ".interp": interpreter.encode() + b"\0"}
    rodata = "".join(f"{text}\0" for text in texts).encode()
    parts |= {".nv_fatbin": fatbin, ".dynsym": symbols, ".rodata": rodata, ".shstrtab": names}
    places, end = dict[str, int](), 64 + 4 * 56
    for name, data in parts.items():
        places[name] = end
        end += len(data) + -len(data) % 8
    tags += [(STRTAB, places[".dynstr"]), (STRSZ, len(strings)), (0, 0)]
    parts[".dynamic"] = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    sections = [bytes(64)]
    for name, kind in SECTIONS.items():
        at, size, entry = places[name], len(parts[name]), {".dynamic": 16, ".dynsym": 24}.get(name, 0)
        number = names.index(f"{name}\0".encode())
        sections.append(struct.pack("<IIQQQQIIQQ", number, kind, 2, at, at, size, 1, 0, 8, entry))
    segments = [(LOAD, 0, end), *((kind, places[name], len(parts[name])) for kind, name in (
        (DYNAMIC, ".dynamic"), (INTERP if interpreter else 0, ".interp"),
    ))]  # fmt: skip
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, 64, end, 0, 64, 56, 4, 64, len(sections),
        len(sections) - 1,
    )  # fmt: skip
    programs = b"".join(struct.pack("<IIQQQQQQ", kind, 4, at, at, at, size, size, 8) for kind, at, size in segments)
    programs += struct.pack("<IIQQQQQQ", STACK, 6 + executable_stack, 0, 0, 0, 0, 0, 16)
    return header + programs + b"".join(data + bytes(-len(data) % 8) for data in parts.values()) + b"".join(sections)


def fatbin(*parts: tuple[str, int, int]) -> bytes:
    """Return a fat binary with these parts: `code` or `ptx`, capability, flags. Some have longer headers."""
    data = b""
    for i, (kind, capability, flags) in enumerate(parts):
        payload = b"\x28\xb5\x2f\xfd" + bytes(12)
        more = 16 * (i % 2)
        header = struct.pack(
            "<HHIQIIIIQQ", 1 if kind == "ptx" else 2, 0x101, 64 + more, len(payload), 13, 0, 8, capability, 0, flags
        )
        data += header.ljust(64 + more, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(data)) + data


def cache(paths: Iterable[str]) -> bytes:
    """Return an `/etc/ld.so.cache` with these libraries."""
    found = list(paths)
    strings = b""
    entries = b""
    start = 48 + 24 * len(found)
    for path in found:
        name = path.rpartition("/")[2]
        at = start + len(strings)
        strings += name.encode() + b"\0" + path.encode() + b"\0"
        entries += struct.pack("<iIIIQ", 0x303, at, at + len(name) + 1, 0, 0)
    return struct.pack("<20sII20x", b"glibc-ld.so.cache1.1", len(found), len(strings)) + entries + strings


def member(row: str | Mapping[str, Any]) -> Node | bytes:
    """Return a member of a layer from YAML: a text, a link (`to`), or fields of a Node, whose content may begin with
    `real` (the name of a library in REAL), a `cache`, or an ELF file with `gpu` code and other arguments of `elf`."""
    if isinstance(row, str):
        return row.encode()
    if "to" in row:
        return symlink(row["to"])
    own = {name: row[name] for name in ("mode", "type", "target", "pax", "content") if name in row}
    values = {name: value for name, value in row.items() if name not in own}
    if "gpu" in values:
        values["fatbin"] = fatbin(*map(tuple, values.pop("gpu")))
    content = (
        REAL[values.pop("real")] if "real" in values else cache(values.pop("cache", ())) if "cache" in row else b""
    )
    if values or not (own or content):
        content = elf(**values)
    own["content"] = content + own.get("content", "").encode()
    return Node(**own | ({"type": own["type"].encode()} if "type" in own else {}))
