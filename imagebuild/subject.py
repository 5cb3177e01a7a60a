"""What is verified: an image by tag, digest, target id or OCI layout, one of ours or anybody's."""

from __future__ import annotations

import json
import tarfile
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from docker import DockerClient
from docker.errors import DockerException, ImageNotFound

from imagebuild import checks, docker
from imagebuild.errors import ConfigError
from imagebuild.models import Plan, Target


@dataclass(frozen=True)
class Subject:
    """An image, and what it says about itself."""

    name: str
    """As it was asked for, or the tag of a target."""
    platform: str = "unknown"
    digest: str | None = None
    reference: str | None = None
    """What the engine knows it by."""
    layout: Path | None = None
    """Where its files can be read without an engine."""
    labels: Mapping[str, str] = field(default_factory=dict)
    target: Target | None = None

    @property
    def components(self) -> dict[str, str]:
        """Component → version; empty for an image that was not built here."""
        said = checks.components_of(self.labels)
        return said or (dict(self.target.components) if self.target and not self.reference else {})

    @property
    def axes(self) -> dict[str, str]:
        said = checks.axes_of(self.labels)
        return said or (dict(self.target.axes) if self.target and not self.reference else {})


def is_layout(image: str) -> bool:
    """Whether this names an OCI layout: a folder with `oci-layout` and `index.json`."""
    return Path(image, "oci-layout").is_file()


def in_engine(client: DockerClient, plan: Plan, image: str, *, pull: bool) -> Subject:
    """An image in the engine's store. Raises ConfigError if it is not there, CommandError if the engine fails."""
    target = target_of(plan, image)
    reference = target.tags[0] if target else image
    if pull and not target:
        _pull(client, reference)
    info = docker.inspect(client, reference)
    wanted = reference.partition("@")[2]
    subject = Subject(
        name=reference, platform=info.platform, digest=wanted or info.digest, reference=info.id, labels=info.labels,
        target=target,
    )  # fmt: skip
    if target and subject.components != target.components:
        raise ConfigError(f"{image}: the image in the engine's store has other versions; build it again")
    return subject


def elsewhere(plan: Plan, image: str | None, layout: Path | None) -> Subject:
    """An image that a command prefix leads to: a target's id or a layout may say what should be in it."""
    target = target_of(plan, image) if image else None
    labels, platform = described(layout) if layout else ({}, "unknown")
    return Subject(name=image or "(unnamed)", platform=platform, layout=layout, labels=labels, target=target)


def renamed(found: Subject, name: str, layout: Path) -> Subject:
    """The same image, whose files are in a layout too."""
    return replace(found, name=name, layout=layout)


def described(layout: Path) -> tuple[dict[str, str], str]:
    """Labels and platform of a layout with one image. Raises ConfigError if it is none."""
    try:
        manifest = _blob(layout, only(layout)["digest"])
        if "manifests" in manifest:
            manifest = _blob(layout, manifest["manifests"][0]["digest"])
        config = _blob(layout, manifest["config"]["digest"])
        return dict(config.get("config", {}).get("Labels") or {}), f"{config['os']}/{config['architecture']}"
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{layout}: cannot be read as an OCI layout: {error}") from None


def _blob(layout: Path, digest: str) -> Any:
    return json.loads((layout / "blobs" / digest.replace(":", "/")).read_text(encoding="utf-8"))


def target_of(plan: Plan, image: str) -> Target | None:
    return next((t for t in plan.targets if t.id == image), None)


def _pull(client: DockerClient, reference: str) -> None:
    with suppress(ImageNotFound):
        client.images.get(reference)
        return
    with docker.explained(f"docker pull {reference}"):
        client.images.pull(reference)


@contextmanager
def loaded(client: DockerClient, layout: Path) -> Iterator[str]:
    """A layout in the engine's store, under a name of its own that goes with the context.

    Names that the layout has for its images are not used: they may be those of other images there.
    """
    name = f"imagebuild-verify/{uuid.uuid4().hex[:12]}:1"
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            index = json.dumps(_named(layout, name)).encode()
            for path in sorted(p for p in layout.rglob("*") if p.is_file()):
                member = archive.gettarinfo(path, str(path.relative_to(layout)))
                if member.name == "index.json":
                    member.size = len(index)
                    with tempfile.TemporaryFile() as changed:
                        changed.write(index)
                        changed.seek(0)
                        archive.addfile(member, changed)
                elif member.name != "manifest.json":  # of docker save, with the names
                    with path.open("rb") as content:
                        archive.addfile(member, content)
        file.seek(0)
        try:
            with docker.explained(f"docker load {layout}"):
                client.images.load(cast(Any, file))
            yield name
        finally:
            with suppress(DockerException, OSError):
                client.images.remove(name, force=True)


def _named(layout: Path, name: str) -> dict[str, Any]:
    """The layout's index with its image, of that name."""
    annotations = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    return {"schemaVersion": 2, "manifests": [{**only(layout), "annotations": annotations}]}


def only(layout: Path) -> dict[str, Any]:
    """The descriptor of the image in a layout. Raises ConfigError if there is not exactly one."""
    path = layout / "index.json"
    try:
        manifests = [dict(m) for m in json.loads(path.read_text(encoding="utf-8"))["manifests"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is no index of an OCI layout: {error}") from None
    if len(manifests) != 1:
        raise ConfigError(f"{path}: has {len(manifests)} images; one is needed")
    return manifests[0]
