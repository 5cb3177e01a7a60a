import pytest

from imagebuild.core.fields import matches, natural_order, satisfies
from tests.conftest import data

CASES = data("cases/core/fields")


@pytest.mark.parametrize(("value", "wanted", "answer"), [*CASES["satisfies"], ("1" * 5000, ">=1", False)])
def test_satisfies(value: str, wanted: str, answer: bool) -> None:
    assert satisfies(value, wanted) is answer


def test_a_broken_specifier_is_an_error_even_for_a_value_that_is_no_version() -> None:
    with pytest.raises(ValueError, match="not a version specifier"):
        satisfies("debian13", ">=thirteen")


def test_numbers_in_texts_are_sorted_by_their_value() -> None:
    texts = ["a", "a0", "a007", "a12.9", "a12.10", f"a1{'0' * 5000}"]
    assert sorted({*texts}, key=natural_order) == texts


def test_every_axis_named_must_match_and_any_alternative_will_do() -> None:
    condition = {"cuda": ("<13", ">=13.4"), "variant": ("devel",)}
    assert matches(condition, {"cuda": "13.5", "variant": "devel"})
    assert not matches(condition, {"cuda": "13.0", "variant": "devel"})
    assert not matches(condition, {"cuda": "13.5", "variant": "runtime"})
    assert not matches(condition, {"variant": "devel"})
