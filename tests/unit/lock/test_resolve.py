"""The lock: entries for sources, pinning, updating and checking with a fake upstream."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from imagebuild.core import errors
from imagebuild.core.debian import Offers
from imagebuild.core.errors import Absent, CommandError, ConfigError, Unreachable
from imagebuild.lock.resolve import (
    LockFile,
    check_lock,
    complaint,
    keys_of,
    lock_text,
    merged_sources,
    without_unused,
)
from imagebuild.project.lockfile import (
    Archive,
    BaseImage,
    Entry,
    GitRef,
    Key,
    Lock,
    LockedArchive,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    TreeFacts,
    Wheel,
    WheelSet,
    check_pinned,
    key_of,
)
from imagebuild.project.plan import Plan, make_plan
from imagebuild.project.project import Changes, Project
from imagebuild.project.select import select_one
from imagebuild.render.renderer import Renderer
from tests.conftest import LIBRARY, Files, data
from tests.unit.lock.lock_fakes import ENTRIES, KEY, OTHER, REPOSITORY, A, B, Fake, lock_of, packages, wheel

CASES = data("cases/lock/resolve")

FIRST, LATER = date(2026, 11, 21), date(2027, 1, 2)
GIT = ("git", "https://example.org/tool.git 3.4")


def job(tiny: Files, today: date = FIRST) -> LockFile:
    project = tiny.load()
    renderer = Renderer(project)
    return LockFile(project, renderer, make_plan(project).targets, today)


@pytest.fixture
def archives(tiny: Files) -> Files:
    """A project with two archives and a package repository that are not in the lock."""
    repository = f"repository: {{name: r, url: '{REPOSITORY}', key: k}}\n"
    tiny.component(
        "library", f"{LIBRARY}archive: https://one\n{repository}packages: {{runtime: [aa], devel: ['bb=2']}}\n"
    )
    tiny.component("tool", f"{LIBRARY}archive: https://two\n", build="FROM scratch AS tool\n")
    return tiny


INDEX = Offers({"aa": ["1", "3"], "bb": ["1", "2"]}, signed_by=(KEY,))
ONE, TWO, PACKAGES = ("archives", "https://one"), ("archives", "https://two"), ("repositories", REPOSITORY)
IMAGE = ("images", "debian:13-slim")


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


def test_what_nothing_uses_is_removed() -> None:
    sources = (Archive("x", "https://example.org/a.tar"), packages("a"), GitRef("https://example.org/g.git", "v1"))
    left = without_unused(LOCK, sources)
    assert {key for key, _ in left.entries()} == {key_of(s) for s in sources}
    assert left.repositories[REPOSITORY] == LockedRepository(fingerprint=KEY, packages={"a": "1"})
    assert lock_of(ENTRIES) == LOCK, "the other one is as it was"


@pytest.mark.parametrize(("name", "kinds", "names"), CASES["names-of-components-pins-bases-and-addresses"])
def test_names_of_components_pins_bases_and_addresses(
    renderer: Renderer, full_plan: Plan, name: str, kinds: list[str], names: int
) -> None:
    sources = (owned for target in full_plan.targets for owned in renderer.recipe(target).sources)
    found = keys_of(renderer.project, [name], sources)
    assert (sorted({kind for kind, _ in found}), len(found)) == (kinds, names)


def test_the_lock_has_every_source_of_what_can_be_built_without_nvidias_servers(
    project: Project, full_plan: Plan, renderer: Renderer
) -> None:
    """The lock also has no unused entries."""
    sources = merged_sources(owned.source for t in full_plan.targets for owned in renderer.recipe(t).sources)
    assert without_unused(project.lock, sources) == project.lock
    for target in full_plan.targets:
        if target.image != "hpcx":
            check_pinned(project.lock, (owned.source for owned in renderer.recipe(target).sources))


def test_the_first_date_stays(tiny: Files) -> None:
    before = tiny.load().lock
    assert before.date is None
    job(tiny).write()
    assert tiny.load().lock == before.model_copy(update={"date": FIRST})
    job(tiny, LATER).write()
    assert tiny.load().lock.date == FIRST


def test_what_is_there_is_not_asked_and_what_lacks_is_written_at_once(archives: Files) -> None:
    written: list[int] = []

    class Counted(LockFile):
        def write(self, lock: Any = None) -> None:
            super().write(lock)
            written.append(len(dict(self.lock.entries())))

    upstream = Fake(answers={TWO: B}, indexes={REPOSITORY: INDEX})
    answers = Counted(**vars(job(archives))).complete(upstream, whole=True)
    assert sorted(upstream.asked) == [ONE, TWO, PACKAGES]
    assert written == [3, 4], "after each answer; and git's entry stays, as not all could be had"
    locked = archives.load().lock
    assert (locked.entry(TWO), locked.entry(ONE), locked.entry(GIT)) == (B, None, "b" * 40)
    assert locked.repositories[REPOSITORY] == LockedRepository(
        fingerprint=KEY, packages={"aa": "3", "bb=2": "2"}, candidates={"aa": ("1", "3"), "bb": ("1", "2")}
    )
    assert complaint(answers).splitlines()[1:] == [
        "  no answer: archive https://one: down", "servers that did not answer: one",
    ]  # fmt: skip
    assert not complaint(job(archives).complete(Fake(answers={ONE: A}), whole=True))
    assert archives.load().lock.entry(GIT) is None, "nothing uses it any more"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Absent("https://one: the server does not have the file (404)"), "gone"),
        (CommandError("https://one: is bad"), "wrong"),
        (Unreachable("https://one: down"), "no answer"),
    ],
)
def test_what_cannot_be_had_changes_nothing(archives: Files, answer: Any, kind: str) -> None:
    before = (archives.root / "imagebuild.lock").read_text()
    upstream = Fake(answers=dict.fromkeys((ONE, TWO), answer))
    assert f"\n  {kind}: archive https://one: " in complaint(job(archives).complete(upstream, whole=True))
    assert (archives.root / "imagebuild.lock").read_text() == before
    archives.lock({"archives": {"https://one": A}})
    assert complaint(job(archives).update(upstream, ["library"]))
    assert archives.load().lock.entry(ONE) == A


def test_versions_of_packages_stay_until_they_are_renewed(archives: Files) -> None:
    """A new key is accepted only by an update."""
    known = {"fingerprint": OTHER, "packages": {"aa": "1", "other": "7"}}
    archives.lock({"repositories": {REPOSITORY: known}})
    upstream = Fake(indexes={REPOSITORY: INDEX})
    refused = complaint(job(archives).complete(upstream, whole=False))
    assert f"signed by the key {KEY}, but imagebuild.lock trusts {OTHER}" in refused
    assert not complaint(job(archives).update(upstream, [REPOSITORY]))
    renewed = archives.load().lock.repositories[REPOSITORY]
    assert (renewed.fingerprint, renewed.packages) == (KEY, {"aa": "3", "bb=2": "2", "other": "7"})
    without = Fake(indexes={REPOSITORY: Offers({"bb": ["2"]}, signed_by=(KEY,))})
    assert "has no package aa; all other packages are pinned" in complaint(job(archives).update(without, [REPOSITORY]))
    assert archives.load().lock.repositories[REPOSITORY].packages == {"bb=2": "2", "other": "7"}, "aa is there no more"
    archives.lock({"repositories": {REPOSITORY: {**known, "fingerprint": KEY}}})
    job(archives).complete(upstream, whole=False)
    assert archives.load().lock.repositories[REPOSITORY].packages == {"aa": "1", "bb=2": "2", "other": "7"}


def test_what_is_known_of_a_source_is_shown(tiny: Files) -> None:
    url = "https://example.org/a.tar"
    unpacked = "unpacked: {prefix: /opt/x, script: ':', left-out: [OLD_*]}"
    tiny.component("library", f"{LIBRARY}archive: {url}\n{unpacked}\n", build="FROM scratch AS library\n")
    archive = LockedArchive(sha256=A, facts=TreeFacts(environment={"OLD_PATH": "/bin", "PATH": "/opt/x/bin"}))
    assert job(tiny).complete(Fake(answers={("archives", url): archive}), whole=True) == []
    assert "    environment:\n      OLD_PATH: /bin\n" in job(tiny).shown(["library"])
    assert job(tiny).shown(["tool"]) == f"git https://example.org/tool.git 3.4: {'b' * 40}\n"


def test_a_platform_limits_what_is_locked(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "platforms: [linux/amd64]", "platforms: [linux/amd64, linux/arm64]")
    tiny.component("library", LIBRARY + 'archive: "https://example.org/{arch}.tar"\n')
    upstream = Fake(answers={("archives", "https://example.org/arm64.tar"): A})
    assert replace(job(tiny), platforms=("linux/arm64",)).complete(upstream, whole=False) == []
    assert upstream.asked == [("archives", "https://example.org/arm64.tar")]


# What `lock --check` prints

ARCHIVE, REPO = Archive("x", "https://content.example/x.tbz"), packages("aa", "bb=2", url=REPOSITORY)
CUDA, TAG = BaseImage("nvidia/cuda:1"), GitRef("https://example.org/g.git", "v1")
WHEELS = WheelSet("cuda", "13.0", ("w==13.0.*",))
NOW = LockedImage(digest=f"sha256:{A}", platforms={"linux/amd64": f"sha256:{B}"})
LOCKED: dict[Key, Entry] = {
    key_of(ARCHIVE): LockedArchive(sha256=A, size=10),
    key_of(REPO): LockedRepository(fingerprint=KEY, packages={"aa": "1", "bb=2": "2"}),
    key_of(CUDA): NOW,
    key_of(TAG): "1" * 40,
    key_of(WHEELS): (wheel("w", "13.0.88"),),
}
SAME = {key: entry for key, entry in LOCKED.items() if key[0] not in ("archives", "repositories")}
SOURCES: dict[str, Source] = {"archive": ARCHIVE, "packages": REPO, "image": CUDA, "tag": TAG, "wheels": WHEELS}


def answer_of(said: Any) -> Any:
    """Return the answer of a server in the table: an error, wheels, or another value."""
    if isinstance(said, dict):
        ((name, text),) = said.items()
        return getattr(errors, name)(text)
    return tuple(Wheel(**row) for row in said) if isinstance(said, list) else said


@pytest.mark.parametrize("world", CASES["states"], ids=lambda world: f"{world['state']}-{world['found']}")
def test_a_source_is_compared_and_nothing_is_downloaded(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    source, state = SOURCES[world["source"]], world["state"]
    versions = world.get("index", INDEX.versions)
    upstream = Fake(
        answers={**SAME, key_of(source): answer_of(world["now"])} if "now" in world else SAME,
        indexes={REPO.url: Offers(versions, signed_by=(world.get("signer", KEY),))} if versions else {},
        digests=frozenset(world.get("digests", [NOW.digest])),
    )
    monkeypatch.setattr(upstream.web, "length", Mock(side_effect=[answer_of(world.get("length", 10))]))
    entry = world.get("locked", LOCKED[key_of(source)])
    lock = SimpleNamespace(
        lock=lock_of({key_of(source): entry} if entry is not None else {}), sources=(source,), platforms=(),
        project=SimpleNamespace(changes=Changes()),
        targets=(SimpleNamespace(id="hpcx-a", platforms=world.get("platforms", ("linux/amd64",))),),
        unavailable=lambda _: [], release_packages=(),
    )  # fmt: skip
    report = check_lock(cast(LockFile, lock), upstream)
    (answer,) = report.sources
    assert answer.state == state
    assert world["found"] in answer.found
    assert bool(answer.locked) == (entry is not None)
    assert bool(answer.consequence) == (state != "as locked")
    remedy = rf"`imagebuild lock \S+ --update {re.escape(key_of(source)[1].split()[0])}`"
    assert state != "wrong" or re.search(remedy, answer.consequence)
    assert report.exit_status == {"as locked": 0, "no answer": 4}.get(state, 1)


@pytest.mark.parametrize("variant", ["runtime", "devel"])
def test_one_target_of_hpcx_lacks_only_packages_of_nvidias_repositories(
    project: Project, renderer: Renderer, full_plan: Plan, variant: str
) -> None:
    target = select_one(full_plan, f"hpcx-cuda13.0.3-ubuntu24.04-{variant}")
    states = {row.source: row.state for row in check_lock(LockFile(project, renderer, (target,)), None).sources}
    servers = ("packages https://developer.download.nvidia.com/", "packages https://linux.mellanox.com/")
    assert all(source.startswith(servers) for source, state in states.items() if state == "not locked")
    unread = sorted(source.partition(" ")[0] for source, state in states.items() if state == "not read")
    assert unread == ["archive", "archive", "image"], "pinned, but not read yet"


def test_without_upstream_only_what_the_lock_says(archives: Files) -> None:
    archives.lock(
        {"images": {"debian:13-slim": {"digest": f"sha256:{A}"}}, "archives": {"https://one": A, "https://x": B}}
    )
    report = check_lock(job(archives), None, whole=True)
    assert (report.asked, report.exit_status) == (None, 1)
    assert [(source.source, source.state) for source in report.sources] == [
        ("archive https://two", "not locked"),
        (f"packages {REPOSITORY}", "not locked"),
        ("archive https://x", "not used"),
        ("archive https://one", "as locked"),
        ("image debian:13-slim", "as locked"),
    ]
    archives.lock(
        {"repositories": {REPOSITORY: {"fingerprint": KEY, "packages": {"aa": "1", "bb=2": "2", "other": "7"}}}}
    )
    sources = check_lock(job(archives), None, whole=True).sources
    assert [source.found for source in sources if source.state == "not used"] == ["other"]


@pytest.mark.parametrize(
    ("lacking", "state", "status"),
    [([], "as locked", 0), (["tool: has no xx"], "lacks packages", 1), (Unreachable("u: down"), "no answer", 4)],
)
def test_packages_of_the_distribution_are_checked(tiny: Files, lacking: Any, state: str, status: int) -> None:
    """The lock keeps nothing about them. An archive that does not answer is named."""
    tiny.component("tool", f"{LIBRARY}packages: {{runtime: [xx, yy=1]}}\n", build="FROM scratch AS tool\n")
    image = LockedImage(digest=f"sha256:{A}", platforms={"linux/amd64": f"sha256:{B}"})
    known = tiny.load().lock.images["debian:13-slim"].digest
    upstream = Fake(answers={GIT: "b" * 40, IMAGE: image}, lacking={"debian13": lacking}, digests=frozenset([known]))
    text = complaint(job(tiny).unavailable(upstream))
    assert bool(lacking) == bool(text)
    assert not isinstance(lacking, Unreachable) or "down; its packages were not checked" in text
    report = check_lock(job(tiny), upstream)
    assert [row.state for row in report.sources if row.source.endswith(" amd64")] == [state]
    assert report.exit_status == status
