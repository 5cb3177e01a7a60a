"""The lock as a table: what sources need of it."""

import json
from datetime import date
from pathlib import Path

import pytest

from imagebuild.core import ConfigError
from imagebuild.lock import (
    keys_of,
    lock_from_table,
    lock_table,
    lock_text,
    merged_sources,
    owners,
    stale_entries,
    without_stale,
)
from imagebuild.project import (
    UNREAD,
    UNRESOLVED,
    Archive,
    BaseImage,
    GitRef,
    Lock,
    LockedImage,
    LockedRepository,
    PackageSource,
    Plan,
    Project,
    Source,
    Table,
    Wheel,
    WheelSet,
    key_of,
    make_plan,
    what_entry_lacks,
)
from imagebuild.render import Renderer
from tests.unit.lock.lock_fakes import KEY, A, B

REPOSITORY = "https://example.org/repository/"


def packages(*names: str, url: str = REPOSITORY, key: str = "k") -> PackageSource:
    return PackageSource(url, "/", key, names)


def wheel(name: str, version: str) -> Wheel:
    return Wheel(name=name, version=version, sha256={"amd64": A, "arm64": B})


ENTRIES: Table = {
    ("archives", "https://example.org/a.tar"): A,
    ("git", "https://example.org/g.git", "v1"): "1" * 40,
    ("git", "https://example.org/g.git", "v2"): "unresolved",
    ("images", "debian:13"): LockedImage(digest=f"sha256:{A}", platforms={"linux/amd64": f"sha256:{B}"}),
    ("repositories", REPOSITORY): LockedRepository(fingerprint=KEY, packages={"a": "1", "b=2": "2"}),
    ("wheels", "cuda", "13.0"): (wheel("nvidia-nvcc", "13.0.88"),),
}


def test_a_lock_survives_being_a_table_and_may_have_a_date() -> None:
    lock = lock_from_table(ENTRIES, date(2026, 11, 21))
    assert lock_table(lock) == ENTRIES
    assert Lock.model_validate_json(lock_text(lock)) == lock
    assert "date" not in json.loads(lock_text(lock_from_table(ENTRIES)))


def test_the_projects_lock_is_written_as_it_is(project: Project) -> None:
    text = lock_text(lock_from_table(lock_table(project.lock), project.lock.date))
    assert text == (Path(__file__).parents[3] / "imagebuild.lock").read_text()


def test_sources_of_all_targets_become_one_for_each_entry(renderer: Renderer, full_plan: Plan) -> None:
    sources = merged_sources(s for t in full_plan.targets for s in renderer.recipe(t).sources())
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
        (GitRef("https://example.org/g.git", "v2"), "unresolved"),
        (BaseImage("debian:13"), ""),
        (BaseImage("debian:13", facts=True), UNREAD),
        (packages("a", "b=2"), ""),
        (packages("a", "b=3", "c"), "the lock has no version of b=3, c"),
        (WheelSet("cuda", "13.0", ("nvidia_nvcc==13.0.*",)), ""),
        (WheelSet("cuda", "13.0", ("nvidia-nvcc==13.1.*",)), "the lock has other wheels than nvidia-nvcc==13.1.*"),
        (
            WheelSet("cuda", "13.0", ("nvidia-nvcc==13.0.*", "more")),
            "the lock has other wheels than nvidia-nvcc==13.0.*, more",
        ),
    ],
)
def test_what_an_entry_lacks(source: Source, answer: str) -> None:
    assert what_entry_lacks(source, ENTRIES.get(key_of(source))) == answer
    with pytest.raises(ConfigError, match="wheels: "):
        what_entry_lacks(WheelSet("cuda", "13.0", ("nvidia-nvcc=13",)), (wheel("nvidia-nvcc", "13.0.88"),))


def test_what_nothing_uses_is_removed() -> None:
    sources = (Archive("x", "https://example.org/a.tar"), packages("a"), GitRef("https://example.org/g.git", "v1"))
    unused = set(stale_entries(ENTRIES, sources))
    assert (("repositories", REPOSITORY), "b=2") in unused
    assert (("git", "https://example.org/g.git", "v2"), None) in unused
    left = without_stale(ENTRIES, sources)
    assert {*left} == {key_of(s) for s in sources}
    assert left["repositories", REPOSITORY] == LockedRepository(fingerprint=KEY, packages={"a": "1"})
    assert set(stale_entries(left, sources)) == set()


def test_what_was_stale_before_stays() -> None:
    before = (Archive("x", "https://example.org/a.tar"), packages("a", "b=2"))
    left = without_stale(ENTRIES, (packages("b=2"),), before)
    assert ("archives", "https://example.org/a.tar") not in left
    assert left["repositories", REPOSITORY] == LockedRepository(fingerprint=KEY, packages={"b=2": "2"})
    assert ("images", "debian:13") in left


@pytest.fixture
def known(renderer: Renderer, full_plan: Plan) -> dict[str, set[tuple[str, ...]]]:
    return owners(renderer.recipe(target) for target in full_plan.targets)


def test_names_of_components_pins_bases_and_addresses(known: dict[str, set[tuple[str, ...]]]) -> None:
    def kinds(name: str) -> set[str]:
        return {key[0] for key in keys_of([name], known)}

    assert kinds("ucx") == {"git"}
    assert kinds("hpcx") == {"archives"}  # the component, not the image that is called so
    assert {k[1] for k in keys_of(["debian13"], known)} == {"debian:13.7-slim"}
    assert {"git", "archives"} & kinds("openmpi") == {"git"}
    assert kinds("nccl") == {"git", "repositories", "wheels"}
    of_nccl = {
        key[2].partition("=")[0] for key in keys_of(["nccl"], known) if key[0] == "repositories" and len(key) > 2
    }
    assert of_nccl == {"libnccl2", "libnccl-dev"}
    assert (
        len(keys_of(["nvidia/cuda:13.4*"], known)) > len(keys_of(["nvidia/cuda:13.4.2-devel-ubuntu24.04"], known)) == 1
    )


@pytest.mark.parametrize(
    ("name", "near"), [("ucxx", "ucx"), ("nvidia/cuda:13.4.2-devel-ubuntu24.4", "nvidia/cuda:13.4.2-devel-ubuntu24.04")]
)
def test_an_unknown_name(known: dict[str, set[tuple[str, ...]]], name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: no component.*; did you mean '{near}'"):
        keys_of([name], known)


def test_the_lock_has_every_source_of_every_target(project: Project, full_plan: Plan, renderer: Renderer) -> None:
    assert full_plan == make_plan(project)
    entries = lock_table(project.lock)
    sources = merged_sources(s for t in full_plan.targets for s in renderer.recipe(t).sources())
    lacking = {s: what_entry_lacks(s, entries.get(key_of(s))) for s in sources}
    assert set(lacking.values()) == {"", UNRESOLVED, UNREAD}
    # Digests that public text states come without what the images say of themselves.
    assert all(
        "nvidia/cuda" in s.reference for s, what in lacking.items() if what == UNREAD and isinstance(s, BaseImage)
    )
    assert list(stale_entries(entries, sources)) == []
