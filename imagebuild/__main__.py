"""The entry point of the program. `--version` is answered before anything slow is imported."""

import atexit
import gc
import sys

from imagebuild import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"imagebuild {__version__}\n")
        return
    # Imported modules stay in memory until the end. By default, Python searches them for garbage after every 700 new
    # objects, and once more at exit.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    from imagebuild.cli.app import main as run  # noqa: PLC0415 - see above

    run()


if __name__ == "__main__":
    main()
