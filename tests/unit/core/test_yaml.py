"""YAML that is small in the file and large in memory."""

from pathlib import Path

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model
from imagebuild.core.yaml import read_yaml


class Nested(Model):
    a: dict[str, dict[str, list[str]]]


LAUGHS = "\n".join(f"  x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"a:\n  x0: &x0 [{'b, ' * 9}]\n{LAUGHS}\n", "more than 50000 values"),
        (f"a:\n  b: &b [{'c, ' * 2000}]\n  d: [{'*b, ' * 2000}]\n", "more than 50000 values"),
        (f"a: [{'b, ' * 60_000}]\n", "more than 50000 values"),
        ("a: " + "[" * 2000, "(more than 100 levels|maximum nesting depth)"),
        ("a: " + "{a: " * 2000, "(more than 100 levels|maximum nesting depth)"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", "a: must be a"),
        ('{"a": ' + "1" * 5000 + "}", "not JSON: Exceeds the limit"),
        ('{"a": "\\ud800"}', "a: must be a"),
        ('{"a": {}, "a": {}}', "the key 'a' appears twice"),
        ("a: &a [*a]\n", "not defined before"),
        ("a: !!python/object/apply:os.system [x]\n", "a: must be a"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bomb_is_refused_at_its_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, problem: str
) -> None:
    monkeypatch.setattr("imagebuild.core.yaml.MOST_VALUES", 50_000)
    path = tmp_path / f"file.{'json' if text.startswith('{') else 'yaml'}"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"file.\\w+:[0-9]+: .*{problem}"):
        read_yaml(path, Nested)
