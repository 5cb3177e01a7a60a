"""The commands `imagebuild compare` and `bisect`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imagebuild.cli import options
from imagebuild.core.console import err, out
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import os_errors_as_command_errors

if TYPE_CHECKING:
    from imagebuild.bench.bisection import Bisection


@options.command()
def compare(
    sides: str, command: tuple[str, ...], libraries: str, blocks: int, limit: int, seed: int, runner: str | None,
    script: bool, allowed_loss: float | None, output: str | None,
) -> None:  # fmt: skip
    from imagebuild.bench.alternation import MARK
    from imagebuild.bench.judge import Expected
    from imagebuild.core.run import execute
    from imagebuild.jobs.compare import parse_sides
    from imagebuild.jobs.manifest import comparison_script
    from imagebuild.report.report import make_report
    from imagebuild.report.text import print_report
    from imagebuild.verify.runner import EXEC, command_line, read_prefix

    if script and runner is not None:
        raise ConfigError("--runner: cannot be combined with --script; leave out one of them")
    found = parse_sides(sides)
    text = comparison_script(found, command, libraries=libraries, blocks=blocks, seed=seed, limit=limit)
    if script:
        options.print_or_write(text, output)
        return
    if runner is not None and not runner.startswith(EXEC):
        raise ConfigError(f"--runner {runner}: must be exec:PREFIX, such as exec:'ssh node'")
    if output is None:
        raise ConfigError("-o: is missing; name the file for the log, which `imagebuild report` reads again")
    prefix = [] if runner is None else read_prefix(runner.removeprefix(EXEC))
    log = Path(output)
    if output == options.STDOUT or (log.exists() and (not log.is_file() or log.stat().st_size)):
        raise ConfigError(f"-o {log}: is not a new file, and a measurement replaces nothing; name a new file")
    done = execute(command_line(prefix, ["bash", "-c", text]), log=log)
    if done.status and f"{MARK} end 0" not in log.read_text(encoding="utf-8", errors="replace"):
        log.unlink()  # the same command can be used again when its fault is corrected
        raise CommandError(f"no run of the comparison succeeded: {done.output.strip()[-1000:]}")
    err.print(f"{log}: the log of the comparison")
    if done.status:
        last = "".join(done.output.strip().splitlines()[-1:])
        raise CommandError(f"the comparison ended with exit status {done.status}: {last}")
    outputs = dict.fromkeys(("--json", "--junit", "--html"))
    result = make_report(
        [log], profile=None, profiles=[], baseline=None, expected=Expected(), allowed=("unvalidated",), outputs=outputs,
        allowed_loss=allowed_loss,
    )  # fmt: skip
    print_report(result)
    if result.exit_status:
        sys.exit(result.exit_status)


ARGUMENTS = "# imagebuild-bisect arguments "
"""Start of the first line of a log, which contains the arguments of the bisection."""
PLACE = "# place: "
"""Start of the lines of a log that describe the hardware, the settings and the installed wheels."""
MOST_SIDES = 100


@options.command()
def bisect(
    subject: str, command: tuple[str, ...], good: str | None, bad: str | None, libraries: str, cuda: int, offline: bool,
    loss: float | None, limit: int, seed: int, runner: str, output: str, json_file: str | None,
) -> None:  # fmt: skip
    from imagebuild.bench.bisection import error_rate, next_step
    from imagebuild.bench.read import read_files
    from imagebuild.core.scripts import shared_script
    from imagebuild.jobs.manifest import comparison_script

    log, wheel = Path(output), f"nvidia-nccl-cu{cuda}"
    asked: dict[str, object] = {"subject": subject, "good": good, "bad": bad, "command": list(command)}
    asked |= {"loss": loss, "limit": limit, "seed": seed}
    sides = _earlier_sides(log, asked)
    if sides is None:
        sides = _sides(subject, good, bad, libraries, wheel, offline=offline)
        _append(log, ARGUMENTS + json.dumps({**asked, "sides": sides}))
        _measure(log, runner, shared_script("place"))
    known = 0
    while True:
        state, more = next_step(sides, read_files([log]).paired, loss)
        for verdict in state.judged[known:]:
            err.print(f"{verdict.side}: {verdict.state}: {verdict.reason}")
        known = len(state.judged)
        if more is None:
            break
        for side in more.sides if subject.startswith("nccl") else ():
            if installed := _provide(side.partition("=")[2], libraries, wheel, offline=offline):
                _append(log, f"\n{PLACE}{installed}")
        err.print(f"measuring {' and '.join(dict.fromkeys(more.sides))}, blocks {more.first} to {more.blocks}")
        text = comparison_script(
            more.sides, command, libraries=libraries, wheel=wheel, blocks=more.blocks, first=more.first, seed=seed,
            limit=limit, error_rate=error_rate(sides), stops=True,
        )  # fmt: skip
        last = _measure(log, runner, text)
        found = {pair.sides: pair for pair in read_files([log]).paired}.get(more.sides)
        if found is None or (found.blocks < more.blocks and not found.failed):
            raise CommandError(f"{log}: the measurement ended early: {last or 'it printed nothing'}")
        if not found.is_proven or sides[0] in found.failed:
            raise CommandError(f"{log}: {found.faults[0]}")
    summary = _summary(state, command, log)
    if summary not in log.read_text(encoding="utf-8", errors="replace"):
        _append(log, f"\n{summary}")
    options.print_result(json_file, state, lambda: out.print(summary), not state.is_complete)


def _earlier_sides(log: Path, asked: Mapping[str, object]) -> tuple[str, ...] | None:
    """Return the sides in an earlier log of the same bisection. None if there is no log, or an empty one.
    Raises ConfigError if the log is of something else."""
    from imagebuild.jobs.compare import parse_sides

    if not log.exists() or not log.stat().st_size:
        return None
    with log.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline()
    try:
        known = json.loads(first.removeprefix(ARGUMENTS))
        differing = [key for key, value in asked.items() if value != known[key]]
        sides = tuple(map(str, known["sides"]))
        kind, values = sides[0].partition("=")[0], ",".join(side.partition("=")[2] for side in sides)
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"-o {log}: exists, and is not the log of a bisection; name another file") from None
    if differing:
        problem = f"is the log of another bisection, with another {' and '.join(differing)}"
        raise ConfigError(f"-o {log}: {problem}; repeat its arguments to continue it, or name another file")
    # Anybody can have written the log, and the sides become commands.
    if parse_sides(f"{kind}={values}", MOST_SIDES) != sides:
        raise ConfigError(f"-o {log}: its sides are not those of a bisection; name another file")
    return sides


def _sides(
    subject: str, good: str | None, bad: str | None, libraries: str, wheel: str, *, offline: bool
) -> tuple[str, ...]:
    """Return the sides, from the good one to the bad one. Raises ConfigError if the arguments do not name them."""
    from imagebuild.core.fields import natural_order
    from imagebuild.jobs.compare import parse_sides, version_of_wheel

    if subject.startswith("nccl") and not libraries:
        raise ConfigError("--libraries: is missing; name the folder for the versions of NCCL")
    if "=" in subject:
        if good or bad:
            raise ConfigError(f"--good and --bad: {subject} already names the first and the last one; leave them out")
        return parse_sides(subject, MOST_SIDES)
    if subject != "nccl" or not (good and bad):
        raise ConfigError(
            f"{subject}: write `nccl` with --good and --bad, or nccl=VERSION,…, env:NAME=VALUE,… or image=IMAGE,…"
        )
    found = {path.name.removeprefix("nccl-") for path in Path(libraries).glob("nccl-*") if path.is_dir()}
    found |= {version_of_wheel(path.name, wheel) for path in Path(libraries).glob("*.whl")}
    if not offline:
        from imagebuild.lock.resolve import network_upstream

        found |= set(network_upstream(None).wheel_versions(wheel))
    versions = sorted((v for v in found if v.replace(".", "").isdigit()), key=natural_order)
    for option, version in {"--good": good, "--bad": bad}.items():
        if version not in versions:
            where = libraries if offline else f"{libraries} and the index of {wheel}"
            raise ConfigError(f"{option} {version}: not among the versions in {where}: {', '.join(versions) or 'none'}")
    first, last = versions.index(good), versions.index(bad)
    if first >= last:
        raise ConfigError(f"--bad {bad}: must be later than --good {good}; to search the other way, name nccl={bad},…")
    return parse_sides(f"nccl={','.join(versions[first : last + 1])}", MOST_SIDES)


def _provide(version: str, libraries: str, wheel: str, *, offline: bool) -> str:
    """Unpack the wheel of a version in the folder of libraries, from a file there or from the package index, unless the
    folder has the version. Return the wheel with its hash, or "". Raises CommandError if the wheel is missing."""
    from imagebuild.jobs.compare import version_of_wheel
    from imagebuild.lock.resolve import network_upstream

    folder = Path(libraries) / f"nccl-{version}"
    if folder.exists():
        return ""
    local = any(version_of_wheel(path.name, wheel) == version for path in Path(libraries).glob("*.whl"))
    source = Path(libraries) if offline or local else None
    return network_upstream(None).unpack_wheel(wheel, version, folder, source)


def _measure(log: Path, runner: str, script: str) -> str:
    """Run a script behind the prefix of the runner, and add its output to the log. Return its last line."""
    from imagebuild.verify.runner import run_behind

    lines = [""]

    def keep(line: str) -> None:
        _append(log, line)
        lines.append(line.strip() or lines[-1])

    keep("")  # the log may end in the middle of a line
    run_behind(runner, ["bash", "-c", script], keep)
    return lines[-1]


def _append(log: Path, text: str) -> None:
    with os_errors_as_command_errors():
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def _summary(state: Bisection, command: Sequence[str], log: Path) -> str:
    """Return the result of a bisection as Markdown, for an issue."""
    from jinja2 import Template

    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    place = [line.removeprefix(PLACE) for line in lines if line.startswith(PLACE)]
    template = Template(Path(__file__).with_name("bisect.md.j2").read_text(encoding="utf-8"), trim_blocks=True)
    return str(template.render(state=state, command=shlex.join(command), place=place))
