"""The command `imagebuild compare`."""

from __future__ import annotations

import sys
from pathlib import Path

from imagebuild.cli import options
from imagebuild.core.errors import CommandError, ConfigError


@options.command()
def compare(
    sides: str, command: tuple[str, ...], libraries: str, blocks: int, limit: int, seed: int, runner: str | None,
    script: bool, allowed_loss: float | None, output: str | None,
) -> None:  # fmt: skip
    from imagebuild.bench.judge import Expected
    from imagebuild.core.console import err
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
    done = execute(command_line(prefix, ["bash", "-c", text]), log=log)
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
