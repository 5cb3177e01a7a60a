"""The file of the lock: its date, and what `lock --check --json` and `bump --json` say of it."""

import json
from dataclasses import replace
from datetime import date

import pytest

from imagebuild.core import Absent, ConfigError
from imagebuild.lock import (
    LockFile,
    Upstream,
    check_lock,
    complete_lock,
    facts_changes,
    redate_lock,
    shown_sources,
)
from imagebuild.project import Changes, LockedArchive, Table, TreeFacts, Wheel, WheelSet, make_plan, versions_with
from imagebuild.render import Renderer
from tests.conftest import LIBRARY, Files
from tests.unit.lock.lock_fakes import A, Fake

FIRST, LATER = date(2026, 11, 21), date(2027, 1, 2)


def job(tiny: Files, today: date) -> LockFile:
    project = tiny.load()
    renderer = Renderer(project, versions_with(project, Changes()))
    return LockFile(project, renderer, make_plan(project).targets, tiny.root / "imagebuild.lock", today)


def test_the_first_date_stays(tiny: Files) -> None:
    before = tiny.load().lock
    assert before.date is None
    job(tiny, FIRST).write()
    assert tiny.load().lock == before.model_copy(update={"date": FIRST})
    job(tiny, LATER).write()
    assert tiny.load().lock.date == FIRST
    redate_lock(job(tiny, LATER), LATER)
    assert tiny.load().lock == before.model_copy(update={"date": LATER})


def test_a_check_without_upstream_names_what_the_lock_lacks(tiny: Files) -> None:
    lock = job(tiny, FIRST)
    assert check_lock(lock, None, whole=True).exit_status == 0
    lock.entries.pop(next(key for key in lock.entries if key[0] == "images"))
    result = json.loads(check_lock(lock, None, whole=True).model_dump_json())
    assert (result["upstream"], result["sources"]) == (False, len(lock.sources))
    (finding,) = result["findings"]
    assert finding == {
        "state": "missing", "source": finding["source"], "detail": "not in the lock; `imagebuild lock` adds it",
    }  # fmt: skip
    assert finding["source"].startswith("image ")


def test_a_source_that_could_not_be_compared_has_a_status_of_its_own(tiny: Files) -> None:
    lock = job(tiny, FIRST)
    result = check_lock(lock, Fake(), whole=True)
    assert (result.exit_status, result.unchecked) == (4, len(lock.sources))
    gone = dict.fromkeys(lock.entries, Absent("gone"))
    assert check_lock(lock, Fake(answers=gone), whole=True).exit_status == 1


@pytest.mark.parametrize("archive", [{"hash": f"sha256={A}", "hashes": {"sha256": A}}, {"hash": f"sha256={A}"}])
def test_reports_of_pip_before_and_since_23_1(archive: dict[str, object]) -> None:
    item = {"metadata": {"name": "w", "version": "1"}, "download_info": {"archive_info": archive}}
    upstream = Upstream(run=lambda *_, **__: json.dumps({"install": [item]}))
    assert upstream.wheels(WheelSet("c", "1", ("w==1",))) == (
        Wheel(name="w", version="1", sha256={"amd64": A, "arm64": A}),
    )


def test_a_new_archive_says_what_changed() -> None:
    def archive(ucx: str, **environment: str) -> LockedArchive:
        return LockedArchive(sha256=A, facts=TreeFacts(environment=environment, versions={"ucx": ucx}))

    def address(version: str) -> tuple[str, str]:
        return ("archives", f"https://example.org/stack-{version}-x86_64.tbz")

    before: Table = {address("1"): archive("1.20", PATH="/a"), ("git", "g", "v1"): "1" * 40}
    assert facts_changes(before, {**before, address("2"): archive("1.22", PATH="/a", NEW="/b")}) == [
        "archive https://example.org/stack-2-x86_64.tbz",
        "  versions.ucx: 1.20 → 1.22",
        "  environment.NEW: absent → /b",
    ]
    assert facts_changes(before, before) == facts_changes({}, before) == []


def test_what_images_adapt_is_said_of_what_was_read_now(tiny: Files) -> None:
    url = "https://example.org/a.tar"
    unpacked = "unpacked: {prefix: /opt/x, script: ':', left-out: [OLD_*]}"
    tiny.component("library", f"{LIBRARY}archive: {url}\n{unpacked}\n", build="FROM x AS library\n")
    archive = LockedArchive(sha256=A, facts=TreeFacts(environment={"OLD_PATH": "/bin", "PATH": "/opt/x/bin"}))
    lock = job(tiny, FIRST)
    _, outcome = complete_lock(lock, Fake(answers={("archives", url): archive}), whole=True)
    assert outcome.adaptations == ["library: OLD_PATH: no image has these"]
    assert complete_lock(lock, Fake(), whole=True)[1].adaptations == []
    assert "  library: OLD_PATH: no image has these" in list(shown_sources(job(tiny, FIRST), ["library"]))


def test_what_is_known_of_a_source_is_shown(tiny: Files) -> None:
    lines = list(shown_sources(job(tiny, FIRST), ["tool"]))
    assert lines == ["git https://example.org/tool.git 3.4", f"  pin: {'b' * 40}"]
    with pytest.raises(ConfigError, match="gone: no component, pin, base, image or address of a source"):
        list(shown_sources(job(tiny, FIRST), ["gone"]))


def test_a_platform_limits_what_is_locked(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "platforms: [linux/amd64]", "platforms: [linux/amd64, linux/arm64]")
    tiny.component("library", LIBRARY + 'archive: "https://example.org/{arch}.tar"\n')
    lock = replace(job(tiny, FIRST), platforms=("linux/arm64",))
    upstream = Fake(answers={("archives", "https://example.org/arm64.tar"): A})
    _, outcome = complete_lock(lock, upstream, whole=False)
    assert outcome.adaptations == []
    assert upstream.asked == [("archives", "https://example.org/arm64.tar")]
    assert outcome.resolved == ["archive https://example.org/arm64.tar"]
    silent = Fake()
    both = job(tiny, FIRST)
    complete_lock(both, silent, whole=False)
    assert ("archives", "https://example.org/amd64.tar") not in both.entries, "nothing is written of what failed"
