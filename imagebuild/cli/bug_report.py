"""The command `imagebuild bug-report`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from imagebuild import __version__
from imagebuild.cli import options
from imagebuild.cli.app import table

ENDS = (".json", ".log", ".txt", "Dockerfile")
"""Ends of the names of files that are packed from the folder of the builds."""
LARGEST, MOST, DEEPEST = 16 << 20, 500, 20
"""Maximum size in bytes of a file, of which otherwise only the end is packed, maximum number of files, and maximum
number of folders in a path."""


@options.command()
def bug_report(project: options.ProjectFiles, folder: Path, output: Path) -> None:
    from imagebuild.core.console import format_size, out, print_table, redacted_text, visible
    from imagebuild.core.files import write_bytes, write_text
    from imagebuild.core.run import MODULE, run_program

    place, about, rows = project.folder, table("bug_report")["parts"], list[tuple[str, str, str]]()
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as scratch:
        made, top = Path(scratch, "made"), Path(scratch, "imagebuild-bug-report")
        made.mkdir()
        where = {options.PROJECT_VARIABLE: str(project.root)} if project.root else {}
        where["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # where this process finds imagebuild
        own = (*MODULE, "imagebuild")
        run_program("bash", str(Path(__file__).with_suffix(".sh")), str(made), str(folder), *own, env=where)
        files = [(f"folder/{path.relative_to(folder)}", path) for path in files_in(folder, ENDS)]
        link = f"{folder} is a link; to pack its files, name the folder to which it leads"
        notes = [] if files else [link if folder.is_symlink() else f"{folder} has no logs or results"]
        own_files = filter(is_regular, (place / "matrix.yaml", place / "imagebuild.lock"))
        files += [(f"project/{path.name}", path) for path in own_files]
        files += [(str(path.relative_to(made)), path) for path in files_in(made, ("",))]
        for name, path in files:
            packed = re.sub("[\n\ufffd]", "_", redacted_text(visible(name)))
            text = redacted_text(visible(end_of(path)))
            write_text(top / packed, text.encode(errors="replace").decode())
            rows.append((packed, str(len(text)), about[packed.partition("/")[0]]))
        lines = [f"imagebuild {__version__}", *notes, *map("  ".join, rows)]
        write_text(top / "README", "\n".join([*lines, ""]))
        content = Path(shutil.make_archive(f"{scratch}/packed", "gztar", scratch, top.name)).read_bytes()
    write_bytes(output, content)
    print_table(("file", "characters", "what it is"), rows)
    out.print("\n".join([*notes, f"{output}: {format_size(len(content))}; read it, then attach it to the issue"]))


def files_in(folder: Path, ends: tuple[str, ...]) -> list[Path]:
    """Return the regular files in a folder whose names have an end, but no parts of images. Links are not followed, as
    a project can contain a link to the user's own files, such as passwords."""

    def found() -> Iterator[Path]:
        for place, folders, names in () if folder.is_symlink() else os.walk(folder):
            is_deep = len(Path(place).relative_to(folder).parts) > DEEPEST
            folders[:] = sorted(name for name in folders if name not in ("blobs", "ingest") and not is_deep)
            paths = (Path(place, name) for name in sorted(names) if name.endswith(ends))
            yield from (path for path in paths if is_regular(path) and path.stat().st_size)

    return list(found())[:MOST]


def is_regular(path: Path) -> bool:
    """Return whether a path is that of a regular file, and not of a link."""
    return path.is_file() and not path.is_symlink()


def end_of(path: Path) -> str:
    """Return the text of a file, or its end if it is large."""
    with path.open("rb") as file:
        left_out = max(0, path.stat().st_size - LARGEST)
        file.seek(left_out)
        text = file.read(LARGEST).decode(errors="replace")
    if not left_out:
        return text
    # The beginning may be a part of a secret or of a private key.
    text = text.partition("\n")[2]
    head, mark, rest = text.partition("-----END")
    return f"… {left_out} bytes left out …\n{rest if mark and '-----BEGIN' not in head else text}"
