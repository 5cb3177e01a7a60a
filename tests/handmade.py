"""Layers that are written member by member, so that they can have any feature and any fault of tar archives."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from imagebuild.oci.layout import Blob
from imagebuild.verify.files import Tree
from imagebuild.verify.layers import scan

CASES = yaml.safe_load((Path(__file__).parent / "data/layers.yaml").read_text(encoding="utf-8"))
"""Layers with features and faults, and what containerd makes of them."""
ENDS = {"nothing": 0, "zeros": 512}
"""Maps other ends of an archive than the usual two blocks of zeros to a number of zeros."""


def layers_of(case: Mapping[str, Any]) -> list[bytes]:
    """Return the layers of a case as archives."""
    *lower, top = map(handmade, case["layers"])
    return [*(layer + bytes(1024) for layer in lower), top + bytes(ENDS.get(case.get("end", ""), 1024))]


def tree_of(layers: Sequence[bytes], folder: Path) -> list[str]:
    """Return the lines of the tree that imagebuild reads."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for number, data in enumerate(layers):
        (path := folder / str(number)).write_bytes(data)
        found.append(scan(Blob(path, len(data))).numbered(number))
    return sorted(
        line(e.path, e.kind, e.mode, (e.uid, e.gid), e.sha256 or e.target, capable=e.capabilities) for e in Tree(found)
    )


def line(path: str, kind: str, mode: int, owner: tuple[int, int], content: str, *, capable: bool) -> str:
    """Return the line of a file in a tree: its kind, mode, owner, content (hash, target or numbers) and path."""
    short = content[:8] if kind == "file" else content
    words = (kind, f"{mode:o}", "{}:{}".format(*owner), short, *(["capabilities"] if capable else []), path)
    return " ".join(words).encode("ascii", "backslashreplace").decode()


def random_members(chance: random.Random) -> list[dict[str, Any]]:
    """Return the members of a layer in which the same names appear again and again, in all roles."""

    def name() -> str:
        return "/".join(chance.choices("abc", k=chance.choice((1, 1, 2, 2, 3))))

    members: list[dict[str, Any]] = []
    for _ in range(chance.randint(1, 7)):
        path = name()
        folder, _, last = path.rpartition("/")
        member: dict[str, Any] = {"n": path, "t": chance.choice("00005551223466gx"), "c": ""}
        if chance.random() < 0.15:
            hidden = chance.choice((f".wh.{last}", f".wh.{last}", ".wh..wh..opq", ".wh..wh.plnk"))
            member["n"] = f"{folder}/{hidden}".lstrip("/")
        if member["t"] == "0":
            member["c"] = chance.choice(("", "1", "22", "3" * 600))
        if member["t"] in "12":
            known = chance.choice([m["n"] for m in members] or ["a"]) if member["t"] == "1" else name()
            member["l"] = chance.choice((known, known, known, f"/{known}", f"../{name()}", f"./{name()}/"))
        if member["t"] in "34":
            member["d"] = chance.choice(((0, 0), (1, 3), (7, 300)))
        if member["t"] in "gx" or chance.random() < 0.1:
            keys = {
                "path": name(),
                "linkpath": name(),
                "uid": 7,
                "size": len(member["c"]),
                "mtime": "1.5",
                "comment": "x",
            }
            member["x"] = dict(chance.sample(sorted(keys.items()), 2))
        if chance.random() < 0.1:
            members.append({"n": "x", "t": chance.choice("LK"), "c": f"{name()}\0", "f": "gnu"})
        member |= {
            "m": chance.choice(("644", "755", "4755", "1777", "2711", "0")),
            "o": chance.choice(((0, 0), (5, 70000))),
        }
        members.append(member)
    return members


def handmade(members: Iterable[Mapping[str, Any]]) -> bytes:
    """Return an archive, written member by member, so that it can have any feature and any fault.

    Keys of a member: n(ame), t(ype), m(ode), o(wner), c(ontent), s(ize), l(ink), d(evice), f(ormat), p(refix),
    x (records of an extended header), raw (other bytes)."""
    data = b""
    for member in members:
        if "raw" in member:
            data += member["raw"].encode("latin-1") * member.get("times", 1)
            continue
        records = b"".join(map(record, member.get("x", {}).items()))
        kind, content = str(member.get("t", "0")), member.get("c", "").encode("latin-1")
        if records and kind in "xg":
            content = records
        elif records:
            data += tar_header({"n": "x", "t": "x", "f": member.get("f", "")}, len(records)) + padded(records)
        data += tar_header(member, len(content)) + padded(content)
    return data


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def record(pair: tuple[str, Any]) -> bytes:
    """Return a record of an extended header, which begins with its own length. A suffix `#` allows equal keys."""
    text = f" {pair[0].rstrip('#')}={pair[1]}\n".encode("latin-1")
    size = len(text) + len(str(len(text)))
    return str(len(text) + len(str(size))).encode() + text


def tar_header(member: Mapping[str, Any], size: int) -> bytes:
    def number(value: Any, width: int) -> bytes:
        if isinstance(value, str):
            return value.encode("latin-1").ljust(width, b"\0")
        if 0 <= value < 8 ** (width - 1):
            return f"{value:0{width - 1}o}\0".encode()
        top = 1 << (8 * width - 1)
        return bytes((int(value) & (top - 1) | top).to_bytes(width, "big"))

    uid, gid = member.get("o", (0, 0))
    major, minor = member.get("d", (0, 0))
    magic = {"gnu": b"ustar  \0", "v7": bytes(8)}.get(member.get("f", ""), b"ustar\x0000")
    fields = (
        member.get("n", "").encode("latin-1").ljust(100, b"\0"),
        *(number(v, 8) for v in (int(str(member.get("m", "644")), 8), uid, gid)),
        number(member.get("s", size), 12), number(member.get("time", 0), 12), b" " * 8,
        str(member.get("t", "0")).encode("latin-1"), member.get("l", "").encode("latin-1").ljust(100, b"\0"), magic,
        bytes(64), number(major, 8), number(minor, 8), member.get("p", "").encode("latin-1").ljust(155, b"\0"),
    )  # fmt: skip
    block = b"".join(fields).ljust(508, b"\0") + (b"tar\0" if member.get("f") == "star" else bytes(4))
    checksum = sum(block) + member.get("damage", 0)
    return block[:148] + f"{checksum:06o}\0 ".encode() + block[156:]
