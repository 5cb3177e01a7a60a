"""Read layers in parallel, each only once: keep the facts about files that rules need, and search for secrets."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain
from typing import IO, Any, cast

from imagebuild.core.console import doing
from imagebuild.core.errors import ResultError
from imagebuild.oci.image import PlatformImage
from imagebuild.oci.layout import KEPT_SIZE, Blob, Layout, layer_members
from imagebuild.oci.tar import member_path
from imagebuild.verify import elf
from imagebuild.verify.elf import PATTERNS
from imagebuild.verify.facts import FactCache
from imagebuild.verify.files import FileEntry, Layer

OVERLAP = 16 << 10
"""Number of bytes at the end of each piece of a file that are searched again with the next piece, so that no secret or
certificate is missed. Secrets and certificates are shorter than this."""
FEWEST_DIFFERENT = 8
"""Minimum number of different characters in a real token. Tokens in examples usually repeat one letter."""
PEM = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----\s([A-Za-z0-9+/=\s]{64,}?)-----END ")
SECRETS = [
    (s["kind"], [t.encode() for t in s["texts"]], re.compile(s["pattern"].encode())) for s in PATTERNS["secrets"]
]
SECRET_TEXTS = [text for _, texts, _ in SECRETS for text in texts]
CREDENTIALS = re.compile(rb"(?<![\w.])https?://[^\s/:@\"'<>$]+:(?P<body>[^\s/:@\"'<>${}]+)@[\w.-]+")
ADDRESS = "address with a password"


PATHS = {kind: re.compile(pattern).search for kind, pattern in PATTERNS["paths"].items()}


def is_a(kind: str, path: str) -> bool:
    """Return whether a path is of this kind, a key of `paths` in patterns.yaml."""
    return PATHS[kind](path) is not None


def secrets_in(data: bytes, *, settings: bool = False, binary: bool = False) -> set[str]:
    """Return the kinds of secrets in some data.

    Binary data are searched only for private keys. With `settings`, text is also searched for addresses with a
    password."""
    found = {
        kind
        for kind, texts, expression in (SECRETS if any(map(data.__contains__, SECRET_TEXTS)) else ())
        if (kind == "private key" or not binary) and any(text in data for text in texts)
        for match in expression.finditer(data)
        if len(set(match["body"])) >= FEWEST_DIFFERENT and not match["body"].upper().endswith(b"EXAMPLE")
    }
    return found | ({ADDRESS} if settings and not binary and CREDENTIALS.search(data) else set())


def search(pieces: Iterable[bytes], *, settings: bool, is_text: bool = False) -> tuple[set[str], set[str]]:
    """Return the kinds of secrets in a file, and the digests of its certificates.
    A file that begins with NUL characters is treated as binary, unless `is_text` is set."""
    secrets, certificates = set[str](), set[str]()
    tail, binary = b"", False if is_text else None
    for piece in pieces:
        binary = b"\0" in piece[:4096] if binary is None else binary
        data = tail + piece
        secrets |= secrets_in(data, settings=settings, binary=binary)
        if not binary and b"CERTIFICATE-----" in data:
            bodies = (b"".join(match[1].split()) for match in PEM.finditer(data))
            certificates |= {hashlib.sha256(body).hexdigest()[:16] for body in bodies}
        tail = data[-OVERLAP:]
    return secrets, certificates


IN_MEMORY = 32 << 20
"""Maximum size in bytes of an ELF file that is parsed in memory. A larger file is parsed from a temporary file."""
WORTH_A_PROCESS = 16 << 20
"""Minimum total size of the layers in bytes for reading them with several processes. One process reads smaller layers
faster."""


def scan(blob: Blob) -> Layer:
    """Read a layer. Raises ResultError if it cannot be read or does not match its digest."""
    entries = []
    with layer_members(blob) as members:
        for archive, member, path in members:
            values: dict[str, Any] = {"target": member.target}
            if member.kind == "hardlink":
                values["target"] = member_path(member.target) or ""
            elif member.kind == "file" and member.size:
                privileged = member.capabilities or member.mode & 0o6000 > 0
                values = _content(archive.content(), path, member.size, privileged)
            values["capabilities"] = member.capabilities
            entries.append(FileEntry(path, member.kind, member.mode, member.uid, member.gid, **values))
    return Layer(tuple(entries), blob.size, blob.compression)


@doing("reading layers")
def scan_all(
    blobs: Sequence[Blob], workers: int | None = None, read: Callable[[Blob], Layer] = scan
) -> tuple[Layer, ...]:
    """Read layers in parallel with the function `read`. Raises the same errors as `scan`.
    `workers` is the number of processes. Default: the number of available CPUs."""
    workers = min(workers or len(os.sched_getaffinity(0)), len(blobs))
    if workers < 2 or sum(blob.size for blob in blobs) < WORTH_A_PROCESS:
        return tuple(map(read, blobs))
    context = multiprocessing.get_context("spawn")  # a forked copy of a process with threads may hang
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_at_once) as pool:
        try:
            return tuple(pool.map(read, blobs))
        except BrokenProcessPool:
            raise ResultError(
                f"{blobs[0].file}: a process that read a layer was killed, probably for lack of memory; "
                "run the command on a machine with more memory"
            ) from None
        except BaseException:
            # Do not wait for a process that reads a large layer.
            for child in multiprocessing.active_children():
                child.terminate()
            raise


LONGEST_SCRIPT_LINE = 256
"""Number of bytes of a script in which Linux looks for the interpreter."""


def _end_at_once() -> None:
    """Let SIGINT and SIGTERM end a worker process immediately, as it has nothing to clean up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def scan_and_keep(facts: FactCache, blob: Blob) -> Layer:
    """Read a layer, and keep the facts about it. Raises the same errors as `scan`."""
    layer = scan(blob)
    facts.keep(blob, layer)
    return layer


def read_layers(image: PlatformImage) -> tuple[tuple[Layer, ...], int]:
    """Return the facts about all layers of an image, and the number of layers that had to be read for them.
    Only these layers are fetched. Raises CommandError if the registry fails, ResultError if a layer cannot be read."""
    facts = FactCache.open()
    found = [facts.find(blob, is_local=isinstance(image.place, Layout)) for blob in image.layers]
    unknown = [number for number, layer in enumerate(found) if layer is None]
    blobs = [image.fetch(image.layers[number]) for number in unknown]
    for number, layer in zip(unknown, scan_all(blobs, read=partial(scan_and_keep, facts)), strict=True):
        found[number] = layer
    facts.clean()
    return tuple(layer.numbered(number) for number, layer in enumerate(found) if layer), len(unknown)


def _content(content: Iterator[bytes], path: str, size: int, privileged: bool) -> dict[str, Any]:
    """Return the fields of a FileEntry that describe the content of a file."""
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)

    def hashed() -> Iterator[bytes]:
        for piece in content:
            sha256.update(piece)
            if privileged:
                md5.update(piece)
            yield piece

    def hashes() -> dict[str, str]:
        return {"sha256": sha256.hexdigest()} | ({"md5": md5.hexdigest()} if privileged else {})

    pieces = hashed()
    first = next(pieces)
    pieces = chain([first], pieces)
    is_text = is_a("text", path)
    if first.startswith(elf.MAGIC) and not is_text:
        # Not searched for secrets: crypto libraries contain test keys, and nobody compiles a real key into a program.
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as copy:
            for piece in pieces:
                copy.write(piece)
            try:
                return {"elf": elf.read(cast(IO[bytes], copy)), **hashes()}
            except elf.NotElf as error:
                return {"broken": str(error), **hashes()}
    text = None
    script = first[:LONGEST_SCRIPT_LINE].partition(b"\n")[0] if first.startswith(b"#!") else b""
    if is_a("kept", path) and size <= KEPT_SIZE:
        pieces = iter([text := b"".join(pieces)])
    secrets, certificates = search(pieces, settings=is_a("settings", path), is_text=is_text)
    about = {"text": text, "script": script.decode("utf-8", "replace")}
    return {**about, "secrets": tuple(sorted(secrets)), "certificates": tuple(sorted(certificates)), **hashes()}
