"""Tables of files in layers: engines that fetch single files from a registry read them instead of the archive."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from imagebuild.core.errors import ResultError
from imagebuild.core.yaml import distinct_keys
from imagebuild.oci.image import PlatformImage
from imagebuild.oci.layout import MOST_BYTES, Blob, annotations_of, layer_members
from imagebuild.oci.tar import CHUNK, Member, TarArchive, decompressed, member_path

TABLE, DIGEST = "stargz.index.json", "containerd.io/snapshot/stargz/toc.digest"
"""File with the table of an eStargz layer, and the annotation by which stargz-snapshotter knows the table."""
FOOTER = 51
"""Size in bytes of the end of an eStargz layer, which contains the place of the table."""
OF_TABLES = re.compile(r"containerd\.io/snapshot/|io\.(github\.)?containers\.zstd-chunked\.|com\.amazon\.soci\.")
"""Matches annotations of images and layers that make engines read a table."""
PIECES = (4 << 20) // CHUNK
"""Number of pieces of an archive's content in a chunk, which is 4 MiB in eStargz."""
IGNORED = {"modtime", "offset", "innerOffset", "userName", "groupName"}
"""Keys that do not change a file. Wherever an engine reads a chunk, it compares the chunk's digest."""
TYPES = {"file": "reg", "folder": "dir", "c": "char", "b": "block"}
"""Maps kinds of members, and of devices, to their names in a table, if these differ."""


def check_tables(image: PlatformImage) -> None:
    """Raise ResultError if an engine that reads the table of a layer may see other files than the layer's archive has.

    The annotation proves only that the table is of the maker of the image. Layers with a table are read again, others
    are not fetched. Raises CommandError if the registry fails."""
    own = annotations_of(image.manifest.document)
    for layer in image.layers:
        unknown = [name for name in (*own, *layer.annotations) if OF_TABLES.match(name) and name != DIGEST]
        problem = f"its annotation {unknown[0]} is of a table that imagebuild cannot read" if unknown else ""
        if digest := layer.annotations.get(DIGEST):
            problem = problem or _difference(image.fetch(layer), digest)
        if problem:
            raise ResultError(f"{image.name}: layer {layer.digest}: {problem}; push the image without such tables")


def _difference(layer: Blob, digest: str) -> str:
    """Return how the table of an eStargz layer differs from its archive; empty if it does not."""
    rows = list[dict[str, Any]]()
    with layer_members(layer) as members:
        for archive, member, path in members:
            if path != TABLE and member.kind != "global":
                rows += _rows(member, path, archive.content() if member.kind == "file" else ())
    table = _table(layer)
    if f"sha256:{hashlib.sha256(table).hexdigest()}" != digest:
        return f"it does not contain the table {digest}"
    ours = [{key: value for key, value in row.items() if value} for row in rows]
    try:
        document = json.loads(table, object_pairs_hook=distinct_keys)
        if more := [key for key in document if key not in ("version", "entries")]:
            raise ValueError(f"it contains {more[0]!r}")  # Go ignores the case of keys
        listed = [*_listed(document["entries"])]
        _check_meaning([row for row in ours if row["type"] != "chunk"])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        return f"its table of files cannot be read: {type(error).__name__}: {error}"
    pairs = zip([*ours, {}], [*listed, {}], strict=False)
    different = next((mine.get("name") or its.get("name") for mine, its in pairs if mine != its), "")
    return f"its table of files differs from its archive: /{different}" if different else ""


def _check_meaning(files: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for files that mean something else in a table than in an archive, where the order counts, links
    to folders are followed, and a hard link can change its file."""
    named = {file["name"]: file for file in files}
    if len(named) < len(files):
        raise ValueError("a file appears twice")
    for name, file in named.items():
        f"{name}{file.get('linkName')}".encode()  # Go replaces what is not UTF-8
        folders = accumulate(name.split("/")[:-1], "{}/{}".format)
        if any(named[folder]["type"] != "dir" for folder in folders if folder in named):
            raise ValueError(f"/{name} is not in a folder")
        if file["type"] == "hardlink":
            source = named[member_path(file["linkName"]) or ""]
            kept = ("uid", "gid", *(["mode"] if source["type"] != "symlink" else []))
            if any(file.get(key) != source.get(key) for key in kept):
                raise ValueError(f"the hard link /{name} changes its file")


def _table(layer: Blob) -> bytes:
    """Return the table of an eStargz layer, which may be behind the end of its archive. Empty if it has none."""
    with layer.open() as file:
        file.seek(max(0, layer.size - FOOTER))
        if place := re.search(rb"([0-9a-f]{16})STARGZ", file.read()):
            file.seek(int(place[1], 16))
            archive = TarArchive(decompressed(file))
            for member in archive:
                if member.name == TABLE and member.size <= MOST_BYTES:
                    return b"".join(archive.content())
    return b""


def _rows(member: Member, path: str, content: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table for a member of an archive: one, and one more for each further chunk of its content."""
    target, *numbers = member.target.split(" ") if member.kind == "device" else [member.target]
    row: dict[str, Any] = {"name": path, "type": TYPES.get(target if numbers else member.kind, member.kind)}
    row["linkName"] = "" if numbers else target
    row |= dict(zip(("devMajor", "devMinor"), map(int, numbers), strict=False))
    row |= {"mode": member.mode & 0o7777 if member.kind != "symlink" else 0, "uid": member.uid, "gid": member.gid}
    row |= {"xattrs": ["security.capability"] if member.capabilities else []}
    whole, chunks = hashlib.sha256(), list[Any]()
    for number, piece in enumerate(content):
        chunks += [hashlib.sha256()] if number % PIECES == 0 else []
        chunks[-1].update(piece)
        whole.update(piece)
    if member.kind == "file":
        row |= {"size": member.size, "digest": f"sha256:{whole.hexdigest()}"}
    for number, chunk in enumerate(chunks):
        begin, size = number * PIECES * CHUNK, PIECES * CHUNK
        row |= {"chunkOffset": begin, "chunkSize": size if member.size - begin >= size else 0}
        yield row | {"chunkDigest": f"sha256:{chunk.hexdigest()}"}
        row = {"name": path, "type": "chunk"}
    if not chunks:
        yield row


def _listed(entries: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table in the form of `_rows`, without empty values."""
    for entry in entries:
        row = {key: value for key, value in entry.items() if key not in IGNORED}
        row |= {"name": member_path(row["name"]), "xattrs": sorted(row.get("xattrs", ()))}
        row["mode"] = row.get("mode", 0) & 0o7777 if row["type"] != "symlink" else 0
        row = {key: value for key, value in row.items() if value}
        if "name" in row:
            yield row
        elif row != {"type": "dir", "mode": 0o755}:  # engines do not take the root folder from an archive
            raise ValueError(f"the root folder is {row}")
