"""Make pieces of the stand-in in containers, and only those that the cache lacks."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagebuild.build import bootstrap
from imagebuild.core import Arch, cache_folder, run_program
from imagebuild.oci import find_engine

RECIPES = Path(__file__).parent / "recipes"
BASE = "debian:13-standin"
"""What the recipes call the bootstrapped base, which `Workshop.base` hands to BuildKit."""
Make = Callable[[Path], None]


def digest_of(*inputs: Path | str) -> str:
    """Of texts, and of the names and contents of files and of all files in folders."""
    total = hashlib.sha256()
    for item in inputs:
        files = [item] if isinstance(item, str) or item.is_file() else sorted(p for p in item.rglob("*") if p.is_file())
        for file in files:
            total.update(file.encode() if isinstance(file, str) else file.name.encode() + file.read_bytes())
            total.update(b"\0")
    return total.hexdigest()


@dataclass(frozen=True)
class Workshop:
    """Where pieces are kept and how they are made. `base` is the bootstrapped Debian 13, as BuildKit takes it."""

    cache: Path
    base: str
    docker: Mapping[str, str]
    """Environment in which docker's client reaches the engine."""
    log: Callable[[str], None]
    archs: Sequence[Arch]

    @classmethod
    def open(cls, cache: Path, archs: Sequence[Arch], log: Callable[[str], None]) -> Workshop:
        """Raises imagebuild's errors where no base can be made or no engine is found."""
        made = bootstrap([f"linux/{arch}" for arch in archs], cache_folder(), release="trixie", log=log)
        cache.mkdir(parents=True, exist_ok=True)
        return cls(cache.absolute(), made, find_engine(os.environ).environment, log, archs)

    def piece(self, name: str, inputs: Iterable[Path | str], make: Make) -> Path:
        """The folder `name` in the cache. `make` fills it anew if it was made from other inputs, or never."""
        folder, stamp = self.cache / name, self.cache / f"{name}.made-from"
        wanted = digest_of(*inputs)
        if folder.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
            return folder
        self.log(f"making {name}")
        stamp.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=self.cache, prefix=".making-"))
        try:
            scratch.chmod(0o755)
            make(scratch)
            scratch.replace(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        stamp.write_text(wanted)
        return folder

    def build(self, recipe: str, *options: str, arch: Arch = "amd64", tail: str = "", **contexts: Path) -> None:
        """Run `recipes/<recipe>.Dockerfile`, and after it `tail`, with its folder as context, and other folders by name."""
        named = {BASE: self.base, **{name: str(path) for name, path in contexts.items()}}
        with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
            file.write((RECIPES / f"{recipe}.Dockerfile").read_text() + tail)
            file.flush()
            run_program(
                "docker", "buildx", "build", "--progress=plain", "--provenance=false", f"--platform=linux/{arch}",
                *(word for name, value in named.items() for word in ("--build-context", f"{name}={value}")),
                "--file", file.name, *options, str(RECIPES / recipe),
                env=self.docker,
            )  # fmt: skip
