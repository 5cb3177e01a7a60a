"""Entry point. `--version` answers before anything heavy is imported."""

import gc
import sys

from imagebuild import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"imagebuild {__version__}\n")
        return
    # Imports make objects that stay; the default looks for garbage among them after every 700.
    gc.set_threshold(50_000)
    from imagebuild.cli.app import main as run  # noqa: PLC0415 - see above

    run()


if __name__ == "__main__":
    main()
