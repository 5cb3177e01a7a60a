"""`imagebuild engine`: arguments and help. What it does is in `private_engine`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from imagebuild import console
from imagebuild.console import err, out
from imagebuild.errors import CommandError

app = typer.Typer(no_args_is_help=True, help="A private Docker Engine, for machines that have none.")


@app.command("up")
def engine_up() -> None:
    """Start the private engine; install it first where no usable engine is."""
    from imagebuild import engine, private_engine  # noqa: PLC0415 - starts programs

    try:
        found = engine.find(os.environ)
        if found.origin != "private":
            out.print(f"An engine answers at {found.host} ({found.origin}); nothing to do.")
            return
    except CommandError as error:
        err.print(f"No usable engine yet: {str(error).splitlines()[0]}", markup=False)
    _show_engine(private_engine.up())


@app.command("status")
def engine_status() -> None:
    """Show the private engine."""
    from imagebuild import private_engine  # noqa: PLC0415 - starts programs

    _show_engine(private_engine.status())


@app.command("down")
def engine_down(
    purge: Annotated[bool, typer.Option("--purge", help="Delete its images and cache too.")] = False,
) -> None:
    """Stop the private engine."""
    from imagebuild import private_engine  # noqa: PLC0415 - starts programs

    private_engine.down(purge=purge)
    out.print("The private engine is down" + (" and its data is deleted." if purge else "."))


def _show_engine(status: object) -> None:
    rows = [(name.replace("_", " "), str(value)) for name, value in vars(status).items() if value is not None]
    console.table(("private engine", ""), rows)
