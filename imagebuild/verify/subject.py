"""Find the image that is meant by a tag, a digest, a target's id, a layout or an archive."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

from docker import DockerClient
from docker.errors import DockerException, ImageNotFound
from pydantic import ValidationError

from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.files import read_text
from imagebuild.oci import engine, image
from imagebuild.oci.image import FoundImage
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry
from imagebuild.project.matrix import Plan, Target
from imagebuild.project.records import BuildResult
from imagebuild.verify import checks
from imagebuild.verify.checks import components_of
from imagebuild.verify.rules import describe_images


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
    about = describe_images(path)
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
    info = engine.inspect_image(client, reference)
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
    with engine.sdk_errors_explained(f"docker pull {reference}"):
        client.images.pull(reference)


@contextmanager
def loaded(client: DockerClient, layout: Path) -> Iterator[str]:
    """A layout in the engine's store, under a name of its own that goes with the context.

    Names that the layout has for its images are not used: they may be those of other images there. Raises
    ConfigError if it has not exactly one image, CommandError if the engine fails.
    """
    name = f"docker.io/imagebuild-verify/{uuid.uuid4().hex[:12]}:1"
    with engine.sdk_errors_explained("docker version"):
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
            with engine.sdk_errors_explained(f"docker load {layout}"):
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


NO_PLAN = Plan(targets=(), excluded=())
ENGINE, REGISTRY = "engine:", "registry:"
"""Say where to look; without, the engine comes before the registry."""


def _connect(host: str) -> Registry:
    from imagebuild.oci import registry  # noqa: PLC0415 - only where a registry is read

    return registry.connect_registry(host)


@dataclass(frozen=True)
class ImageFinder:
    """Where images can be."""

    plan: Plan = NO_PLAN
    folder: Path = Path("build")
    """Where builds leave layouts of targets."""
    offline: bool = False
    """Ask no registry."""
    connect: Callable[[str], Registry] = field(default=_connect)

    def target(self, name: str) -> Target | None:
        return target_of(self.plan, name)

    @contextmanager
    def find(self, name: str) -> Iterator[FoundImage | Target]:
        """The image that is meant, or the target if it is not built; what is unpacked goes with the context.

        Raises ConfigError if there is no such image, CommandError if the engine or a registry fails, ResultError if
        what is found cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            try:
                yield self._found(name, Path(folder))
            except OSError as error:
                why = f"{error.strerror or error}; TMPDIR may name a folder with more room"
                raise ResultError(f"{name}: cannot be unpacked to be read: {why}") from None

    @contextmanager
    def built(self, name: str) -> Iterator[FoundImage]:
        """Find an image that is there. Raises as `find`, and ConfigError for a target that is not built."""
        with self.find(name) as found:
            if isinstance(found, Target):
                raise ConfigError(f"{name}: is not built, or has other versions than the plan; build it first")
            yield found

    def _found(self, name: str, folder: Path) -> FoundImage | Target:
        if path := saved_at(name):
            return image.image_in_files(name, path, folder)
        if target := self.target(name):
            return self._built(target, folder) or target
        bare = name.removeprefix(ENGINE).removeprefix(REGISTRY)
        if not name.startswith(REGISTRY) and (client := image.engine_with_image(bare)):
            return image.image_in_engine(name, client, bare, folder)
        if name.startswith(ENGINE):
            raise ConfigError(f"{name}: the engine's store has no such image")
        reference = parse_reference(bare)
        if self.offline:
            raise ConfigError(f"{name}: is not in the engine's store, and --offline asks no registry; give a layout")
        return image.image_in_registry(name, reference, self.connect(reference.host), folder)

    def _built(self, target: Target, folder: Path) -> FoundImage | None:
        """A target in the engine's store, in the folder of builds or where it was pushed to, if it has the versions of
        the plan.
        """
        if client := image.engine_with_image(target.name):
            found = image.image_in_engine(target.id, client, target.name, folder)
            if _is(found, target):
                return found
        path = self.folder / target.id / "layout"
        if path.is_dir():
            found = image.image_in_files(target.id, path, folder)
            if _is(found, target):
                return found
        if (pushed := self._pushed(target)) and not self.offline:
            found = image.image_in_registry(target.id, pushed, self.connect(pushed.host), folder)
            if _is(found, target):
                return found
        return None

    def _pushed(self, target: Target) -> ImageReference | None:
        """Where the last build pushed a target to, if its result is in the folder of builds."""
        path = self.folder / target.id / "result.json"
        if not path.exists():
            return None
        try:
            result = BuildResult.model_validate_json(read_text(path))
        except ValidationError as error:
            why = f"{error.errors()[0]['msg']}; was it written by another version of imagebuild? build again"
            raise ResultError(f"{path}: {why}") from None
        if result.repository is None or result.digest is None:
            return None
        return parse_reference(result.repository).at(result.digest)


def _is(found: FoundImage, target: Target) -> bool:
    return all(components_of(found.choose(platform).labels) == target.components for platform in found.platforms)
