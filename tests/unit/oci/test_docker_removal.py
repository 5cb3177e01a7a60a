"""Removing what was started, also while the engine is still busy with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from docker.errors import APIError, NotFound

from imagebuild.core import CommandError
from imagebuild.oci import remove_patiently


def answers(*errors: BaseException) -> tuple[Callable[[], None], list[BaseException]]:
    """A removal that fails with each of the errors once, and those that are still to come."""
    left = list(errors)

    def remove() -> None:
        if left:
            raise left.pop(0)

    return remove, left


def test_a_network_that_a_container_is_still_leaving() -> None:
    remove, left = answers(*[APIError("has active endpoints")] * 3)
    remove_patiently(remove)
    assert not left


def test_what_was_never_made() -> None:
    remove, left = answers(NotFound("no such network"), NotFound("no such network"))
    remove_patiently(remove)
    assert len(left) == 1


def test_an_engine_that_is_gone_is_not_asked_again() -> None:
    remove, left = answers(ConnectionError("refused"), ConnectionError("refused"))
    remove_patiently(remove)
    assert len(left) == 1


def test_what_stays_is_said() -> None:
    remove, _ = answers(APIError("403", explanation="network imagebuild-1 has active endpoints"))
    with pytest.raises(CommandError, match="does not remove what was started: network imagebuild-1 has active"):
        remove_patiently(remove, within_s=-1)
