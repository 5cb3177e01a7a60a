"""The command `imagebuild loaded`."""

import sys

from imagebuild.cli import options
from imagebuild.core.errors import ConfigError


@options.command()
def loaded(words: tuple[str, ...], pids: tuple[int, ...], runner: str, json_file: str | None) -> None:
    from imagebuild.core.console import out, print_table, styled
    from imagebuild.verify.loaded import look

    if bool(words) == bool(pids):
        raise ConfigError("name either a command after `--`, or a process with --pid")
    result = look(runner, words, pids)

    def show() -> None:
        for process in result.processes:
            ids = ", ".join(map(str, process.pids))
            out.print(
                styled(
                    (f"\n{process.program}", "bold"), f" (process {ids}{f' on {process.host}' if process.host else ''})"
                )
            )
            rows = [
                (each.role, each.identity.removeprefix(f"{each.role}").strip(" ,"), each.path, each.origin, each.found)
                for each in process.libraries
            ]
            print_table(("library", "version", "file", "origin", "found by"), rows)
            for fault in process.faults:
                word, color = ("note", "yellow") if fault.note else ("fault", "red")
                out.print(styled((f"{word}: ", color), f"{fault.subject}: {fault.text}"))
        if not result.processes:
            out.print("no process loaded a library that imagebuild knows")

    options.print_result(json_file, result, show)
    if any(not fault.note for process in result.processes for fault in process.faults):
        sys.exit(1)
    if result.status:
        sys.exit(result.status)
