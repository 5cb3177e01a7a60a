"""Where the inputs of a build come from: mirrors, a bundle that is being made, or a bundle that is used.

BuildKit gets what imagebuild fetched as named contexts in place of stages and images, and steps that install get
secrets. Neither is in the Dockerfile, and steps compare inputs by content: whoever uses no mirror shares the cache.
"""

from __future__ import annotations

import netrc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from imagebuild import aptget, depot, gitstore, pipconf
from imagebuild.bundle import Bundle, Recording
from imagebuild.engine import Endpoint
from imagebuild.errors import ResultError
from imagebuild.fetch import Fetcher, sha256_of, without_login
from imagebuild.files import read_text
from imagebuild.gitstore import GitStore
from imagebuild.inputs import ArchiveFile, Fetched, GitCommit, KeyFile, Needs
from imagebuild.settings import Settings
from imagebuild.shelf import RecordingShelf
from imagebuild.trees import Trees
from imagebuild.wheelindex import RecordingIndex, StoredIndex


@dataclass(frozen=True)
class Order:
    """What is needed."""

    needs: Mapping[str, Needs]
    """By target."""
    bases: Mapping[str, str]
    """Image → context of what was bootstrapped in its place."""
    engine: Endpoint
    settings: Settings
    ca: Path | None
    trees: Trees
    secrets: Path
    """Folder for secrets; nobody else may read it."""
    note: Callable[[str], None]

    @property
    def images(self) -> frozenset[str]:
        """Images that no base replaces."""
        return frozenset(image for need in self.needs.values() for image in need.images) - frozenset(self.bases)

    def secret(self, name: str, text: str) -> Path:
        path = self.secrets / name
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    def depot_secrets(self, address: str, *, recording: bool) -> dict[str, Path]:
        return {
            "apt-get": self.secret("apt-get", aptget.for_depot(address, recording=recording)),
            "pip.conf": self.secret("pip.conf", pipconf.text(f"{address}/simple/")),
        }


@dataclass(frozen=True)
class Supply:
    """What bake is told."""

    images: Mapping[str, str]
    """Image → context."""
    stages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Target → stage → context."""
    secrets: Mapping[str, Path] = field(default_factory=dict)


@dataclass
class Materials:
    """Turns what was fetched into contexts."""

    trees: Trees
    file: Callable[[str], Path]
    """Address → a file on this machine."""
    git: GitStore
    note: Callable[[str], None]

    def context(self, item: Fetched) -> str:
        """Raises ResultError for a file that is not what the lock says, and as `file` and the git store."""
        match item:
            case ArchiveFile(url, sha256):
                return self.trees.find(f"archive {url} {sha256}") or self._file(url, f"archive {url} {sha256}", sha256)
            case KeyFile(url):
                path = self.file(url)
                key = f"key {url} {sha256_of(path)}"
                return self.trees.find(key) or self.trees.add_file(key, name_of(url), path)
            case GitCommit(url, commit):
                return self.trees.find(f"git {commit}") or self._commit(url, commit)

    def _file(self, url: str, key: str, sha256: str) -> str:
        self.note(f"fetching {url}")
        path = self.file(url)
        if (found := sha256_of(path)) != sha256:
            raise ResultError(f"{url}: its sha256 is {found}, but imagebuild.lock has {sha256}")
        return self.trees.add_file(key, name_of(url), path)

    def _commit(self, url: str, commit: str) -> str:
        if not self.git.has(commit):
            self.note(f"fetching {url} {commit}")
            self.git.fetch(url, commit)
        with tempfile.TemporaryDirectory(prefix="imagebuild-", dir=self.trees.folder) as folder:
            self.git.checkout(url, commit, Path(folder))
            return self.trees.add_folder(f"git {commit}", Path(folder))


def name_of(url: str) -> str:
    """The file name that ADD gives what it downloads."""
    return urlsplit(url).path.rpartition("/")[2]


@contextmanager
def mirrored(order: Order) -> Iterator[Supply]:
    """Inputs that have a mirror come from there, the others from where the Dockerfile says."""
    mirrors, settings = order.settings.mirrors, order.settings
    images = {image: f"docker-image://{m}" for image in order.images if (m := mirrors.image(image)) != image}
    wanted = {
        target: {stage: item for stage, item in need.stages.items() if mirrors.download(item.url) != item.url}
        for target, need in order.needs.items()
    }
    order.trees.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="imagebuild-", dir=order.trees.folder) as scratch,
        gitstore.environment(order.ca, settings.netrc_file) as environ,
    ):
        shelf = RecordingShelf(Path(scratch), Fetcher(order.ca, settings.netrc_file), mirrors)
        git = GitStore(Path(scratch) / "git", mirrors.download, environ)
        stages = _contexts(Materials(order.trees, shelf.get, git, order.note), wanted)
    yield Supply({**order.bases, **images}, stages, _mirror_secrets(order))


def _mirror_secrets(order: Order) -> dict[str, Path]:
    mirrors, file = order.settings.mirrors, order.settings.netrc_file
    result = {}
    if mirrors.downloads:
        text = aptget.for_mirrors(mirrors.downloads, read_text(file) if file else "")
        result["apt-get"] = order.secret("apt-get", text)
    if mirrors.python_index:
        found = netrc.netrc(file).authenticators(urlsplit(mirrors.python_index).hostname or "") if file else None
        login = (found[0], found[2]) if found else None
        result["pip.conf"] = order.secret("pip.conf", pipconf.text(mirrors.python_index, login))
    return result


@contextmanager
def recording(order: Order, into: Recording) -> Iterator[Supply]:
    """All inputs are fetched, through mirrors where there are any, and kept in a bundle."""
    settings, mirrors = order.settings, order.settings.mirrors
    index, logins = without_login(mirrors.python_index or pipconf.configured() or pipconf.default())
    shelf = RecordingShelf(into.folder, Fetcher(order.ca, settings.netrc_file, logins), mirrors)
    with gitstore.environment(order.ca, settings.netrc_file) as environ:
        git = GitStore(into.folder / Bundle.GIT, mirrors.download, environ)
        for item in dict.fromkeys(item for need in order.needs.values() for item in need.stages.values()):
            order.note(f"fetching {item.url}")
            if isinstance(item, GitCommit):
                git.fetch(item.url, item.commit)
            else:
                shelf.get(item.url)
        materials = Materials(order.trees, shelf.get, git, order.note)
        stages = _contexts(materials, {target: need.stages for target, need in order.needs.items()})
    images = {image: into.add_image(image, mirrors.image(image), order.note) for image in sorted(order.images)}
    images |= {image: into.add_base(image, context) for image, context in order.bases.items()}
    wanted = frozenset(digest for need in order.needs.values() for digest in need.wheels)
    wheels = RecordingIndex(shelf, index.rstrip("/") + "/", wanted)
    content = depot.Content(shelf, wheels, order.note)
    with depot.serving(depot.gateway(order.engine), content) as address:
        yield Supply(images, stages, order.depot_secrets(address, recording=True))
    into.finish(shelf.files, wheels.wheels, order.needs)


@contextmanager
def replaying(order: Order, bundle: Bundle) -> Iterator[Supply]:
    """All inputs come from a bundle."""
    shelf = bundle.shelf

    def file(url: str) -> Path:
        if not shelf.find(url):
            raise ResultError(f"{bundle.folder}: has no {url}; make the bundle again")
        shelf.check(url)
        return shelf.folder / shelf.files[url].path

    materials = Materials(order.trees, file, bundle.git, order.note)
    stages = _contexts(materials, {target: need.stages for target, need in order.needs.items()})
    content = depot.Content(shelf, StoredIndex(shelf, bundle.manifest.wheels), order.note)
    with depot.serving(depot.gateway(order.engine), content) as address:
        yield Supply(bundle.contexts(order.images), stages, order.depot_secrets(address, recording=False))


def _contexts(materials: Materials, wanted: Mapping[str, Mapping[str, Fetched]]) -> dict[str, dict[str, str]]:
    unique = dict.fromkeys(item for stages in wanted.values() for item in stages.values())
    made = {item: materials.context(item) for item in unique}
    return {target: {stage: made[item] for stage, item in stages.items()} for target, stages in wanted.items()}
