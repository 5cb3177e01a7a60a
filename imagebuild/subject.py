"""What is verified: an image by tag, digest, target id or OCI layout, one of ours or anybody's."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

from docker import DockerClient
from docker.errors import DockerException, ImageNotFound

from imagebuild import checks, docker
from imagebuild.errors import CommandError, ConfigError
from imagebuild.inspection import describe
from imagebuild.models import Plan, Target


@dataclass(frozen=True)
class Subject:
    """An image, and what it says about itself."""

    name: str
    """As it was asked for, or the tag of a target."""
    platform: str = ""
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


def saved_at(image: str) -> Path | None:
    """The path that `oci:PATH` names, or that can be no image's name: of an OCI layout, or an archive of one."""
    if image.startswith("oci:"):
        return Path(image.removeprefix("oci:"))
    path = Path(image)
    is_path = image.startswith(("/", "./", "../")) or (path / "oci-layout").is_file() or path.is_file()
    return path if is_path else None


def saved(path: Path) -> Subject:
    """An image in a layout or an archive. Raises ConfigError if it is none, ResultError if it cannot be read."""
    about = describe(path)
    return Subject(
        name=str(path), platform=", ".join(image.platform for image in about), digest=about[0].digest, layout=path,
        labels=about[0].labels,
    )  # fmt: skip


def in_engine(client: DockerClient, plan: Plan, image: str, *, pull: bool) -> Subject:
    """An image in the engine's store. Raises ConfigError if it is not there, CommandError if the engine fails."""
    target = target_of(plan, image)
    reference = target.name if target else image
    if pull and not target:
        _pull(client, reference)
    info = docker.inspect(client, reference)
    wanted = reference.partition("@")[2]
    subject = Subject(
        name=reference, platform=info.platform, digest=wanted or info.digest, reference=info.reference,
        labels=info.labels, target=target,
    )  # fmt: skip
    if target and subject.components != target.components:
        raise ConfigError(f"{image}: the image in the engine's store has other versions; build it again")
    return subject


def elsewhere(plan: Plan, image: str | None, layout: Path | None) -> Subject:
    """An image that a command prefix leads to: a target's id or a layout may say what should be in it."""
    target = target_of(plan, image) if image else None
    if layout:
        return replace(saved(layout), name=image or str(layout), target=target)
    return Subject(name=image or "(unnamed)", target=target)


def _manifest_of(layout: Path, arch: str) -> Mapping[str, Any]:
    """The manifest in a layout with one image; of several platforms, that of this architecture or the first."""
    try:
        manifest = _blob(layout, only(layout)["digest"])
        if "manifests" in manifest:
            entries = [m for m in manifest["manifests"] if m.get("platform", {}).get("os") != "unknown"]
            entries.sort(key=lambda m: m.get("platform", {}).get("architecture") != arch)
            manifest = _blob(layout, entries[0]["digest"])
        return dict(manifest)
    except (OSError, ValueError, LookupError, TypeError) as error:
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

    Names that the layout has for its images are not used: they may be those of other images there. Raises
    ConfigError if it has not exactly one image, CommandError if the engine fails.
    """
    name = f"docker.io/imagebuild-verify/{uuid.uuid4().hex[:12]}:1"
    with docker.explained("docker version"):
        arch = client.version()["Arch"]
    replaced = {
        "index.json": _index(only(layout), name),
        # For engines that keep images unpacked, and read no index.
        "manifest.json": _manifest(_manifest_of(layout, arch), name),
    }
    with tempfile.TemporaryFile() as file:
        try:
            _archived(layout, replaced, file)
        except OSError as error:
            raise CommandError(
                f"{layout}: cannot be packed for the engine: {error.strerror}; TMPDIR may name a folder with more room"
            ) from None
        file.seek(0)
        try:
            with docker.explained(f"docker load {layout}"):
                # Not through `images`, which asks for the image by a name without its registry.
                for line in cast(Any, client.api).load_image(file):
                    if "error" in line:
                        raise CommandError(f"docker load {layout}: {line['error']}")
            yield name
        finally:
            with suppress(DockerException, OSError):
                client.images.remove(name, force=True)


def _archived(layout: Path, replaced: Mapping[str, Any], file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path in sorted(p for p in layout.rglob("*") if p.is_file() and p.name not in replaced):
            archive.add(path, str(path.relative_to(layout)))
        for place, document in replaced.items():
            content = json.dumps(document).encode()
            member = tarfile.TarInfo(place)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _index(descriptor: Mapping[str, Any], name: str) -> dict[str, Any]:
    annotations = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    return {"schemaVersion": 2, "manifests": [{**descriptor, "annotations": annotations}]}


def _manifest(manifest: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    def path(descriptor: Mapping[str, Any]) -> str:
        return "blobs/" + str(descriptor["digest"]).replace(":", "/")

    layers = [path(layer) for layer in manifest["layers"]]
    return [{"Config": path(manifest["config"]), "RepoTags": [name], "Layers": layers}]


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
