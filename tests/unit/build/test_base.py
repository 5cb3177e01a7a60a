import fcntl
import json
import os
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import pytest

from imagebuild.build import (
    DAY,
    KEYRING,
    VERSION,
    BootstrappedBase,
    BootstrapTools,
    Log,
    base,
    bootstrap,
    image_settings,
    load_into_engine,
)
from imagebuild.core import AptSource, CommandError, ConfigError, ResultError
from imagebuild.oci import add_image, blob_path, images_in, write_index

AMD64, ARM64 = "linux/amd64", "linux/arm64"
SOURCE = AptSource("http://archive.example/debian", "trixie", ("main",), KEYRING)


def _write_tar(path: Path, files: Mapping[str, str]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, BytesIO(text.encode()))


@dataclass
class Machine:
    """Stands in for every program and for the clock."""

    time: float = 1_000_000_000.0
    version: str = "13.1"
    whole: bool = True
    failure: BaseException | None = None
    commands: list[Sequence[str]] = field(default_factory=list)
    emulated: list[str] = field(default_factory=list)

    def run_logged(self, command: Sequence[str], log: Log, *, name: str, env: Mapping[str, str]) -> None:
        self.commands.append(command)
        log("I: running")
        tar = Path(next(word for word in command if word.endswith("root.tar")))
        (tar.parent / "mmdebstrap.1234").mkdir()
        if self.failure:
            raise self.failure
        _write_tar(tar, {VERSION: f"{self.version}\n"} if self.whole else {})

    @property
    def tools(self) -> BootstrapTools:
        return BootstrapTools(
            sources=lambda release: (SOURCE,),
            emulate=self.emulated.append,
            run=lambda *command, **options: "",
            run_logged=self.run_logged,
            now=lambda: self.time,
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setattr(base, "ensure_mmdebstrap", lambda run, log: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return Machine()


def test_one_image_of_all_platforms(machine: Machine, tmp_path: Path) -> None:
    lines: list[str] = []
    made = bootstrap([AMD64, ARM64], tmp_path / "cache", tools=machine.tools, log=lines.append)
    assert [item.platform for item in images_in(made.layout, tmp_path)] == [AMD64, ARM64]
    assert made.context == f"oci-layout://{tmp_path}/cache/layout@{made.digest}"
    assert machine.emulated == ["amd64", "arm64"]  # where it is native, that does nothing
    assert lines[:2] == ["bootstrapping trixie for linux/amd64", "I: running"]


def test_what_was_made_is_used_again(machine: Machine, tmp_path: Path) -> None:
    first = bootstrap([AMD64], tmp_path, tools=machine.tools)
    both = bootstrap([AMD64, ARM64], tmp_path, tools=machine.tools)
    assert bootstrap([AMD64], tmp_path, tools=machine.tools) == first
    assert bootstrap([ARM64, AMD64], tmp_path, tools=machine.tools).digest == both.digest
    assert len(machine.commands) == 2


def test_what_is_too_old_is_made_anew(machine: Machine, tmp_path: Path) -> None:
    first = bootstrap([AMD64], tmp_path, tools=machine.tools)
    machine.time += 8 * DAY
    machine.version = "13.2"
    assert bootstrap([AMD64], tmp_path, tools=machine.tools).digest != first.digest
    assert len(machine.commands) == 2


def test_made_anew_from_the_same_packages_it_is_the_same(machine: Machine, tmp_path: Path) -> None:
    first = bootstrap([AMD64], tmp_path, tools=machine.tools)
    machine.time += 8 * DAY
    assert bootstrap([AMD64], tmp_path, tools=machine.tools) == first
    assert len(machine.commands) == 2


@pytest.mark.parametrize("damage", ["record", "blob"])
def test_a_damaged_cache_is_repaired(machine: Machine, tmp_path: Path, damage: str) -> None:
    first = bootstrap([AMD64], tmp_path, tools=machine.tools)
    if damage == "record":
        next(tmp_path.glob("*.json")).write_text("{")
    else:
        blob_path(first.layout, images_in(first.layout, tmp_path)[0].digest).write_bytes(b"")
    assert bootstrap([AMD64], tmp_path, tools=machine.tools) == first
    assert len(machine.commands) == 2


def test_another_release_or_archive_is_another_base(machine: Machine, tmp_path: Path) -> None:
    bootstrap([AMD64], tmp_path, tools=machine.tools)
    bootstrap([AMD64], tmp_path, tools=machine.tools, release="bookworm")
    assert len(machine.commands) == 2
    assert "bookworm" in machine.commands[1]


def test_what_was_made_long_ago_is_forgotten(machine: Machine, tmp_path: Path) -> None:
    made = bootstrap([AMD64], tmp_path, tools=machine.tools, release="bookworm")
    (old,) = images_in(made.layout, tmp_path)
    os.utime(blob_path(made.layout, old.digest), (1, 1))
    machine.time += 31 * DAY
    machine.version = "13.2"
    bootstrap([AMD64], tmp_path, tools=machine.tools)
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert not blob_path(made.layout, old.digest).exists()


@pytest.mark.parametrize("failure", [CommandError("mmdebstrap failed"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(machine: Machine, tmp_path: Path, failure: BaseException) -> None:
    machine.failure = failure
    with pytest.raises(type(failure)):
        bootstrap([AMD64], tmp_path / "cache", tools=machine.tools)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_leftovers_of_a_killed_process_are_removed(machine: Machine, tmp_path: Path) -> None:
    with base._scratch(tmp_path / "cache") as folder:
        stale = folder.with_name(f"{folder.name}stale")
    (stale / "mmdebstrap.1").mkdir(parents=True)
    other = tmp_path / "tmp" / "imagebuild-base-of-another-cache"
    other.mkdir()
    bootstrap([AMD64], tmp_path / "cache", tools=machine.tools)
    assert list((tmp_path / "tmp").iterdir()) == [other]


def test_a_result_without_a_system_is_reported(machine: Machine, tmp_path: Path) -> None:
    machine.whole = False
    with pytest.raises(ResultError, match="is the disk full"):
        bootstrap([AMD64], tmp_path / "cache", tools=machine.tools)


def test_the_lock_excludes_others(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []

    def flock(_file: object, mode: int) -> None:
        modes.append(mode)
        if mode & fcntl.LOCK_NB:
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", flock)
    lines: list[str] = []
    with base._locked(tmp_path, lines.append):
        assert modes == [fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX]
    assert "waiting for another" in lines[0]


def test_what_cannot_be_made_is_refused(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'linux/s390x'; possible: linux/amd64, linux/arm64"):
        bootstrap(["linux/s390x"], tmp_path, tools=machine.tools)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: cannot be written"):
        bootstrap([AMD64], tmp_path / "file", tools=machine.tools)


def test_labels_hold_no_time_and_no_place() -> None:
    text = json.dumps(dict(image_settings("trixie", "13.1").labels))
    assert "13.1" in text
    assert "http" not in text


def test_a_classic_image_store_gets_the_layer_of_its_one_platform(tmp_path: Path) -> None:
    called: list[tuple[str, ...]] = []

    def run(*argv: str, **_: object) -> str:
        called.append(argv)
        if "inspect" in argv:
            raise CommandError("no such image")
        return ""

    tar = tmp_path / "root.tar"
    with tarfile.open(tar, "w"):
        pass
    manifest = add_image(tmp_path / "layout", tar, "linux/amd64", image_settings("trixie", "13.0"))
    digest = write_index(tmp_path / "layout", [manifest])
    image = BootstrappedBase(tmp_path / "layout", digest, (AMD64,))
    assert load_into_engine(image, {}, run) == f"docker-image://{called[1][-1]}"
    assert called[1][:2] == ("docker", "import")
    assert Path(called[1][-2]).is_file()
    two = BootstrappedBase(tmp_path / "layout", digest, (AMD64, ARM64))
    with pytest.raises(ConfigError, match="one platform at a time"):
        load_into_engine(two, {}, run)
