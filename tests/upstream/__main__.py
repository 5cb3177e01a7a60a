"""`python -m tests.upstream make|serve [--cache DIR] [SYSTEM…]`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from imagebuild.core import ImagebuildError, cache_folder
from tests.upstream.standin import Upstream, missing

CACHE = cache_folder().parent / "upstream"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("command", choices=("make", "serve"), help="serve makes what is missing, too")
    parser.add_argument("--cache", type=Path, default=CACHE, help="default: %(default)s")
    parser.add_argument("systems", nargs="*", default=["13.2.1-ubuntu24.04"], help="default: 13.2.1-ubuntu24.04")
    given = parser.parse_args()
    # A shell's background job ignores Ctrl-C, and a plain `kill` would leave the registry running.
    for order in (signal.SIGINT, signal.SIGTERM):
        signal.signal(order, signal.default_int_handler)
    if wanted := missing():
        print(f"install {' '.join(wanted)} first", file=sys.stderr)  # noqa: T201
        return 2
    try:
        began = time.monotonic()

        def log(line: str) -> None:
            print(f"{time.monotonic() - began:6.1f} s  {line}", file=sys.stderr, flush=True)  # noqa: T201

        upstream = Upstream.make(given.cache, given.systems, sources=True, log=log)
        if given.command == "serve":
            with upstream.serve(), suppress(KeyboardInterrupt):
                print(upstream.configuration, flush=True)  # noqa: T201
                while True:
                    time.sleep(3600)
    except ImagebuildError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
