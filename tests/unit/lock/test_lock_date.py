"""The date of a lock: written with the first entry, and left alone afterwards."""

from datetime import date

from imagebuild.lock import LockRun, redate_lock
from imagebuild.project import Changes, make_plan, versions_with
from imagebuild.render import Renderer
from tests.conftest import Files

FIRST, LATER = date(2026, 11, 21), date(2027, 1, 2)


def job(tiny: Files, today: date) -> LockRun:
    project = tiny.load()
    renderer = Renderer(project, versions_with(project, Changes()))
    return LockRun(project, renderer, make_plan(project).targets, tiny.root / "imagebuild.lock", today)


def test_the_first_date_stays(tiny: Files) -> None:
    before = tiny.load().lock
    assert before.date is None
    job(tiny, FIRST).write()
    assert tiny.load().lock == before.model_copy(update={"date": FIRST})
    job(tiny, LATER).write()
    assert tiny.load().lock.date == FIRST
    redate_lock(job(tiny, LATER), LATER)
    assert tiny.load().lock == before.model_copy(update={"date": LATER})
