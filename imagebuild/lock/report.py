"""The report of `imagebuild lock`: what servers answered and what archives contain, to reproduce a stop elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from imagebuild import __version__
from imagebuild.core.console import own_command, redacted_text
from imagebuild.core.files import write_text
from imagebuild.lock.facts import Contents

REPORT = "lock-report.json"
"""Name of the report, in the folder of the builds."""


def write_report(
    folder: Path, failures: Iterable[tuple[str, str, str]], asked: Iterable[str],
    archives: Mapping[str, Contents], targets: Iterable[str],
) -> Path:  # fmt: skip
    """Write the report, and return its path."""
    path = folder / REPORT
    if path.is_symlink():  # a project can contain a link to any file of the user
        path.unlink()
    packed = {redacted_text(url): asdict(contents) for url, contents in archives.items()}
    for contents in packed.values():
        contents["output"] = redacted_text(contents["output"])
        contents["built_in"] = sorted(contents["built_in"])
        names = ("kind", "mode", "size", "name", "target")
        contents["members"] = [[member[name] for name in names] for member in contents["members"]]
    report = {
        "imagebuild": __version__,
        "written": f"{datetime.now(UTC):%FT%TZ}",
        "command": own_command(),
        "targets": list(targets),
        "failures": [list(map(redacted_text, failure)) for failure in failures],
        "asked": list(map(redacted_text, asked)),
        "archives": packed,
    }
    # Names in archives need not be UTF-8, so the text is ASCII.
    write_text(path, json.dumps(report, indent=1) + "\n")
    return path
