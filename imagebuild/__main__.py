"""The entry point of the program. `--version` is answered before anything slow is imported."""

import atexit
import gc
import os
import sys
from contextlib import suppress

from imagebuild import __version__


def open_streams() -> None:
    """Open the standard streams that the caller closed, so that no other file gets their numbers.
    Input is empty, output causes an error, and messages are lost."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            if os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY) != number:
                continue  # the stream is open, but Python cannot use it
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115 - stays open


def main() -> None:
    open_streams()
    if sys.argv[1:] == ["--version"]:
        with suppress(OSError):  # which the command itself explains
            sys.stdout.write(f"imagebuild {__version__}\n")
            sys.stdout.flush()
            return
    # Imported modules stay in memory until the end. By default, Python searches them for garbage after every 700 new
    # objects, and once more at exit.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    from imagebuild.cli.app import main as run  # noqa: PLC0415 - see above

    run()


if __name__ == "__main__":
    main()
