"""The program `imagebuild`: it imports only the module of the called command, and turns errors into exit codes."""

import errno
import gc
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from itertools import pairwise
from typing import Any, NoReturn, cast

import click
from click.exceptions import NoArgsIsHelpError, NoSuchCommand

from imagebuild import __version__
from imagebuild.core.errors import ConfigError, ImagebuildError

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {}
"""Maps each section of the help to its commands, and each command to its module in this package and its summary."""
with open(f"{__file__.rpartition(os.sep)[0]}/commands.txt", encoding="utf-8") as file:  # noqa: PTH123 - pathlib is slow to import
    for line in file.read().splitlines():
        if line.startswith(" "):
            command, module, summary = line.split(maxsplit=2)
            COMMANDS[[*COMMANDS][-1]][command] = module, summary
        else:
            COMMANDS[line] = {}
MODULES = {name: module for section in COMMANDS.values() for name, (module, _) in section.items()}
CLOSED_PIPE = 128 + signal.SIGPIPE
"""Exit status if the reader of the output closed it, as of other programs."""
EXAMPLES = """Examples:

\b
  imagebuild init images --repository ghcr.io/acme    # a project of your own
  imagebuild build && imagebuild verify train-cuda13.5-debian13-runtime
  imagebuild report all_reduce.log --profile h100
  source <(imagebuild --show-completion bash)         # completes commands and names"""

SETTINGS = {"show_default": True, "help_option_names": ["-h", "--help"]}


@cache
def table(name: str) -> Mapping[str, Any]:
    """Return the content of a YAML file of this package."""
    from imagebuild.core.patterns import data_of  # the help reads no such file

    content: Mapping[str, Any] = data_of(__file__, name)
    return content


class LazyCommands(click.Group):
    """A group that imports the module of a command only if the command is called. The help imports no command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command. Raises NoSuchCommand for an unknown name, and ConfigError for a command of another tool,
        except while a shell completes a command line."""
        if cmd_name in MODULES:
            return load_command(cmd_name)
        if ctx.resilient_parsing:
            return None
        if instead := table("foreign")["commands"].get(cmd_name):
            raise ConfigError(f"No such command {cmd_name!r}; {instead}")
        raise NoSuchCommand(cmd_name, possibilities=MODULES, ctx=ctx)  # proposes the nearest command

    def invoke(self, ctx: click.Context) -> object:
        from imagebuild.core.leftovers import own_temporary_files

        with own_temporary_files():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, entries in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in entries.items()])


@cache
def load_command(name: str) -> click.Command:
    """Import the module of a command or of a group of commands, and return the command."""
    module = import_module(f"imagebuild.cli.{MODULES[name]}")
    return cast(click.Command, getattr(module, name.replace("-", "_")))


def show_completion(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    """Print the script that completes commands and names in a shell, and exit."""
    if shell and not context.resilient_parsing:
        from click.shell_completion import get_completion_class

        complete = get_completion_class(shell)
        assert complete
        click.echo(complete(app, {}, "imagebuild", "_IMAGEBUILD_COMPLETE").source())
        context.exit()


@click.group(cls=LazyCommands, epilog=EXAMPLES, context_settings=SETTINGS)
@click.version_option(__version__, message="imagebuild %(version)s", help="Print the version and exit.")
@click.option(
    "--show-completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    is_eager=True,
    expose_value=False,
    callback=show_completion,
    help="Print the script that completes commands and names in this shell, and exit.",
)
def app() -> None:
    """Build, verify and publish container images for GPU networking, from one matrix of versions."""


def with_project(text: str, words: Sequence[str]) -> str:
    """Return a message in which the proposed commands have the option --project of the command line `words`."""
    given = [value for word, value in pairwise(words) if word == "--project"]
    given += [word.partition("=")[2] for word in words if word.startswith("--project=")]

    def completed(match: re.Match[str]) -> str:
        lacks = match[1] in MODULES and "--project" not in match[0]
        takes = lacks and any(parameter.name == "root" for parameter in load_command(match[1]).params)
        return f"{match[0][:-1]} --project {shlex.quote(given[0])}`" if takes else match[0]

    return re.sub(r"`imagebuild ([\w-]+)[^`]*`", completed, text) if given else text


def fail(text: str, status: int) -> NoReturn:
    """Print an error message, and exit."""
    from imagebuild.core.console import err, styled

    with suppress(OSError):  # without a place for the message, only the status says it
        err.print(styled(("error: ", "red"), with_project(text, sys.argv)))
    sys.exit(status)


def show_bug(*error: Any) -> None:
    """Print the traceback of an unexpected error, as `err` prints it."""
    import traceback

    from imagebuild.core.console import err

    err.print("".join(traceback.format_exception(*error)), end="")


def end(number: int, _: object) -> NoReturn:
    """Exit because of a signal. Another signal does not interrupt the cleaning."""
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    """Run a command. Errors for users become one message and an exit code; other errors keep their traceback."""
    # Most objects live until the command ends. Frequent garbage collection would only cost time.
    gc.set_threshold(50_000)
    sys.excepthook = show_bug
    # On SIGTERM, and if the terminal is closed, clean up and exit, as on Ctrl-C. `nohup` ignores the second.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    output = sys.stdout
    try:
        # Output to a file is UTF-8. On a terminal, characters that the terminal cannot show are replaced.
        if isinstance(sys.stdout, TextIOWrapper):
            shown = sys.stdout.isatty()
            sys.stdout.reconfigure(encoding=None if shown else "utf-8", errors="replace" if shown else "strict")
        try:
            status = app.main(prog_name="imagebuild", standalone_mode=False)
        finally:
            sys.stdout.flush()
        sys.exit(status)
    except SystemExit:
        # click replaces an output whose reader has closed it, and exits with 1, which would mean that a check failed.
        if sys.stdout is not output:
            sys.exit(CLOSED_PIPE)
        raise
    except click.Abort:  # Ctrl-C
        sys.exit(130)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        text = " ".join(error.format_message().removesuffix(".").split())
        own = error.ctx and any((param.metavar or "").startswith("COMMAND") for param in error.ctx.command.params)
        text += "; write `--` before the command" if own and isinstance(error, click.NoSuchOption) else ""
        fail(text + (f"; see `{error.ctx.command_path} --help`" if error.ctx else ""), 2)
    except ImagebuildError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        # An error about a file was already turned into an ImagebuildError, so an OSError with a file name is a bug.
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EPIPE, errno.EBADF):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise Python would flush at exit and fail again
        if error.errno == errno.EPIPE:
            sys.exit(CLOSED_PIPE)
        fail(f"the standard output cannot be written: {error.strerror}", 2)
