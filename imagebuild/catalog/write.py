"""Files of the catalogue: reads `images.json` and what lies beside it, asks registries, writes the site."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from imagebuild import files
from imagebuild import profiles as hardware
from imagebuild.catalog import read, site
from imagebuild.catalog.describe import Ours
from imagebuild.catalog.file import read_catalog
from imagebuild.catalog.known import Known, known
from imagebuild.catalog.models import Catalog, PublishedImage
from imagebuild.catalog.read import COPIED_BYTES, FOLDER, Reading, Shop
from imagebuild.errors import ConfigError
from imagebuild.mirrors import normalized
from imagebuild.registry import client


def load(path: Path) -> Reading:
    """A catalogue that was written before, with the copies that are there. Raises ConfigError or ResultError."""
    catalog = read_catalog(path)
    copies = {}
    for name in {e.file for image in catalog.images for p in image.platforms for e in p.evidence if e.file}:
        place = path.parent / name
        if _is_copy(name) and place.is_file():
            copies[name] = files.read_text(place)
    return Reading(_without_lost(catalog, set(copies)), copies)


def _is_copy(name: str) -> bool:
    """Whether it is where copies are: a file that somebody else wrote must not name any other."""
    parts = PurePosixPath(name).parts
    return len(parts) == 2 and parts[0] == FOLDER and parts[1] not in (".", "..")


def _without_lost(catalog: Catalog, there: set[str]) -> Catalog:
    def image(one: PublishedImage) -> PublishedImage:
        platforms = tuple(
            p.model_copy(
                update={"evidence": tuple(
                    e if e.file is None or e.file in there else e.model_copy(update={"file": None}) for e in p.evidence
                )}
            )
            for p in one.platforms
        )  # fmt: skip
        return one.model_copy(update={"platforms": platforms})

    return catalog.model_copy(update={"images": tuple(image(one) for one in catalog.images)})


def from_registry(ours: Ours, profiles: Path, earlier: Path | None = None) -> Reading:
    """What the registries of the plan have; what an earlier `images.json` tells is not read again.

    Raises ConfigError without a registry, CommandError if one fails.
    """
    for target in ours.plan.targets:
        for tag in target.tags:
            if normalized(tag) != tag:
                raise ConfigError(f"catalog: {tag} names no registry; say --registry, or `repository:` in the matrix")
    hosts = {reference.host for reference in read.repositories(ours.plan)}
    machines = hardware.load_profiles(profiles) if profiles.is_dir() else {}
    before = load(earlier) if earlier else None
    shop = Shop(
        {host: client.connect(host) for host in hosts},
        ours,
        {name: document.model for name, document in machines.items()},
        known(before.catalog, before.copies, COPIED_BYTES) if before else Known(),
    )
    return read.read(shop)


def write(reading: Reading, folder: Path) -> int:
    """Write the site, and remove pages and copies of images that are gone; how many files it has.

    Raises ConfigError if the folder cannot be written to.
    """
    texts = {**dict(site.pages(reading.catalog)), **reading.copies}
    for name, text in texts.items():
        files.write_text(folder / name, text)
    for old in (*folder.glob("images/*/*.html"), *folder.glob(f"{FOLDER}/*.json")):
        if str(old.relative_to(folder)) not in texts:
            old.unlink()
    return len(texts)
