"""The lock: what sources need of it, what nothing uses, and what names of sources mean."""

import json
from datetime import date
from pathlib import Path

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.lock.resolve import keys_of, lock_text, merged_sources, without_unused
from imagebuild.project.lockfile import (
    UNREAD,
    Archive,
    BaseImage,
    Entry,
    GitRef,
    Key,
    Lock,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    Wheel,
    WheelSet,
    check_pinned,
    key_of,
    lacks,
)
from imagebuild.project.plan import Plan
from imagebuild.project.project import Project
from imagebuild.render.renderer import Renderer
from tests.unit.lock.lock_fakes import KEY, A, B, lock_of

REPOSITORY = "https://example.org/repository/"


def packages(*names: str, url: str = REPOSITORY, key: str = "k") -> PackageSource:
    return PackageSource(url, "/", key, names)


def wheel(name: str, version: str) -> Wheel:
    return Wheel(name=name, version=version, sha256={"amd64": A, "arm64": B})


ENTRIES: dict[Key, Entry] = {
    ("archives", "https://example.org/a.tar"): A,
    ("git", "https://example.org/g.git v1"): "1" * 40,
    ("git", "https://example.org/g.git v2"): "2" * 40,
    ("images", "debian:13"): LockedImage(digest=f"sha256:{A}", platforms={"linux/amd64": f"sha256:{B}"}),
    ("repositories", REPOSITORY): LockedRepository(fingerprint=KEY, packages={"a": "1", "b=2": "2"}),
    ("wheels", "cuda 13.0"): (wheel("nvidia-nvcc", "13.0.88"),),
}
LOCK = lock_of(ENTRIES)


def test_a_lock_may_have_a_date_and_is_written_as_it_is(project: Project) -> None:
    dated = LOCK.model_copy(update={"date": date(2026, 11, 21)})
    assert Lock.model_validate_json(lock_text(dated)) == dated
    assert "date" not in json.loads(lock_text(LOCK))
    assert lock_text(project.lock) == (Path(__file__).parents[3] / "imagebuild.lock").read_text()


def test_sources_of_all_targets_become_one_for_each_entry(renderer: Renderer, full_plan: Plan) -> None:
    sources = merged_sources(owned.source for t in full_plan.targets for owned in renderer.recipe(t).sources)
    assert len({key_of(s) for s in sources}) == len(sources)
    cuda = next(s for s in sources if isinstance(s, PackageSource) and "repos/ubuntu2404/x86_64" in s.url)
    assert {"libnccl2=2.32.3-1+cuda12.9", "libnccl2=2.32.3-1+cuda13.4"} <= set(cuda.packages)


def test_one_repository_has_one_key() -> None:
    assert merged_sources([packages("b"), packages("a", "b")]) == (packages("a", "b"),)
    assert merged_sources([GitRef("https://example.org/g.git", "v1", "2" * 40)]) == ()  # its commit is given
    with pytest.raises(ConfigError, match="key k, another suite '/' and key other"):
        merged_sources([packages("a"), packages("a", key="other")])


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (Archive("x", "https://example.org/a.tar"), ""),
        (Archive("x", "https://example.org/b.tar"), "not in the lock"),
        (GitRef("https://example.org/g.git", "v1"), ""),
        (GitRef("https://example.org/g.git", "v3"), "not in the lock"),
        (GitRef("https://example.org/g.git", "v3", "3" * 40), ""),
        (BaseImage("debian:13"), ""),
        (BaseImage("debian:13", facts=True), UNREAD),
        (packages("a", "b=2"), ""),
        (packages("a", "b=3", "c"), "no version of b=3, c"),
        (WheelSet("cuda", "13.0", ("nvidia_nvcc==13.0.*",)), ""),
        (WheelSet("cuda", "13.0", ("nvidia-nvcc==13.1.*",)), "other wheels than nvidia-nvcc==13.1.*"),
        (WheelSet("cuda", "13.0", ("nvidia-nvcc==13.0.*", "x")), "other wheels than nvidia-nvcc==13.0.*, x"),
    ],
)
def test_what_the_lock_lacks(source: Source, answer: str) -> None:
    assert lacks(LOCK, source) == answer
    if answer:
        with pytest.raises(ConfigError, match="imagebuild.lock: 1 of 2 sources have no pin.*`imagebuild lock x`") as no:
            check_pinned(LOCK, [source, GitRef("https://example.org/g.git", "v1"), source], "imagebuild lock x")
        assert str(no.value).endswith(f": {answer}")
    else:
        check_pinned(LOCK, [source])


def test_a_wheel_that_nobody_can_ask_for() -> None:
    with pytest.raises(ConfigError, match="wheels: "):
        lacks(LOCK, WheelSet("cuda", "13.0", ("nvidia-nvcc=13",)))


def test_what_nothing_uses_is_removed() -> None:
    sources = (Archive("x", "https://example.org/a.tar"), packages("a"), GitRef("https://example.org/g.git", "v1"))
    left = without_unused(LOCK, sources)
    assert {key for key, _ in left.entries()} == {key_of(s) for s in sources}
    assert left.repositories[REPOSITORY] == LockedRepository(fingerprint=KEY, packages={"a": "1"})
    assert lock_of(ENTRIES) == LOCK, "the other one is as it was"


@pytest.mark.parametrize(
    ("name", "kinds", "names"),
    [
        ("ucx", {"git"}, 1),
        ("hpcx", {"archives"}, 10),  # the component, not the image that is called so
        ("debian13", {"images"}, 1),
        ("nccl", {"git", "repositories", "wheels"}, 8),
        ("https://github.com/openucx/ucx.git", {"git"}, 1),
        ("nvidia/cuda:13.4.2-devel-ubuntu24.04", {"images"}, 1),
        ("nvidia/cuda:13.4*", {"images"}, 6),
    ],
)
def test_names_of_components_pins_bases_and_addresses(
    renderer: Renderer, full_plan: Plan, name: str, kinds: set[str], names: int
) -> None:
    sources = (owned for target in full_plan.targets for owned in renderer.recipe(target).sources)
    found = keys_of(renderer.project, [name], sources)
    assert ({kind for kind, _ in found}, len(found)) == (kinds, names)


def test_the_lock_has_every_source_of_what_can_be_built_without_nvidias_servers(
    project: Project, full_plan: Plan, renderer: Renderer
) -> None:
    """And nothing else: no entry is of no use."""
    sources = merged_sources(owned.source for t in full_plan.targets for owned in renderer.recipe(t).sources)
    assert without_unused(project.lock, sources) == project.lock
    for target in full_plan.targets:
        if target.image != "hpcx":
            check_pinned(project.lock, (owned.source for owned in renderer.recipe(target).sources))
