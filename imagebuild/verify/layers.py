"""Read layers once, several at a time; keep what rules need, and look for secrets."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import signal
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import IO, Any, cast

from imagebuild.core.errors import ResultError
from imagebuild.oci.layout import CHUNK, KEPT_SIZE, Blob, layer_members, member_path
from imagebuild.verify import elf
from imagebuild.verify.files import Entry, Kind, Layer

OVERLAP = 16 << 10
"""Bytes that are looked at again with the next piece: more than any secret or certificate is long."""
FEWEST_DIFFERENT = 8
"""Characters that a random token has at least; those of examples are mostly one letter, repeated."""


@dataclass(frozen=True)
class Pattern:
    """A kind of secret."""

    name: str
    literals: tuple[bytes, ...]
    """One of these is in every match: they are found much faster than the expression."""
    expression: re.Pattern[bytes]
    binary: bool = False
    """Looked for in files that are not text, too."""


def _pattern(name: str, literals: str, expression: str, *, binary: bool = False) -> Pattern:
    return Pattern(name, tuple(literals.encode().split()), re.compile(expression.encode()), binary)


_B, _E = r"(?<![A-Za-z0-9_-])", r"(?![A-Za-z0-9_-])"
PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\s+([A-Za-z0-9+/=\s]{64,}?)-----END CERTIFICATE-----")
PATTERNS = (
    Pattern(
        "private key",
        (b"PRIVATE KEY",),
        re.compile(
            rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\\r|\\n|\s)+"
            rb"(?:[A-Za-z-]+: [^\n]*\n)*\s*(?P<body>[A-Za-z0-9+/=]{32})"
        ),
        binary=True,
    ),
    _pattern("PuTTY private key", "Private-Lines:", r"Private-Lines: \d+\s+(?P<body>[A-Za-z0-9+/=]{32})"),
    _pattern("AWS access key", "AKIA ASIA", rf"{_B}(?:AKIA|ASIA)(?P<body>[A-Z2-7]{{16}}){_E}"),
    _pattern("AWS secret key", "aws_secret_access_key", r"aws_secret_access_key\s*[=:]\s*[\"']?(?P<body>[\w/+]{40})\b"),
    _pattern("GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_", rf"{_B}gh[pousr]_(?P<body>[A-Za-z0-9]{{36,}}){_E}"),
    _pattern("GitHub token", "github_pat_", rf"{_B}github_pat_(?P<body>\w{{70,}}){_E}"),
    _pattern("GitLab token", "glpat- gldt- glrt-", rf"{_B}gl(?:pat|dt|rt)-(?P<body>[\w-]{{20,}}){_E}"),
    _pattern("Hugging Face token", "hf_", rf"{_B}hf_(?P<body>[A-Za-z]{{34}}){_E}"),
    _pattern("Slack token", "xoxb- xoxp- xoxa- xoxr- xoxs-", rf"{_B}xox[abprs]-(?P<body>\d{{8,}}-[\w-]{{20,}})"),
    _pattern("npm token", "npm_", rf"{_B}npm_(?P<body>[A-Za-z0-9]{{36}}){_E}"),
    _pattern("Python index token", "pypi-AgE", rf"{_B}pypi-AgE(?P<body>[\w-]{{50,}})"),
    _pattern("Google API key", "AIza", rf"{_B}AIza(?P<body>[\w-]{{35}}){_E}"),
    _pattern("NVIDIA API key", "nvapi-", rf"{_B}nvapi-(?P<body>[\w-]{{60,}})"),
    _pattern("OpenAI or Anthropic key", "sk-proj- sk-ant-", rf"{_B}sk-(?:proj|ant)-(?P<body>[\w-]{{40,}})"),
)
CREDENTIALS = re.compile(rb"(?<![\w.])https?://[^\s/:@\"'<>$]+:(?P<body>[^\s/:@\"'<>${}]+)@[\w.-]+")
"""An address with a password: in settings only, as documentation is full of examples."""


def in_text(data: bytes, *, binary: bool = False) -> set[str]:
    """The kinds of secrets in some text."""
    return {
        pattern.name
        for pattern in PATTERNS
        if (pattern.binary or not binary) and any(literal in data for literal in pattern.literals)
        for match in pattern.expression.finditer(data)
        if _random(match["body"])
    }


def _random(body: bytes) -> bool:
    return len(set(body)) >= FEWEST_DIFFERENT and not body.upper().endswith(b"EXAMPLE")


class SecretScanner:
    """Takes the content of a file in pieces."""

    def __init__(self, *, settings: bool) -> None:
        self.secrets: set[str] = set()
        self.certificates: set[str] = set()
        self._settings = settings
        self._tail = b""
        self._binary: bool | None = None

    def feed(self, piece: bytes) -> None:
        if self._binary is None:
            self._binary = b"\0" in piece[:4096]
        data = self._tail + piece
        self.secrets |= in_text(data, binary=self._binary)
        if not self._binary:
            if self._settings and CREDENTIALS.search(data):
                self.secrets.add("address with a password")
            if b"BEGIN CERTIFICATE" in data:
                self.certificates |= {certificate(match[1]) for match in PEM.finditer(data)}
        self._tail = data[-OVERLAP:]


def certificate(body: bytes) -> str:
    """Names a certificate by what is between its first and last line."""
    return hashlib.sha256(b"".join(body.split())).hexdigest()[:16]


KEPT = re.compile(r"^(var/lib/dpkg/status(\.d/[^/]+)?|etc/(ld\.so\.cache|passwd|shadow))$")
"""Files whose text rules read."""
SETTINGS = re.compile(r"^(etc|root|home)/|(^|/)(pip\.conf|\.netrc|\.npmrc|\.git/config)$")
IN_MEMORY = 32 << 20
"""Bytes of an ELF file; larger ones go to a temporary file, as they are read here and there."""
WORTH_A_PROCESS = 16 << 20
"""Bytes of layers below which starting processes takes longer than reading."""


def scan(blob: Blob, number: int) -> Layer:
    """All entries of a layer. Raises ResultError if it cannot be read, or is not what its digest says."""
    with layer_members(blob) as members:
        entries = tuple(_entry(archive, member, path, number) for archive, member, path in members)
        return Layer(entries, blob.size, members.compressed)


def scan_all(blobs: Sequence[Blob], workers: int | None = None) -> tuple[Layer, ...]:
    """All layers, the largest first, in as many processes as there are CPUs. Raises ResultError as `scan`."""
    workers = min(workers or len(os.sched_getaffinity(0)), len(blobs))
    if workers < 2 or sum(blob.size for blob in blobs) < WORTH_A_PROCESS:
        return tuple(scan(blob, number) for number, blob in enumerate(blobs))
    numbers = sorted(range(len(blobs)), key=lambda number: -blobs[number].size)
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_at_once)
    try:
        running = {number: pool.submit(scan, blobs[number], number) for number in numbers}
        return tuple(running[number].result() for number in range(len(blobs)))
    except BrokenProcessPool:
        raise ResultError(
            f"{blobs[0].file}: a process that read a layer was killed; is there too little memory?"
        ) from None
    except BaseException:
        # Nobody waits for the rest of a large layer.
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _end_at_once() -> None:
    """Ctrl-C reaches all processes; there is nothing to tidy up in those that read."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, number: int) -> Entry:
    kinds: list[tuple[bool, Kind]] = [
        (member.isreg(), "file"), (member.isdir(), "folder"), (member.issym(), "symlink"), (member.islnk(), "hardlink"),
    ]  # fmt: skip
    kind: Kind = next((kind for true, kind in kinds if true), "device")
    values: dict[str, Any] = {}
    if kind == "hardlink":
        values["target"] = member_path(member.linkname) or ""
    elif kind == "symlink":
        values["target"] = member.linkname
    elif kind == "file" and member.size and (content := archive.extractfile(member)):
        values = _content(content, path, member.size)
    return Entry(
        path, kind, member.mode, member.size, layer=number,
        capabilities="SCHILY.xattr.security.capability" in member.pax_headers, **values,
    )  # fmt: skip


def _content(content: IO[bytes], path: str, size: int) -> dict[str, Any]:
    scanner = SecretScanner(settings=bool(SETTINGS.search(path)))
    values: dict[str, Any] = {}
    pieces = _pieces(content)
    first = next(pieces, b"")
    if first.startswith(elf.MAGIC):
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as copy:
            # Nobody compiles a secret in, but crypto libraries test themselves with keys.
            for piece in _again(first, pieces):
                copy.write(piece)
            try:
                values["elf"] = elf.read(cast(IO[bytes], copy))
            except elf.NotElf as error:
                values["broken"] = str(error)
    else:
        kept = bytearray() if KEPT.search(path) and size <= KEPT_SIZE else None
        for piece in _again(first, pieces):
            scanner.feed(piece)
            if kept is not None:
                kept += piece
        if kept is not None:
            values["text"] = bytes(kept)
    return {**values, "secrets": tuple(sorted(scanner.secrets)), "certificates": tuple(sorted(scanner.certificates))}


def _pieces(content: IO[bytes]) -> Iterator[bytes]:
    while piece := content.read(CHUNK):
        yield piece


def _again(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
