"""YAML that is small in the file and large in memory."""

from pathlib import Path

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model
from imagebuild.core.yaml import read_yaml
from tests.conftest import data


class Nested(Model):
    a: dict[str, dict[str, list[str]]]


WORDS = {
    "LAUGHS": "\n".join(f"  x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 12)),
    "ALIASES": "*b, " * 2000, "ENDS": "]" * 900,
}  # fmt: skip


@pytest.mark.parametrize(("text", "part", "times", "problem"), data("cases/core/yaml"))
def test_a_bomb_is_refused_at_its_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, part: str, times: int, problem: str
) -> None:
    monkeypatch.setattr("imagebuild.core.yaml.MOST_VALUES", 50_000)
    for name, content in {"…": part * times, **WORDS}.items():
        text = text.replace(name, content)
    path = tmp_path / f"file.{'json' if text.startswith('{') else 'yaml'}"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"file.\\w+:[0-9]+: .*{problem}"):
        read_yaml(path, Nested)
