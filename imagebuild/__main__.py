"""Start the program. `--version` answers before anything heavy is imported."""

import atexit
import gc
import sys

from imagebuild import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"imagebuild {__version__}\n")
        return
    # What a command imports stays until its end. By default, Python looks for garbage among it after every 700 new
    # objects, and once more at the end.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    from imagebuild.cli.app import main as run  # noqa: PLC0415 - see above

    run()


if __name__ == "__main__":
    main()
