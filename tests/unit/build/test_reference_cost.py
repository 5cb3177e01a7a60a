"""Sharing pays: the reference's matrix stays within its budget of steps."""

from __future__ import annotations

import pytest

from tests import reference_cost
from tests.reference_cost import CHANGES, COLD, Change


def test_the_matrix_is_the_reference_s() -> None:
    targets = reference_cost.state().targets
    assert len(targets) == 10
    assert {len(t.platforms) for t in targets} == {2}


@pytest.mark.parametrize("change", [COLD, *CHANGES], ids=lambda c: c.what)
def test_a_change(change: Change) -> None:
    assert 0 < reference_cost.executed(change) <= change.limit
