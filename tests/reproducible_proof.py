"""Build a target twice with nothing in any cache, and a third time packed otherwise; compare what comes out.

    python -m tests.reproducible_proof [TARGET] [OPTION]...

Needs root, the distribution's archive and the Python package index, and disk for one more engine at a time. Each build has
an engine and bootstrapped bases of its own, in a folder that is removed afterwards. Options are those of `build`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imagebuild.build import start_engine, stop_engine
from imagebuild.oci import EnginePaths, PlatformImage, images_in

ROOT = Path(__file__).parent.parent
IMAGEBUILD = (sys.executable, "-m", "imagebuild")
TARGET = "quickstart-cuda13.5-debian13-runtime"


@contextmanager
def nothing_cached() -> Iterator[dict[str, str]]:
    """The environment of a machine that has built nothing yet."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-proof-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
        environ = {**inherited, "IMAGEBUILD_STATE": f"{folder}/engine", "XDG_CACHE_HOME": f"{folder}/cache"}
        start_engine(environ)
        try:
            yield {**environ, "DOCKER_HOST": EnginePaths.of(environ).host}
        finally:
            stop_engine(environ, purge=True)


def build(target: str, layouts: Path, options: list[str], environ: dict[str, str]) -> tuple[str, PlatformImage]:
    """Digest and image of a build."""
    began = time.monotonic()
    work = layouts.parent / "work"
    command = [*IMAGEBUILD, "build", target, "--platform", "local", "--output", str(layouts), "--folder", str(work)]
    subprocess.run([*command, *options], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, check=True)
    result = json.loads((work / target / "result.json").read_text())
    ran = sum(not step["cached"] for step in result["steps"])
    (image,) = images_in(layouts / target, layouts)
    seconds = time.monotonic() - began
    sys.stdout.write(f"{layouts.name}: {result['digest']}, {ran} steps run, {seconds:.0f} s\n")
    sys.stdout.flush()
    return str(result["digest"]), image


def main() -> None:
    target, options = (sys.argv[1:] or [TARGET])[0], sys.argv[2:]
    with tempfile.TemporaryDirectory(prefix="imagebuild-proof-", dir="/var/tmp") as name:
        folder = Path(name)
        with nothing_cached() as environ:
            first, image = build(target, folder / "first", options, environ)
            _, other = build(target, folder / "zstd", [*options, "--compression", "zstd"], environ)
        with nothing_cached() as environ:
            second, again = build(target, folder / "second", options, environ)
    for here, there, what in ((image, again, "built twice"), (image, other, "gzip and zstd")):
        pairs = zip(here.config["rootfs"]["diff_ids"], there.config["rootfs"]["diff_ids"], strict=True)
        different = [str(number) for number, (a, b) in enumerate(pairs) if a != b]
        sys.stdout.write(f"{what}: {'layers ' + ', '.join(different) + ' differ' if different else 'the same files'}\n")
        assert not different
    assert first == second
    sys.stdout.write("the same digest\n")


if __name__ == "__main__":
    main()
