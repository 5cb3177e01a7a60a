"""Find the command that is called, import only that one, and turn errors that people meet into an exit code."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command as typer_command

from imagebuild.core.errors import ImagebuildError, nearest

COMMANDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Build": {
        "init": ("plan", "Write a project of your own, on top of what comes with imagebuild."),
        "plan": ("plan", "List the targets of a build, or the steps that a change makes a build execute again."),
        "render": ("plan", "Print the self-contained Dockerfile of a target."),
        "build": ("build", "Build targets with BuildKit."),
        "lock": ("lock", "Pin every source by content: add what the lock lacks, remove what nothing uses."),
        "bump": ("lock", "Propose newer versions of the matrix's pins, as a diff."),
        "bundle": ("build", "Keep all that builds fetch in one folder, for machines without a network."),
    },
    "Check and measure": {
        "verify": ("verify", "Run the checks of an image, and say of each whether it passed."),
        "job": ("job", "Print a benchmark as an MPIJob, a JobSet or a Slurm script."),
        "report": ("report", "Say what benchmarks and checks measured, and whether it is right and fast enough."),
        "limits": ("report", "Show what hardware can do at best, and what was measured on it."),
    },
    "Publish": {
        "publish": ("publish", "Give tags to images whose checks passed, and to nothing else."),
        "each": ("publish", "Run a command for every image that was pushed, by its digest."),
        "sbom": ("evidence", "List what is installed in an image, as SPDX."),
        "scan": ("evidence", "Judge a scanner's report about an image by a policy."),
        "freshness": ("evidence", "Say which packages have a security update."),
        "attest": ("evidence", "Verify and add attestations of a published image."),
        "diff": ("evidence", "Say what differs between two images."),
        "catalog": ("evidence", "Make a page of all published images, and the table in the README."),
        "prune": ("publish", "List what builds pushed and is not needed any more; delete it with --yes."),
    },
    "This machine": {
        "doctor": ("build", "Say what this machine has for building and checking, and how to get what it lacks."),
        "engine": ("build", "Start and stop a private Docker Engine, for machines that have none."),
    },
}
"""Section of the help → command → the module of this package that has it, and its line in the help."""
MODULES = {name: module for section in COMMANDS.values() for name, (module, _) in section.items()}


class LazyCommands(TyperGroup):
    """Import each command of `imagebuild` when it is called; the help needs none of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command, or end with a message that names the nearest one."""
        if cmd_name in MODULES:
            return load_command(cmd_name)
        if near := nearest(cmd_name, MODULES):
            ctx.fail(f"No such command {cmd_name!r}. Did you mean {near!r}?")
        return None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, entries in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in entries.items()])


@cache
def load_command(name: str) -> Any:
    """Import the module of a command, and make the command or the group of commands that has its name."""
    return typer_command(getattr(import_module(f"imagebuild.cli.{MODULES[name]}"), name))


USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[1])
"""What typer raises for unknown options, missing arguments and the like."""


EXAMPLES = """Examples:

\b
  imagebuild init images --repository ghcr.io/acme    # a project of your own
  imagebuild build && imagebuild verify train-cuda13.5-debian13-runtime
  imagebuild report all_reduce.log --profile h100"""
app = typer.Typer(
    cls=LazyCommands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, epilog=EXAMPLES
)


@app.callback()
def imagebuild(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Build, verify and publish container images for GPU networking, from one matrix of versions."""


def main() -> None:
    """Run a command. Errors that people meet become one message and an exit code; others keep their traceback."""
    # Files get UTF-8; a terminal with fewer characters gets what it can show.
    if isinstance(sys.stdout, TextIOWrapper):
        is_terminal = sys.stdout.isatty()
        sys.stdout.reconfigure(encoding=None if is_terminal else "utf-8", errors="replace" if is_terminal else "strict")
    # SIGTERM cleans up, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        try:
            # Commands return nothing; what typer returns for them is an exit status.
            status = app(standalone_mode=False)
        finally:
            sys.stdout.flush()
        sys.exit(status)
    except USAGE_ERROR as error:
        usage: Any = error
        text = " ".join(usage.format_message().removesuffix(".").split()).replace("Value error, ", "")
        # Not in pydantic's words.
        text = re.sub("a valid integer,.*", "a whole number", text.replace("Input should be ", "must be "))
        text = re.sub("a valid number,.*", "a number", text)
        if type(usage).__name__ == "NoArgsIsHelpError":  # the help of a group of commands, which has no command
            usage.show()
        else:
            hint = f"; see `{usage.ctx.command_path} --help`" if usage.ctx else ""
            sys.stderr.write(f"error: {text}{hint}\n")
        sys.exit(2)
    except ImagebuildError as error:
        from rich.markup import escape

        from imagebuild.core.console import err

        err.print(f"[red]error:[/] {escape(str(error))}")
        sys.exit(error.exit_code)
    except OSError as error:
        # Errors that name a file become ImagebuildErrors where they arise.
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python fails again when it flushes at exit
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"error: the standard output cannot be written: {error.strerror}\n")
        sys.exit(2)
