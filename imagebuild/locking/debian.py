"""What repositories of Debian packages consist of: releases, indexes, versions. Pure."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import posixpath
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cmp_to_key
from itertools import zip_longest

from imagebuild.errors import CommandError, ResultError

UNPACK: Mapping[str, Callable[[bytes], bytes]] = {
    "Packages.xz": lzma.decompress,
    "Packages.gz": gzip.decompress,
    "Packages.bz2": bz2.decompress,
    "Packages": bytes,
}
"""Forms of the index of packages, the smallest first."""
HASHES = {"SHA256": hashlib.sha256, "SHA512": hashlib.sha512}


def fields(text: str) -> dict[str, str]:
    """The fields of one paragraph; continued lines keep their line breaks."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line[:1].isspace():
            found[name] = f"{found.get(name, '')}\n{line.strip()}"
        elif ":" in line:
            name, _, value = line.partition(":")
            found[name] = value.strip()
    return found


def flat_base(url: str, suite: str) -> str | None:
    """The folder of a flat repository, with a slash at the end; None for a suite below `dists/`."""
    if not suite.endswith("/"):
        return None
    path = posixpath.normpath(suite.lstrip("/")) if suite.strip("/") else "."
    return f"{url.rstrip('/')}/" if path == "." else f"{url.rstrip('/')}/{path}/"


def expired(release: Mapping[str, str], now: datetime) -> str | None:
    """Until when the release was valid, if that is over. Raises ResultError for a date that is none."""
    if not (text := release.get("Valid-Until")):
        return None
    try:
        return text if parsedate_to_datetime(text) < now else None
    except ValueError:
        raise ResultError(f"Valid-Until is no date: {text!r}") from None


def indexes(release: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """The indexes of packages that a release lists: (path, algorithm, hash), the smallest first."""
    for algorithm in HASHES:
        listed = {}
        for line in release.get(algorithm, "").splitlines():
            if len(parts := line.split()) == 3:
                listed[posixpath.normpath(parts[2])] = parts[0]
        for path in UNPACK:
            if path in listed:
                yield path, algorithm, listed[path]


def unpacked(path: str, algorithm: str, wanted: str, content: bytes) -> str:
    """The text of an index. Raises CommandError if it is not the one that the release lists."""
    got = HASHES[algorithm](content).hexdigest()
    if got != wanted.lower():
        raise CommandError(f"{path} has the {algorithm} {got}, but the signed release says {wanted}")
    try:
        return UNPACK[path](content).decode(errors="replace")
    except (OSError, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ResultError(f"{path} cannot be unpacked: {error}") from None


def versions(index: str, names: Iterable[str]) -> dict[str, list[str]]:
    """Package → its versions in an index, oldest first, for the names that are asked for."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for paragraph in re.split(r"\n[ \t]*\n", index.replace("\r\n", "\n")):
        name = re.search(r"^Package:[ \t]*(\S+)", paragraph, re.MULTILINE)
        version = re.search(r"^Version:[ \t]*(\S+)", paragraph, re.MULTILINE)
        if name and version and name[1] in found:
            found[name[1]].add(version[1])
    return {name: sorted(all_of_it, key=version_key) for name, all_of_it in found.items()}


def compare(a: str, b: str) -> int:
    """Which of two versions is newer, as Debian Policy 5.6.12 says: below, at or above 0."""
    for x, y in zip(_parts(a), _parts(b), strict=True):
        if order := _compare_part(x, y):
            return order
    return 0


version_key = cmp_to_key(compare)


def _parts(version: str) -> tuple[str, str, str]:
    """Epoch, upstream version, revision."""
    epoch, colon, rest = version.partition(":")
    if not colon:
        epoch, rest = "0", version
    upstream, dash, revision = rest.rpartition("-")
    return (epoch, upstream, revision) if dash else (epoch, rest, "0")


def _compare_part(a: str, b: str) -> int:
    """Alternating: text, in which `~` sorts before the end and letters before other signs; numbers."""
    pairs = zip_longest(re.findall(r"(\D*)(\d*)", a), re.findall(r"(\D*)(\d*)", b), fillvalue=("", ""))
    for (text_a, number_a), (text_b, number_b) in pairs:
        for x, y in zip_longest(map(_order, text_a), map(_order, text_b), fillvalue=0):
            if x != y:
                return x - y
        if difference := int(number_a or 0) - int(number_b or 0):
            return difference
    return 0


def _order(sign: str) -> int:
    if sign == "~":
        return -1
    return ord(sign) if sign.isalpha() else ord(sign) + 256
