"""Read a few files of an image, from its topmost layer down, and no layer below the one that settles them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from imagebuild.inspection.layout import Blob
from imagebuild.inspection.scan import KEPT_SIZE, reading
from imagebuild.inspection.tree import OPAQUE, WHITEOUT


@dataclass(frozen=True)
class Part:
    """What a layer says about the files that are looked for."""

    files: Mapping[str, bytes]
    hides: frozenset[str]
    """Paths of which lower layers do not count."""


@dataclass(frozen=True)
class Wanted:
    """Files to look for: exact paths, and folders whose files count; neither through symlinks."""

    paths: tuple[str, ...]
    folders: tuple[str, ...] = ()

    def part(self, blob: Blob) -> Part:
        """Read a layer, all of it. Raises ResultError if it cannot be read, or is not what its digest says."""
        files: dict[str, bytes] = {}
        hides: set[str] = set()
        with reading(blob) as members:
            for archive, member, path in members:
                folder, _, name = path.rpartition("/")
                if name == OPAQUE:
                    hides.add(folder)
                elif name.startswith(WHITEOUT):
                    hides.add(f"{folder}/{name.removeprefix(WHITEOUT)}".lstrip("/"))
                elif path in self.paths or folder in self.folders:
                    content = archive.extractfile(member) if member.isreg() and member.size <= KEPT_SIZE else None
                    if content:
                        files[path] = content.read()
                    else:
                        hides.add(path)
        return Part(files, frozenset(hides))


DPKG = Wanted(("var/lib/dpkg/status",), ("var/lib/dpkg/status.d",))
"""What is installed; images without dpkg itself have a file for each package."""
DISTRIBUTION = Wanted((*DPKG.paths, "usr/lib/os-release", "etc/os-release"), DPKG.folders)


def files(wanted: Wanted, layers: Iterable[Callable[[], Part]]) -> dict[str, bytes]:
    """The files as a container sees them; `layers` begin with the topmost, and are asked for only where needed."""
    found: dict[str, bytes] = {}
    hidden: set[str] = set()
    for part in layers:
        said = part()
        found |= {path: text for path, text in said.files.items() if path not in found and not _below(path, hidden)}
        hidden |= said.hides
        if all(path in found or _below(path, hidden) for path in wanted.paths):
            # Where there is a list of all packages, nobody adds files for single ones.
            break
    return found


def dpkg_status(found: Mapping[str, bytes]) -> str | None:
    """The list of packages, in the form of dpkg's; None if there is none."""
    if (whole := found.get(DPKG.paths[0])) is not None:
        return whole.decode("utf-8", "replace")
    parts = [
        found[path].decode("utf-8", "replace").strip()
        for path in sorted(found)
        if path.startswith(f"{DPKG.folders[0]}/") and not path.endswith(".md5sums")
    ]
    return "\n\n".join(parts) + "\n" if parts else None


def _below(path: str, hidden: set[str]) -> bool:
    """Whether the path, or a folder that it lies in, is hidden."""
    parts = path.split("/")
    return "" in hidden or any("/".join(parts[:n]) in hidden for n in range(1, len(parts) + 1))
