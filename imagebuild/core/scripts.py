"""The shell scripts and functions that checks, commands and jobs share. This module imports nothing that is slow."""

from pathlib import Path

SCRIPTS = Path(__file__).with_name("templates")


def shared_script(name: str) -> str:
    """Return the text of a script in SCRIPTS."""
    return (SCRIPTS / f"{name}.sh").read_text(encoding="utf-8")
