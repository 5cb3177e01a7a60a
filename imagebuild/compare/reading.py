"""Read what is compared: of images, what their files say; of targets that are not built, the plan."""

from __future__ import annotations

import json
import platform as machine
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from imagebuild.checks import components_of
from imagebuild.compare import facts
from imagebuild.compare.facts import Facts
from imagebuild.compare.models import Comparison, Side, Title
from imagebuild.errors import ConfigError
from imagebuild.inspection.lookup import DPKG, Part, dpkg_status
from imagebuild.locating.located import Found, Located
from imagebuild.locating.resolve import Places
from imagebuild.models import Target
from imagebuild.packages import Package, installed, of_sbom, versions
from imagebuild.records import VerifyResult
from imagebuild.report.gather import Gathered, gather
from imagebuild.results.models import Results
from imagebuild.results.read import read

ARCHITECTURES = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
NOT_BUILT = "is not built, or has other versions than the plan"


@dataclass(frozen=True)
class Wish:
    """What is compared."""

    a: str
    b: str
    platform: str | None = None
    results: tuple[Path, Path] | None = None
    """Results of A and of B, as files or folders."""


def compare(wish: Wish, places: Places) -> Comparison:
    """Find both, read them, and say what differs.

    Raises ConfigError if there is no such image, CommandError if the engine or a registry fails, ResultError if
    something cannot be read.
    """
    known: dict[str, Part] = {}
    with ExitStack() as stack:
        both = [stack.enter_context(places.find(name)) for name in (wish.a, wish.b)]
        chosen = _platforms(both, wish.platform)
        given = wish.results or (None, None)
        a, b = (
            _of_target(one, path, alone=any(isinstance(other, Found) for other in both))
            if isinstance(one, Target)
            else _of_image(one, one.image(platform), path, known)
            for one, platform, path in zip(both, chosen, given, strict=True)
        )
        made = facts.compare(a, b)
    others = [] if wish.platform else _others(both, chosen)
    return made.model_copy(update={"not_compared": (*made.not_compared, *others)})


def _platforms(both: list[Found | Target], wanted: str | None) -> list[str | None]:
    """The platform of each: the one that is wanted, this machine's if both have it, else one that both have."""
    if wanted:
        return [wanted, wanted]
    common = [p for p in both[0].platforms if p in both[1].platforms]
    own = ARCHITECTURES.get(machine.machine())
    if common:
        return [own if own in common else common[0]] * 2
    return [one.platforms[0] for one in both]


def _others(both: list[Found | Target], chosen: list[str | None]) -> list[str]:
    if chosen[0] != chosen[1]:
        return [f"no platform is in both: {both[0].platforms[0]} is compared with {both[1].platforms[0]}"]
    common = [p for p in both[0].platforms if p in both[1].platforms and p != chosen[0]]
    built = any(isinstance(one, Found) for one in both)
    return [f"{platform}: compare it with --platform {platform}" for platform in common] if built else []


def _of_target(target: Target, given: Path | None, *, alone: bool) -> Facts:
    """Of a target that is not built; `alone` if the other one is."""
    gathered = _gathered(given)
    values: dict[Title, dict[str, str]] = {"components": dict(target.components)}
    if not alone:  # an image that was built for one platform so far lacks nothing
        values["platforms"] = dict.fromkeys(target.platforms, "yes")
    if gathered and gathered.verifications:
        values["checks"] = facts.checks(gathered.verifications)
    unknown: dict[Title, str] = dict.fromkeys(facts.SECTIONS, NOT_BUILT)
    side = Side(name=target.id, origin="the plan", digest=None, platform=None)
    results = gathered.results if gathered else Results()
    return Facts(side, values, {**unknown, "checks": "has no results of verify"}, results=results)


def _of_image(found: Found, image: Located, given: Path | None, known: dict[str, Part]) -> Facts:
    notes: list[str] = []
    gathered = _gathered(given) or _attached(image)
    values: dict[Title, dict[str, str]] = {
        "components": components_of(image.labels),
        "environment": facts.environment(image.settings),
        "settings": facts.settings(image.settings),
        "licences": facts.licences(image.labels),
        "labels": facts.labels(image.labels),
        "platforms": dict.fromkeys(found.platforms, "yes"),
    }
    packages, how = _packages(image, known)
    notes += [how] if how else []
    if packages is not None:
        values["packages"] = versions(packages, image.architecture)
    if gathered and gathered.verifications:
        values["checks"] = facts.checks(gathered.verifications)
        notes += _strangers(gathered.verifications, {image.digest, found.digest}, found.name)
    return Facts(
        side=Side(name=found.name, origin=found.origin, digest=image.digest, platform=image.platform),
        values=values,
        unknown={"packages": "has no packages of dpkg", "checks": "has no results of verify"},
        layers=facts.layers(image.config, [(layer.digest, layer.size) for layer in image.layers]),
        compressed=image.compressed,
        notes=tuple(notes),
        results=gathered.results if gathered else Results(),
    )


def _packages(image: Located, known: dict[str, Part]) -> tuple[tuple[Package, ...] | None, str]:
    """Packages of the distribution, and how they were found out where that is worth saying."""
    for content in image.attached("sbom"):
        try:
            listed = of_sbom(json.loads(content))
        except (ValueError, TypeError, AttributeError):
            continue
        if listed:
            return listed, f"packages of {image.name} are those of its SBOM; no layer was fetched"
    before = set(known)
    status = dpkg_status(image.files(DPKG, known))
    how = ""
    if image.remote:
        size = sum(layer.size for layer in image.layers if layer.digest in known and layer.digest not in before)
        how = f"{image.name} has no SBOM with packages, so {size / 1e6:.1f} MB of its layers were fetched"
    return (None if status is None else installed(status)), how


def _gathered(given: Path | None) -> Gathered | None:
    """Results that the user named. Raises ConfigError if there are none."""
    if given is None:
        return None
    found = gather([given], read)
    if found.nothing_in:
        raise ConfigError(f"--results {given}: has no results; give what verify or report wrote, or a log")
    return found


def _attached(image: Located) -> Gathered | None:
    """Results that refer to the image in its registry."""
    contents = [(kind, content) for kind in ("verification", "benchmark") for content in image.attached(kind)]
    if not contents:
        return None
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        for i, (kind, content) in enumerate(contents):
            (Path(folder) / f"{kind}-{i}.json").write_bytes(content)
        return gather([Path(folder)], read)


def _strangers(verifications: tuple[VerifyResult, ...], own: set[str | None], name: str) -> Iterator[str]:
    for verification in verifications:
        if verification.digest and verification.digest not in own:
            yield f"results that were given for {name} are of {verification.digest}"
