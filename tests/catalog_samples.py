"""Generated catalogues for tests: the images that a matrix produces over several weeks, with every kind of fact."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import count, islice, product

from imagebuild.project.records import AttachedFile, Catalog, Checks, PublishedImage, PublishedPlatform, Scan
from imagebuild.publish.catalog import newest_first

CUDA = ["12.6.3", "12.8.1", "12.9.1", "13.0.3", "13.1.2", "13.2.1", "13.3.1", "13.4.2"]
UBUNTU = ["ubuntu22.04", "ubuntu24.04", "ubuntu26.04"]
OPEN = ["12.9", "13.0", "13.1", "13.2", "13.3", "13.4", "13.5"]


def digest(*parts: object) -> str:
    return f"sha256:{hashlib.sha256(repr(parts).encode()).hexdigest()}"


def platform(name: str, key: object, dice: random.Random, labels: dict[str, str], created: str) -> PublishedPlatform:
    refs = [AttachedFile(kind=kind, digest=digest(key, name, kind), size_bytes=dice.randrange(10**3, 10**6))
            for kind in ("sbom", "provenance", "verification", "benchmark", "scan")]  # fmt: skip
    measured = dice.random() < 0.3
    found = Checks(
        passed=dice.randrange(50, 90), failed=int(dice.random() < 0.05), skipped=13,
        started=created, runner="docker",
    )  # fmt: skip
    scan = Scan(
        verdict="passed", counts={"medium": dice.randrange(1, 9), "low": 31}, waived=2,
        scanner="debsecan 0.4.20.1", database="security tracker of 2026-11-20", started=created,
    )  # fmt: skip
    on_gpus = (found.model_copy(update={"gpus": 8, "device": "NVIDIA H100 80GB HBM3"}),) if measured else ()
    return PublishedPlatform(
        platform=name, digest=digest(key, name), size_bytes=dice.randrange(300_000_000, 4_000_000_000),
        created=created, labels=labels, packages=dice.randrange(150, 600), scan=scan if dice.random() < 0.9 else None,
        checks=(*on_gpus, found), evidence=tuple(refs),
    )  # fmt: skip


def image(
    name: str, cuda: str, os: str, variant: str, nccl: str, mpi: str, created: str, dice: random.Random
) -> PublishedImage:
    revision = f"{dice.randrange(16**7):07x}"
    axes = {"cuda": cuda, "os": os, "variant": variant}
    versions = {
        "cuda-image": cuda, "doca-ofed": "3.5.0", "gdrcopy": "2.6", "nvbandwidth": "0.8", "pmix": "5.0.7-1",
        "sshd": "1:10.0p1-7", "nccl": nccl, "perftest": "26.04.17", "ucx": "1.22.0", "nccl-tests": "2.19.6",
    }  # fmt: skip
    labels = {f"imagebuild.component.{k}": v for k, v in versions.items()}
    labels |= {f"imagebuild.axis.{k}": v for k, v in axes.items()}
    named = mpi.lower().replace(" ", "").replace("-", "")
    tag = f"cuda{cuda}-nccl{nccl}-{named}-{os}-{variant}-{revision}"
    key = (name, tag, created)
    names = ("linux/amd64", "linux/arm64") if dice.random() < 0.9 else ("linux/amd64",)
    return PublishedImage(
        target=f"{name}-cuda{cuda}-{os}-{variant}", image=name, axes=axes, versions=versions,
        description="HPC-X, NCCL with its network plug-ins and the benchmarks of GPU networking",
        stack={"nccl": nccl, "mpi": mpi}, repository=f"registry.example.org/gpu/{name}", digest=digest(*key),
        tags=(tag,), aliases=(), revision=revision, created=created,
        platforms=tuple(platform(n, key, dice, labels, created) for n in names),
        restricted={"hpcx": "the EULA in the archive"} if name == "hpcx" else {},
    )  # fmt: skip


def catalog(number: int = 500, seed: int = 1) -> Catalog:
    """Generate a catalogue with `number` images, the newest first within each name."""
    dice = random.Random(seed)
    combinations = [
        ("hpcx", c, o, v) for c, o, v in product(CUDA, UBUNTU, ("devel", "runtime")) if o != UBUNTU[2] or c >= "13.3"
    ]
    combinations += [("open", c, "debian13", v) for c, v in product(OPEN, ("runtime", "devel"))]
    combinations += [("quickstart", c, "debian13", "runtime") for c in ("13.0", "13.5")]

    def all_of_them() -> Iterator[PublishedImage]:
        for week in count():
            created = f"2026-{11 - week // 4:02d}-{21 - week % 4 * 7 if week % 4 < 3 else 1:02d}T08:00:00Z"
            for name, cuda, os, variant in combinations:
                mpi = "HPC-X 2.51" if name == "hpcx" else "Open MPI 5.0.10"
                yield image(name, cuda, os, variant, "2.32.3" if week < 5 else "2.31.2", mpi, created, dice)

    made = list(islice(all_of_them(), number))
    images = [i for name in ("hpcx", "open", "quickstart") for i in newest_first(i for i in made if i.image == name)]
    where = "registry.example.org/gpu"
    return Catalog(repository=where, read="2026-11-21T10:45:00Z", imagebuild="0.6.0", images=tuple(images))
