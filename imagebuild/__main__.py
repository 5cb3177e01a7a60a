"""Entry point. `--version` answers before anything heavy is imported."""

import sys

from imagebuild import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"imagebuild {__version__}\n")
        return
    from imagebuild.cli.app import main as run  # noqa: PLC0415 - see above

    run()


if __name__ == "__main__":
    main()
