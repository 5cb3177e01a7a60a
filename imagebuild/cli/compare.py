"""The command `imagebuild compare`."""

from __future__ import annotations

import sys
from pathlib import Path

from imagebuild.cli import options
from imagebuild.core.errors import CommandError, ConfigError


@options.command()
def compare(
    sides: str, command: tuple[str, ...], libraries: str, blocks: int, seed: int, runner: str | None, script: bool,
    allowed_loss: float | None, output: str | None,
) -> None:  # fmt: skip
    import shlex

    from imagebuild.bench.judge import Expected
    from imagebuild.core.console import err
    from imagebuild.core.run import end_program, os_errors_as_command_errors, start_program
    from imagebuild.jobs.compare import comparison_script, parse_sides
    from imagebuild.report.report import make_report
    from imagebuild.report.text import print_report

    if script and runner is not None:
        raise ConfigError("--runner: cannot be combined with --script; leave out one of them")
    text = comparison_script(parse_sides(sides), command, libraries=libraries, blocks=blocks, seed=seed)
    if script:
        options.print_or_write(text, output)
        return
    if runner is not None and not runner.startswith("exec:"):
        raise ConfigError(f"--runner {runner}: must be exec:PREFIX, such as exec:'ssh node'")
    if output is None:
        raise ConfigError("-o: is missing; name the file for the log, which `imagebuild report` reads again")
    prefix = shlex.split((runner or "").removeprefix("exec:"))
    log = Path(output)
    with os_errors_as_command_errors(), log.open("wb") as file:
        process = start_program([*prefix, "bash", "-c", text], output=file.fileno())
        try:
            status = process.wait()
        finally:
            end_program(process)
    err.print(f"{log}: the log of the comparison")
    if status:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise CommandError(f"the comparison ended with exit status {status}: {''.join(last)}")
    outputs = dict.fromkeys(("--json", "--junit", "--html"))
    result = make_report(
        [log], profile=None, profiles=[], baseline=None, expected=Expected(), allowed=("unvalidated",), outputs=outputs,
        allowed_loss=allowed_loss,
    )  # fmt: skip
    print_report(result)
    if result.exit_status:
        sys.exit(result.exit_status)
