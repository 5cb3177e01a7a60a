"""The text of the matrix with other versions: only they change, comments and layout stay."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from imagebuild import files
from imagebuild.config import Document, Mistakes, load
from imagebuild.errors import ConfigError
from imagebuild.locking.candidates import Row
from imagebuild.models import Matrix

SIGN = r"[\w.+:~-]"
"""What a version is made of."""


def edited(matrix: Document[Matrix], wanted: Document[Matrix], changes: Mapping[Row, str]) -> str:
    """The matrix's text with the versions of `changes`; `wanted` is what it must mean.

    Raises ConfigError where a version cannot be changed by itself, for example because an anchor has it.
    """
    lines = files.read_text(matrix.path).splitlines(keepends=True)
    for row, version in changes.items():
        number = _line(matrix, row)
        old = matrix.model.versions[row[0]][row[1]].version
        changed = _replaced(lines[number - 1], row[0], old, version)
        if changed is None:
            raise ConfigError(f"{matrix.path}:{number}: {old} does not stand here once; write {version} by hand")
        lines[number - 1] = changed
    text = "".join(lines)
    if _read(text) != wanted.model:
        where = ", ".join(f"{matrix.path}:{_line(matrix, row)}" for row in changes)
        raise ConfigError(f"{where}: a change of the version here changes something else too; do it by hand")
    return text


def _line(matrix: Document[Matrix], row: Row) -> int:
    name, i = row
    places = (
        ("versions", name, i, "version"),
        ("versions", name, i),
        ("versions", name, "version"),
        ("versions", name),
    )
    return next(matrix.lines[place] for place in places if place in matrix.lines)


def _replaced(line: str, name: str, old: str, new: str) -> str | None:
    """The line with the version changed that stands behind `version:` or the pin's name, or by itself."""
    keys = list(re.finditer(rf"""(?:\bversion|^\s*["']?{re.escape(name)})["']?\s*:\s""", line))
    start = keys[-1].end() if keys else 0
    comment = re.search(r"\s#", line)
    end = comment.start() if comment else len(line)
    found = list(re.finditer(rf"(?<!{SIGN}){re.escape(old)}(?!{SIGN})", line[:end]))
    fitting = [match for match in found if match.start() >= start]
    if len(fitting) != 1:
        return None
    return line[: fitting[0].start()] + new + line[fitting[0].end() :]


def _read(text: str) -> Matrix | None:
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        path = Path(folder) / "matrix.yaml"
        path.write_text(text, encoding="utf-8")
        document = load(path, Matrix, Mistakes())
    return document.model if document else None
