"""`imagebuild lock` with upstream from a table."""

import threading

import pytest

from imagebuild.core import Absent, CommandError, Unreachable
from imagebuild.lock import PackageIndex, check_entries, compare_entries, incomplete, resolve_sources
from imagebuild.project import (
    UNREAD,
    UNRESOLVED,
    Archive,
    BaseImage,
    GitRef,
    LockedImage,
    LockedRepository,
    Source,
    Table,
    WheelSet,
)
from tests.unit.lock.lock_fakes import KEY, OTHER, A, B, C, Fake
from tests.unit.lock.test_lock_entries import REPOSITORY, packages, wheel

ONE, TWO = Archive("x", "https://one"), Archive("x", "https://two")
INDEX = PackageIndex((KEY,), {"a": ["1", "2"], "b": ["1", "2", "3"]})
CANDIDATES = {"a": ("1", "2"), "b": ("1", "2", "3")}


def lock(entries: Table, sources: list[Source], upstream: Fake) -> tuple[str, int]:
    """What is wrong in the end, and how often the lock was written."""
    written: list[Table] = []
    outcome = resolve_sources(
        entries, incomplete(entries, sources), upstream, keep=lambda: written.append(dict(entries))
    )
    assert not written or written[-1] == entries
    return outcome.complaint(), len(written)


def test_what_is_there_is_not_asked_and_what_lacks_is_written_at_once() -> None:
    entries: Table = {("archives", "https://one"): A}
    upstream = Fake(answers={("archives", "https://two"): B, ("git", "g", "v1"): "1" * 40})
    assert lock(entries, [ONE, TWO, GitRef("g", "v1")], upstream) == ("", 2)
    assert sorted(upstream.asked) == [("archives", "https://two"), ("git", "g", "v1")]
    assert entries["archives", "https://two"] == B


def test_nobody_answers() -> None:
    entries: Table = {}
    upstream = Fake(answers={("archives", "https://two"): Absent("https://two: the server does not have it (404)")})
    complaint, written = lock(entries, [ONE, TWO], upstream)
    assert "archive https://one: archives https://one: down" in complaint
    assert "archive https://two: the server does not have it (404)" in complaint
    assert entries == {("archives", "https://one"): UNRESOLVED, ("archives", "https://two"): UNRESOLVED}
    assert written == 2
    assert lock(entries, [ONE, TWO], upstream)[1] == 0  # it stays, and nothing is written


def test_a_wrong_answer_changes_nothing() -> None:
    entries: Table = {}
    complaint, written = lock(
        entries, [ONE], Fake(answers={("archives", "https://one"): CommandError("https://one: is bad")})
    )
    assert complaint.startswith("wrong answers")
    assert (entries, written) == ({}, 0)


def test_versions_of_packages_stay_and_new_packages_are_added() -> None:
    entries: Table = {("repositories", REPOSITORY): LockedRepository(fingerprint=KEY, packages={"a": "1"})}
    assert lock(entries, [packages("a", "b", "b=1")], Fake(indexes={REPOSITORY: INDEX}))[0] == ""
    assert entries["repositories", REPOSITORY] == LockedRepository(
        fingerprint=KEY, packages={"a": "1", "b": "3", "b=1": "1"}, candidates=CANDIDATES
    )


def test_update_takes_the_new_key_and_the_named_packages_only() -> None:
    key = ("repositories", REPOSITORY)
    entries: Table = {key: LockedRepository(fingerprint=OTHER, packages={"a": "1", "b": "1"})}
    outcome = resolve_sources(
        entries, [packages("a", "b")], Fake(indexes={REPOSITORY: INDEX}), keep=lambda: None,
        anew=frozenset({key, (*key, "b")}),
    )  # fmt: skip
    assert outcome.complaint() == ""
    assert entries[key] == LockedRepository(fingerprint=KEY, packages={"a": "1", "b": "3"}, candidates=CANDIDATES)


def test_an_update_that_nobody_answers_keeps_the_pin() -> None:
    entries: Table = {("archives", "https://one"): A}
    outcome = resolve_sources(entries, [ONE], Fake(), keep=lambda: None, anew=frozenset({("archives", "https://one")}))
    assert "archive https://one" in outcome.unresolved
    assert entries == {("archives", "https://one"): A}


def test_an_interrupted_run_ends_soon_and_what_it_wrote_counts() -> None:
    entries: Table = {}
    upstream = Fake(answers={("archives", "https://two"): B})
    waiting, told = threading.Event(), threading.Event()
    answer = upstream.resolve

    def slow(source: Source, known: object, advance: object) -> object:
        if source == ONE:
            waiting.set()
            if upstream.web.stopped.wait(60):
                told.set()
            raise Unreachable("interrupted")
        waiting.wait(60)
        return answer(source, None, lambda *_: None)

    upstream.resolve = slow  # type: ignore[method-assign, assignment]

    def keep() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_sources(entries, [ONE, TWO], upstream, keep=keep)
    assert told.wait(60), "what runs was not told to stop"
    assert entries == {("archives", "https://two"): B}


IMAGE, GIT = BaseImage("debian:13"), GitRef("g", "v1")
WHEELS = WheelSet("cuda", "13.0", ("w==13.0.*",))
LOCKED: Table = {
    ("archives", "https://one"): A,
    ("git", "g", "v1"): "1" * 40,
    ("images", "debian:13"): LockedImage(digest=f"sha256:{A}"),
    ("repositories", REPOSITORY): LockedRepository(fingerprint=KEY, packages={"a": "1", "b=2": "2"}),
    ("wheels", "cuda", "13.0"): (wheel("w", "13.0.88"),),
}
ALL: list[Source] = [ONE, GIT, IMAGE, packages("a", "b=2"), WHEELS]
SAME = {key: entry for key, entry in LOCKED.items() if key[0] != "repositories"}


def check(**changed: object) -> list[tuple[str, str]]:
    """States and details of the findings, of which only a moved tag is a note, if upstream is as locked but for what is named by its kind."""
    answers = {key: changed.get(key[0], entry) for key, entry in SAME.items()}
    index = changed.get("repositories", INDEX)
    upstream = Fake(answers=answers, indexes={REPOSITORY: index} if isinstance(index, PackageIndex) else {})  # type: ignore[arg-type]
    upstream.digests = frozenset(changed.get("digests", ()))  # type: ignore[call-overload]
    findings = compare_entries(LOCKED, ALL, upstream)
    assert all(f.fails == (f.state not in ("moved", "not checked")) for f in findings)
    return [(f.state, f.detail) for f in findings]


@pytest.mark.parametrize(
    ("changed", "state", "detail"),
    [
        ({"archives": B}, "changed", "upstream has bbbbbbbbbbbb now, locked is aaaaaaaaaaaa"),
        ({"archives": Absent("https://one: (404)")}, "gone", "(404)"),
        ({"archives": Unreachable("https://one: down")}, "not checked", "down"),
        ({"git": "2" * 40}, "changed", "upstream has 222222222222 now"),
        ({"images": LockedImage(digest=f"sha256:{B}")}, "gone", "and the pinned sha256:aaaaaaaaaaaa is gone"),
        (
            {"images": LockedImage(digest=f"sha256:{B}"), "digests": {f"sha256:{A}"}},
            "moved",
            "the tag names sha256:bbbbbbbbbbbb now; the pinned sha256:aaaaaaaaaaaa is still there",
        ),
        ({"images": Absent("x"), "digests": {f"sha256:{A}"}}, "moved", "the tag is gone; the pinned"),
        ({"repositories": PackageIndex((OTHER,), INDEX.versions)}, "changed", f"is signed by the key {OTHER}"),
        ({"repositories": PackageIndex((KEY,), {"a": ["2"], "b": ["2"]})}, "changed", "has no a in version 1"),
        ({"repositories": PackageIndex((KEY,), {"a": ["1"], "b": []})}, "changed", "has no package b"),
        ({"repositories": None}, "not checked", "down"),
        (
            {"wheels": (wheel("w", "13.0.88").model_copy(update={"sha256": {"amd64": C}}),)},
            "changed",
            "other files of w",
        ),
        ({"wheels": CommandError("pip finds no w")}, "changed", "pip finds no w"),
    ],
)
def test_every_change_is_found(changed: dict[str, object], state: str, detail: str) -> None:
    assert check() == []
    ((got, text),) = check(**changed)
    assert got == state
    assert detail in text


def test_without_upstream_only_what_the_lock_says() -> None:
    entries = {**LOCKED, ("git", "g", "v1"): UNRESOLVED, ("archives", "https://two"): B}
    wanted = [*ALL[1:], BaseImage("debian:13", facts=True), BaseImage("debian:14"), packages("a", "c")]
    findings = list(check_entries(entries, wanted, None))
    assert [(f.state, f.source) for f in findings if f.detail == UNREAD] == [("unresolved", "image debian:13")]
    assert {f.state for f in findings} == {"unresolved", "missing"}
    assert all(f.fails for f in findings)
    findings = list(check_entries(entries, ALL[:4], entries))
    assert [(f.state, f.source) for f in findings] == [
        ("unresolved", "git g v1"),
        ("stale", "wheels cuda 13.0"),
        ("stale", "archive https://two"),
    ]
