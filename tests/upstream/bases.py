"""Stand-ins for base images, described by `evidence/cuda.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

EVIDENCE = Path(__file__).parent / "evidence" / "cuda.yaml"
VARIANTS = ("runtime", "devel")


@cache
def evidence() -> dict[str, Any]:
    """Read the published facts about the images."""
    data: dict[str, Any] = yaml.safe_load(EVIDENCE.read_text())
    return data


@dataclass(frozen=True)
class Cuda:
    """An `nvidia/cuda` image with the versions in its configuration."""

    version: str
    os: str
    nccl: str
    suite: str = ""
    """Suite of Ubuntu's archive that the image is made from. Empty: it is made from Debian 13."""
    toolkit: str = "13.0"
    """The CUDA version that the image really contains."""

    @property
    def targets(self) -> str:
        """The beginning of the names of the targets with this image."""
        return f"hpcx-cuda{self.version}-{self.os}"

    @property
    def names(self) -> dict[str, str]:
        """The values for the words in braces in the evidence."""
        minor = self.version.rpartition(".")[0]
        return {"version": self.version, "minor": minor, "dashed": minor.replace(".", "-"), "nccl": self.nccl,
                "plain": self.nccl.partition("+")[0]}  # fmt: skip

    def environment(self, variant: str) -> dict[str, str]:
        """Return the environment variables of the image configuration."""
        found: dict[str, str] = {}
        for kind in ("base", "runtime", "devel")[: 3 if variant == "devel" else 2]:
            for group in evidence()["environment"][kind]:
                found |= {name: value.format(**self.names) for name, value in group["values"].items()}
        return found

    def rows(self, kind: str) -> Iterator[str]:
        """Yield lines `PATH LIBRARY…` for files of a kind.

        `foreign` files are for another architecture. `unmet` files need libraries that do not exist.
        """
        for row in evidence()[kind]:
            yield " ".join([row["path"], row.get("needs", "")]).format(**self.names)

    def held(self, variant: str) -> list[str]:
        """Return the packages that apt must not change."""
        kinds = VARIANTS if variant == "devel" else VARIANTS[:1]
        return [name.format(**self.names) for kind in kinds for name in evidence()["held"][kind]["packages"]]


def known() -> list[Cuda]:
    """Return the images that can be made, the oldest first."""
    return [Cuda(**row) for row in evidence()["images"]]


def of_targets(targets: str) -> Cuda:
    """Return the image of the targets whose names begin with this."""
    return {cuda.targets: cuda for cuda in known()}[targets]


def images(newest: Cuda) -> dict[str, tuple[str, Cuda]]:
    """Map `repository:tag` to variant and CUDA, for the images that targets with one of `known` need.

    Stages that all targets share are compiled on the oldest image.
    """
    oldest = known()[0]
    found = {f"library/ubuntu:{cuda.os.removeprefix('ubuntu')}": ("ubuntu", cuda) for cuda in (oldest, newest)}
    for cuda, variant in ((oldest, "devel"), (newest, "devel"), (newest, "runtime")):
        found[f"nvidia/cuda:{cuda.version}-{variant}-{cuda.os}"] = variant, cuda
    return found


def build_options(variant: str, cuda: Cuda) -> tuple[list[str], str]:
    """Return the options of `docker buildx build` for one of `images`, and the last lines of its Dockerfile."""
    base = ["--build-arg=BASE=ubuntu-archive", f"--build-arg=SUITE={cuda.suite}"] if cuda.suite else []
    if variant == "ubuntu":
        return [f"--target={variant}", *base], ""
    values = {"TOOLKIT": cuda.toolkit, "CUDA": cuda.version, "OS": cuda.os, "NCCL": cuda.nccl,
              "HELD": " ".join(cuda.held(variant)), "FOREIGN": "\n".join(cuda.rows("foreign")),
              "UNMET": "\n".join(cuda.rows("unmet"))}  # fmt: skip
    tail = "\n".join([
        f"FROM {variant}-files AS {variant}", *(f'ENV {k}="{v}"' for k, v in cuda.environment(variant).items()),
        'LABEL org.opencontainers.image.title="nvidia/cuda" maintainer="nobody: STAND-IN made for tests"',
        'ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]\n',
    ])  # fmt: skip
    return [f"--target={variant}", *base, *(f"--build-arg={key}={value}" for key, value in values.items())], tail
