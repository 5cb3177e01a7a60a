"""Requests that cannot be fulfilled. Builds are tested with an engine, in tests/docker."""

from datetime import date

import pytest

from imagebuild.build.bake import BuildRequest
from imagebuild.build.build import check_request
from imagebuild.core.errors import ConfigError
from imagebuild.project.project import Project


def test_a_rebuild_is_of_a_day_from_the_lock_s_date_to_today(project: Project) -> None:
    for day in (date(2020, 1, 1), date(2999, 1, 1)):
        with pytest.raises(ConfigError, match=f"--rebuild {day}: choose a day from the lock's date"):
            check_request(BuildRequest((), rebuilt=day), {}, project.lock.date)
    with pytest.raises(ConfigError, match="--rebuild 2999-01-01: choose a day until today"):
        check_request(BuildRequest((), rebuilt=date(2999, 1, 1)), {}, None)
    assert project.lock.date
    check_request(BuildRequest((), rebuilt=project.lock.date), {}, project.lock.date)
