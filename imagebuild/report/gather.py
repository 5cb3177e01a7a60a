"""Files of all kinds, read: what benchmarks printed, results of `verify`, and earlier reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from imagebuild.errors import ConfigError, ResultError
from imagebuild.fields import Model
from imagebuild.judgement import Judgement
from imagebuild.records import VerifyResult
from imagebuild.report.document import Report
from imagebuild.results.models import Results

Read = Callable[[Sequence[Path]], Results]
"""Reads what benchmarks printed."""

HEAD = 4096
"""Bytes that say whether a file can be one of ours; others are not read whole to find out."""

One = TypeVar("One", bound=Model)


@dataclass(frozen=True)
class Gathered:
    """What files hold."""

    results: Results
    verifications: tuple[VerifyResult, ...]
    earlier: tuple[Report, ...]
    judgements: tuple[Judgement, ...]
    """Made when the files were written."""
    logs: tuple[Path, ...]
    """Files that are outputs of benchmarks, also of those that checks ran."""
    nothing_in: tuple[str, ...]
    """Files that were named, or folders, in which there is no result."""


def gather(named: Iterable[Path], read: Read) -> Gathered:
    """Read files, and all files of folders.

    Raises ConfigError if one does not exist, ResultError if a file that imagebuild wrote cannot be read.
    """
    verifications: dict[Path, VerifyResult] = {}
    earlier: list[Report] = []
    logs: list[Path] = []
    known: set[Path] = set()
    for name in dict.fromkeys(named):
        for file in _files(name):
            match ours(file):
                case VerifyResult() as verification:
                    verifications[file] = verification
                case Report() as report:
                    earlier.append(report)
                case None:
                    logs.append(file)
                    continue
            known.add(file)
    kept = _kept(verifications)
    results = _read([log for log in logs if log.resolve() not in kept], read)
    known |= {log for log in logs if log.resolve() in kept}
    known |= {Path(source.path) for source in results.sources if source.tools}
    checks = [check for verification in verifications.values() for check in verification.checks]
    parts = [results, *(check.results for check in checks if check.results), *earlier]
    return Gathered(
        results=Results(**{field: _joined(parts, field) for field in Results.model_fields}),
        verifications=(*verifications.values(), *_joined(earlier, "verifications")),
        earlier=tuple(earlier),
        judgements=(*_joined(checks, "judgements"), *_joined(earlier, "judgements")),
        logs=tuple(log for log in logs if kept.get(log.resolve(), True)),
        nothing_in=tuple(str(name) for name in dict.fromkeys(named) if not _holds(name, known)),
    )


def _kept(verifications: Mapping[Path, VerifyResult]) -> dict[Path, bool]:
    """What verifications keep beside their results, and whether that is the output of a benchmark.

    It was read when it was made.
    """
    found: dict[Path, bool] = {}
    for file, verification in verifications.items():
        folder = file.parent.resolve()
        found |= {folder / check.log: check.results is not None for check in verification.checks if check.log}
        if verification.surroundings:
            found |= dict.fromkeys((folder / name for name in verification.surroundings.reports.values()), False)
    return found


def _read(logs: Sequence[Path], read: Read) -> Results:
    try:
        return read(logs) if logs else Results()
    except ResultError:
        # No result in any of them: the report says that of each, and keeps their texts.
        return Results()


def _files(name: Path) -> list[Path]:
    try:
        folder = name.is_dir()
        found = [f for f in sorted(name.rglob("*")) if f.is_file() and not _hidden(f, name)] if folder else [name]
        for file in found:
            with file.open("rb"):
                pass
    except OSError as error:
        where = error.filename or name
        raise ConfigError(f"{where}: cannot be read: {error.strerror}; name logs, JSON files or folders") from None
    return found


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _holds(name: Path, files: set[Path]) -> bool:
    return name in files or any(name in file.parents for file in files)


def _joined(parts: Iterable[Model], field: str) -> tuple[Any, ...]:
    return tuple(item for part in parts for item in getattr(part, field))


def ours(file: Path) -> VerifyResult | Report | None:
    """What imagebuild wrote, or `None` for any other file. Raises ResultError if it is ours and cannot be read."""
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD)
            # Our files begin with one of these keys. Those of benchmarks are not read twice.
            if not head.lstrip().startswith(b"{") or not (b'"image"' in head or b'"runs"' in head):
                return None
            opened.seek(0)
            data = json.loads(opened.read())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    if {"about", "runs", "sources"} <= data.keys():
        return _valid(Report, data, file)
    if {"image", "platform", "checks"} <= data.keys():
        return _valid(VerifyResult, data, file)
    return None


def _valid(model: type[One], data: dict[str, Any], file: Path) -> One:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ResultError(
            f"{file}: {where}: {first['msg']}; was it written by another version of imagebuild?"
        ) from None
