"""The commands `imagebuild loaded` and `hang`, which look into running processes."""

import time

from imagebuild.cli import options
from imagebuild.core.console import out, print_table, styled
from imagebuild.core.errors import CommandError, ConfigError

ENOUGH_S = 25
"""Time in seconds after which `hang` names missing ranks without asking again for their last sign of life."""


@options.command()
def loaded(words: tuple[str, ...], pids: tuple[int, ...], runner: str, json_file: str | None) -> None:
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

    faulty = any(not fault.note for process in result.processes for fault in process.faults)
    options.print_result(json_file, result, show, faulty or result.status or 0)


@options.command()
def hang(runner: str, wait: float, json_file: str | None) -> None:
    from imagebuild.bench.hang import PREFIX, Communicator, answers, hung_in_log
    from imagebuild.core.scripts import shared_script
    from imagebuild.verify.runner import run_behind

    script = shared_script("ras") + "ask_ras\n"
    taken: list[list[Communicator]] = []
    began = time.monotonic()
    while len(taken) < 2:
        if taken:
            is_lost = any(each.missing for each in taken[0])
            if is_lost and 2 * (time.monotonic() - began) + wait > ENOUGH_S:
                break
            time.sleep(wait)
        lines: list[str] = []
        run_behind(runner, ["bash", "-c", script], lines.append)
        found = answers(lines)
        if taken and is_lost and not found:
            break
        if not any(PREFIX in line for line in lines):
            said = lines[-1].strip() if lines else "it printed nothing"
            raise CommandError(f"--runner {runner}: NCCL could not be asked there; correct the prefix: {said}")
        if not found and any(f"{PREFIX}SERVER" in line for line in lines):
            problem = "NCCL's answer at its RAS socket was cut off, or names no communicator"
            raise CommandError(f"{problem}; try again when the job has started")
        if not found:
            problem = "NCCL does not answer at its RAS socket, port 28028 on the loopback"
            raise CommandError(
                f"{problem}; it needs NCCL 2.24 or later, a running job, and NCCL_RAS_ENABLE other than 0"
            )
        taken.append(found[-1])
    sentences = hung_in_log(taken)
    if not sentences and (silent := [each for each in taken[-1] if each.silent]):
        problem = f"NCCL states nothing about {silent[0].silent} of {silent[0].size} ranks of a communicator"
        raise CommandError(f"{problem}; try again when all ranks have started")
    result = {"hung": sentences, "communicators": len(taken[-1])}
    text = "\n".join(sentences) or "no rank is missing or behind"
    options.print_result(json_file, result, lambda: out.print(text), bool(sentences))
