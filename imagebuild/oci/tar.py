"""Tar archives as engines read them: a reader that agrees with Go's archive/tar, and refuses what it does not know.

Python's tarfile reads some archives differently. For example, it applies global headers, which engines ignore."""

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import IO, Literal

import zstandard

CHUNK = 1 << 20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""The first bytes of compressed data."""
BLOCK = 512
MOST_HEADER = 1 << 20
"""Maximum size in bytes of an extended header or a long name. Go has the same limit."""
MOST_NAME, MOST_PATH = 255, 4095
"""Maximum length in bytes of a file name and of a path in Linux."""
MOST_MEMBERS = 2_000_000
MOST_UNPACKED = 64 << 30
"""Maximum size in bytes of an archive after decompression."""
MOST_HOLES = 4 << 30
"""Maximum total size in bytes of the holes in sparse files. A tiny archive can describe holes of any size."""
MOST_ID = 2**32 - 2
"""Largest id of a user or group in Linux."""
MOST_MAJOR, MOST_MINOR = 1 << 12, 1 << 20
"""Limits of the numbers of a device in Linux."""
MemberKind = Literal["file", "folder", "symlink", "hardlink", "device", "fifo", "global"]
"""Kind of a member of an archive. `global` is a global header, whose content engines ignore."""
KINDS: Mapping[bytes, MemberKind] = {
    b"0": "file", b"\0": "file", b"1": "hardlink", b"2": "symlink", b"3": "device", b"4": "device", b"5": "folder",
    b"6": "fifo", b"g": "global",
}  # fmt: skip
BODILESS = b"123456"
"""Types of members without content. Their size is ignored."""
RECORD = re.compile(rb"(\d{1,8}) ([^=\0]+)=")
INTEGER, TIME = re.compile(r"[+-]?\d{1,18}"), re.compile(r"[+-]?\d{1,18}(\.\d*)?")
SPARSE = "GNU.sparse."


class TarError(ValueError):
    """The error if an archive is damaged, or has a feature that engines do not unpack."""


@dataclass(slots=True)
class Member:
    """A member of an archive, described by all its headers together."""

    name: str
    kind: MemberKind
    mode: int
    uid: int
    gid: int
    size: int
    target: str = ""
    """Target of a link as written. For a device: its type (`c` or `b`), and its major and minor number."""
    capabilities: bool = False


def decompressed(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the decompressed content of a file, in pieces. The file may be uncompressed.
    Raises errors of zlib and zstandard, OSError or TarError. Truncated zstd data do not cause an error."""
    head = file.read(CHUNK)
    if head.startswith(GZIP):
        yield from _gunzip(chain([head], iter(lambda: file.read(CHUNK), b"")))
        return
    if head.startswith(ZSTD):
        file.seek(0)
        head, file = b"", zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    yield from chain([head], iter(lambda: file.read(CHUNK), b""))


def _gunzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the decompressed content of concatenated gzip members, each piece no longer than CHUNK."""
    member = zlib.decompressobj(31)
    for piece in pieces:
        data = piece
        while data:
            if member.eof:
                member = zlib.decompressobj(31)
            yield member.decompress(data, CHUNK)
            data = member.unused_data if member.eof else member.unconsumed_tail
    while not member.eof:
        if not (rest := member.decompress(member.unconsumed_tail, CHUNK)):
            raise TarError("the compressed data are truncated")
        yield rest


def member_path(name: str) -> str | None:
    """Return the path of a member of a layer, relative to the root of the image; None for the root itself.
    Raises TarError if the path leads out of the image, or is longer than Linux allows."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise TarError(f"{name!r} leads out of the image")
    path = "/".join(parts)
    # The limits are in bytes. Most paths are so short that they need not be encoded.
    if 4 * len(path) > MOST_NAME and (len(_raw(path)) > MOST_PATH or max(map(len, map(_raw, parts))) > MOST_NAME):
        raise TarError(f"{name[:MOST_NAME]!r} is longer than Linux allows")
    return path or None


def _raw(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


@lru_cache(1024)
def _number(field: bytes) -> int:
    """Return the number in a field of a header: octal digits, or a binary number if the first bit is set."""
    if field[0] & 0x80:
        bits = 8 * len(field) - 1
        value = int.from_bytes(field) & ((1 << bits) - 1)
        value -= (1 << bits) if field[0] & 0x40 else 0
        if not -(1 << 63) <= value < 1 << 63:
            raise TarError("a number in a header is too large")
        return value
    digits = field.strip(b" \0").partition(b"\0")[0]
    if digits and not digits.isdigit():
        raise TarError(f"a header contains {digits!r} instead of a number")
    return int(digits or b"0", 8)


def _records(data: bytes) -> dict[str, str]:
    records: dict[str, str] = {}
    sparse: list[str] = []
    at = 0
    while at < len(data):
        head = RECORD.match(data, at)
        end = at + int(head[1]) if head else 0
        if not head or not head.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise TarError("an extended header is malformed")
        key, value = (part.decode(errors="surrogateescape") for part in (head[2], data[head.end() : end - 1]))
        if key in ("path", "linkpath", "uname", "gname") and "\0" in value:
            raise TarError(f"an extended header has a {key} with a NUL character")
        if key in (f"{SPARSE}offset", f"{SPARSE}numbytes"):
            if key != f"{SPARSE}{('offset', 'numbytes')[len(sparse) % 2]}" or "," in value:
                raise TarError("the holes of a sparse file are malformed")
            sparse.append(value)
        else:
            records[key] = value
        at = end
    return records | ({f"{SPARSE}map": ",".join(sparse)} if sparse else {})


def _integer(text: str) -> int:
    if not INTEGER.fullmatch(text):
        raise TarError(f"an extended header contains {text[:40]!r} instead of a number")
    return int(text)


class TarArchive:
    """A tar archive that is read once, from the beginning to the end."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = filter(None, pieces)
        self._piece, self._at = b"", 0
        self._hash, self._total, self._holes = hashlib.sha256(), 0, 0
        self._left = self._padding = 0
        """Number of bytes of the current member that are not read yet, and of the bytes behind it that fill a block."""
        self._map: list[tuple[int, int]] | None = None
        """Offset and length of each part of the current member that is stored; None if the member is not sparse."""
        self._size = 0

    def __iter__(self) -> Iterator[Member]:
        """Yield the members. Raises TarError for damaged archives and for features that engines do not unpack."""
        for number, member in enumerate(self._members()):
            if number >= MOST_MEMBERS:
                raise TarError(f"contains more than {MOST_MEMBERS} members")
            yield member

    def content(self) -> Iterator[bytes]:
        """Yield the content of the current member in pieces, with the holes of a sparse file."""
        at = 0
        for offset, length in self._map if self._map is not None else [(0, self._left)]:
            yield from _zeros(offset - at)
            for start in range(0, length, CHUNK):
                yield self._take(min(CHUNK, length - start))
            at = offset + length
        yield from _zeros(self._size - at)

    def digest(self) -> str:
        """Read the archive to its end, also behind its last member, and return the digest of all bytes."""
        while self._next():
            pass
        return f"sha256:{self._hash.hexdigest()}"

    def _next(self) -> bytes:
        self._piece, self._at = next(self._pieces, b""), 0
        self._total += len(self._piece)
        if self._total > MOST_UNPACKED:
            raise TarError(f"is larger than {MOST_UNPACKED >> 30} GiB after decompression")
        self._hash.update(self._piece)
        return self._piece

    def _read(self, size: int) -> bytes:
        """Return this number of bytes, or fewer at the end of the archive."""
        end = self._at + size
        if end > len(self._piece):
            parts, size = [self._piece[self._at :]], end - len(self._piece)
            while size > 0 and self._next():
                parts.append(self._piece[:size])
                size -= len(parts[-1])
                self._at = len(parts[-1])
            return b"".join(parts)
        data = self._piece[self._at : end]
        self._at = end
        return data

    def _take(self, size: int) -> bytes:
        data = self._read(size)
        if len(data) < size:
            raise TarError("ends in the middle of a file")
        self._left -= size
        return data

    def _header(self) -> bytes:
        """Return the next header; empty at the end of the archive."""
        block = self._read(BLOCK)
        if block == bytes(BLOCK):
            if any(second := self._read(BLOCK)) or len(second) % BLOCK:
                raise TarError("a block of zeros is followed by other data")
            return b""
        if not block and self._total:
            return b""  # Go accepts archives without the blocks of zeros that mark the end.
        total = sum(block) - sum(block[148:156]) + 8 * 32
        signed = total - 256 * sum(byte > 127 for byte in block[:148] + block[156:]) if not block.isascii() else total
        if len(block) < BLOCK or _number(block[148:156]) not in (total, signed):
            raise TarError("a header is damaged or missing")
        return block

    def _special(self, size: int) -> bytes:
        if size > MOST_HEADER:
            raise TarError(f"an extended header is larger than {MOST_HEADER >> 20} MiB")
        return self._take(size)

    def _members(self) -> Iterator[Member]:
        records: dict[str, str] = {}
        long_name = long_link = ""
        while True:
            while self._left:
                self._take(min(CHUNK, self._left))
            self._read(self._padding)
            self._map = None
            if not (block := self._header()):
                return
            type_, member = _plain_header(block)
            self._set_size(0 if type_ in BODILESS else member.size)
            if type_ == b"x":  # replaces an earlier extended header
                records = _records(self._special(member.size))
            elif type_ == b"L":
                long_name = _text(self._special(member.size))
            elif type_ == b"K":
                long_link = _text(self._special(member.size))
            else:
                if type_ == b"g":
                    member.name = _records(self._special(member.size)).get("path") or member.name
                else:
                    self._merge(member, type_, records, long_name, long_link)
                yield member
                records, long_name, long_link = {}, "", ""

    def _merge(self, member: Member, type_: bytes, records: Mapping[str, str], long_name: str, long_link: str) -> None:
        for key in ("mtime", "atime", "ctime"):
            if (value := records.get(key)) and not TIME.fullmatch(value):
                raise TarError(f"an extended header contains {value[:40]!r} instead of a time")
        member.name = long_name or records.get("path") or member.name
        if type_ == b"\0" and member.name.endswith("/"):
            member.kind, type_ = "folder", b"5"
        for key in ("size", "uid", "gid"):
            if value := records.get(key):
                setattr(member, key, _integer(value))
        if member.kind == "symlink":
            member.mode = 0o777
        if member.kind in ("symlink", "hardlink"):
            member.target = long_link or records.get("linkpath") or member.target
        member.capabilities = "SCHILY.xattr.security.capability" in records
        self._set_size(0 if type_ in BODILESS else member.size)
        member.name = self._make_sparse(records, member.name, has_body=type_ not in BODILESS)
        member.size = self._size
        if "\0" in member.name:
            raise TarError(f"{member.name!r} contains a NUL character")
        if not 0 <= member.uid <= MOST_ID or not 0 <= member.gid <= MOST_ID:
            raise TarError(f"{member.name!r} has the owner {member.uid}:{member.gid}, which Linux cannot store")

    def _set_size(self, size: int) -> None:
        if size < 0:
            raise TarError("a member has a negative size")
        self._left = self._size = size
        self._padding = -size % BLOCK

    def _make_sparse(self, records: Mapping[str, str], name: str, *, has_body: bool) -> str:
        """Read where the current member has holes, if it is a sparse file of GNU tar. Return its name."""
        version = (records.get(f"{SPARSE}major", ""), records.get(f"{SPARSE}minor", ""))
        listed = records.get(f"{SPARSE}map", "")
        if version not in (("0", "0"), ("0", "1"), ("1", "0")) and (any(version) or not listed):
            return name
        size = records.get(f"{SPARSE}size") or records.get(f"{SPARSE}realsize")
        self._size = _integer(size) if size else self._size
        if version == ("1", "0"):
            text = b""
            wanted = 1
            while text.count(b"\n") < wanted:
                if self._left < BLOCK or len(text) > MOST_HEADER:
                    raise TarError(f"{name!r}: the holes of the sparse file are malformed")
                text += self._take(BLOCK)
                first = text.partition(b"\n")[0].decode("ascii", "replace")
                wanted = 1 + 2 * _integer(first) if b"\n" in text else 1
            lines = text.decode("ascii", "replace").split("\n")[:wanted]
        else:
            lines = [records.get(f"{SPARSE}numblocks", ""), *filter(None, listed.split(","))]
        numbers = [_integer(line) for line in lines]
        self._map = list(zip(numbers[1::2], numbers[2::2], strict=False))
        starts = [*(offset for offset, _ in self._map), self._size]
        in_order = all(min(pair) >= 0 and sum(pair) <= after for pair, after in zip(self._map, starts[1:], strict=True))
        stored = sum(length for _, length in self._map)
        if not has_body or len(numbers) != 1 + 2 * numbers[0] or not in_order or stored != self._left or self._size < 0:
            raise TarError(f"{name!r}: the holes of the sparse file are malformed")
        self._holes += self._size - stored
        if self._holes > MOST_HOLES:
            raise TarError(f"the holes of sparse files are larger than {MOST_HOLES >> 30} GiB")
        return records.get(f"{SPARSE}name") or name


def _plain_header(block: bytes) -> tuple[bytes, Member]:
    type_, name, target = block[156:157], _text(block[:100]), ""
    fields = (block[100:108], block[108:116], block[116:124], block[124:136], block[136:148])
    mode, uid, gid, size, _ = map(_number, fields)
    is_posix, is_gnu = block[257:263] == b"ustar\0", block[257:265] == b"ustar  \0"
    if is_posix and block[508:] == b"tar\0":
        raise TarError("is in the format of star, which imagebuild does not read")
    numbers = [_number(block[at : at + 8]) if is_posix or is_gnu else 0 for at in (329, 337)]
    prefix = _text(block[345:500]) if is_posix else _prefix_of_gnu(block) if is_gnu else ""
    name = f"{prefix}/{name}" if prefix else name
    if type_ not in KINDS and type_ not in b"xLK":
        raise TarError(f"{name!r} has the type {_text(type_)!r}, which engines do not unpack")
    if type_ in b"12":
        target = _text(block[157:257])
    elif type_ in b"34":
        if not (0 <= numbers[0] < MOST_MAJOR and 0 <= numbers[1] < MOST_MINOR):
            raise TarError(f"{name!r} is a device with numbers that Linux cannot store")
        target = f"{'c' if type_ == b'3' else 'b'} {numbers[0]} {numbers[1]}"
    return type_, Member(name, KINDS.get(type_, "file"), mode & 0o7777, uid, gid, size, target)


def _prefix_of_gnu(block: bytes) -> str:
    """Return the prefix of the name in a header of GNU tar. Only old versions of Go wrote one, in place of times."""
    try:
        for field in (block[345:357], block[357:369]):
            if field[0]:
                _number(field)
    except ValueError:
        prefix = _text(block[345:500])
        return prefix if prefix.isascii() else ""
    return ""


def _zeros(size: int) -> Iterator[bytes]:
    for at in range(0, size, CHUNK):
        yield bytes(min(CHUNK, size - at))
