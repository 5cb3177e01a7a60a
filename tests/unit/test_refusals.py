"""Messages about users' mistakes: each is one line with place, cause and remedy, without a traceback.

Each row of tests/data/refused/*.yaml is a mistake in the small project of tests/conftest.py, with the expected message.
A row without the following keys is a mistake in the command line.

* `edit`: maps files to pairs of old and new text
* `write`: maps files to their text
* `remove`: a list of files
* `repeat`: maps files to a text and the number of its repetitions
* `image`: a key of the image in matrix.yaml
* `component`: further keys of the component `tool`
* `build`: the file build.j2 of the component `tool`
* `run`: the command. Default: `plan`.
* `says`: a part of the message
* `status`: the exit status. Default: 2.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from imagebuild.core.errors import ConfigError
from imagebuild.project.plan import make_plan
from tests.conftest import MATRIX, ROOT, TOOL, Files
from tests.unit.conftest import Call

COMPONENT = "dockerfiles/components/tool/component.yaml"
ROWS = [
    pytest.param(row, id=f"{file.stem}-{i}: {row['says'][:60]}")
    for file in sorted((ROOT / "tests/data/refused").glob("*.yaml"))
    for i, row in enumerate(yaml.safe_load(file.read_text()))
]


PLACE = re.compile(
    r"error: (\S+: |--|No such |Option |Missing option |Missing argument |Invalid value for |no target fits )"
)
"""The beginning of messages: a file with its line, an option or an argument."""
REMEDY = re.compile("; |, not | must | write |cannot be (read|written)|requires an argument")


@pytest.mark.parametrize("row", ROWS)
def test_a_command_says_it_in_one_line(
    tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    monkeypatch.chdir(tiny.root)
    for name, changes in row.get("edit", {}).items():
        for old, new in changes.items():
            tiny.replace(name, old, new)
    for name, text in row.get("write", {}).items():
        tiny.write(name, text)
    for name, (text, number) in row.get("repeat", {}).items():
        tiny.write(name, text * number)
    for name in row.get("remove", ()):
        (tiny.root / name).unlink()
    if "image" in row:
        tiny.replace("matrix.yaml", "    tags:", f"    {row['image']}\n    tags:")
    if "component" in row or "build" in row:
        tiny.component("tool", f"{TOOL}{row.get('component', '')}\n", row.get("build"))
    status, printed, shown = command(*shlex.split(row.get("run", "plan")))
    assert (status, printed) == (row.get("status", 2), ""), shown
    assert row["says"] in shown
    assert PLACE.match(shown)
    assert REMEDY.search(shown), shown
    assert len(shown.splitlines()) == 1


def test_there_are_two_hundred_of_them() -> None:
    assert len(ROWS) >= 200


# One mistake in each key of the files

CHECK = "checks:\n  - {name: a, description: x, run: x, expect: x, needs: [gpu], timeout-s: 3, attempts: 2}\n"
TEXTS = {"matrix.yaml": MATRIX, COMPONENT: TOOL + CHECK}
Place = tuple[str | int, ...]
FREE = {"versions", "bases", "images", "when", "axes"}
"""Mappings in which users may choose the keys."""


def places(node: Any, place: Place = ()) -> Iterator[tuple[Place, Any, Any]]:
    """Yield path, key and value of each key in a YAML file."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*place, key.value), key, value
            yield from places(value, (*place, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from places(value, (*place, i))


def mutations() -> Iterator[tuple[str, str, int, str]]:
    """Yield files with one mistake: file, text, line of the mistake, and a part of the message. Line 0: any line."""
    for file, text in TEXTS.items():
        for place, key, value in places(yaml.compose(text)):
            name, line = ".".join(map(str, place)), key.start_mark.line + 1
            if len(place) == 1 or place[-2] not in FREE:
                end = key.end_mark.index
                yield file, f"{text[:end]}x{text[end:]}", line, f"{name}x: unknown key"
            if isinstance(value, yaml.ScalarNode) or value.flow_style:
                before, after = text[: value.start_mark.index], text[value.end_mark.index :]
                if key.start_mark.column == 0:
                    again = text[value.start_mark.index : value.end_mark.index]
                    yield file, f"{key.value}: {again}\n{text}", line + 1, f"{name}: the key appears twice"
                yield file, f"{before}[[[]]]{after}", line, name
                yield file, f"{before}{{x: {{y: {{z: 1}}}}}}{after}", line, name
                yield file, f"{before}a\0b{after}", line, "control characters are not allowed"
                yield file, f"{before}'{after}", 0, "not YAML"


@pytest.mark.parametrize(("file", "text", "line", "what"), dict.fromkeys(mutations()), ids=str)
def test_one_mistake_is_one_line_about_its_place(tiny: Files, file: str, text: str, line: int, what: str) -> None:
    tiny.write(COMPONENT, TEXTS[COMPONENT])
    tiny.write(file, text)
    with pytest.raises(ConfigError) as error:
        make_plan(tiny.load())
    found = str(error.value).replace(f"{tiny.root}/", "").splitlines()
    assert all(re.match(r"[\w./-]+:\d+: \S.*", entry) for entry in found), found
    assert not re.search("Input should|String should|instance of|valid", str(error.value))
    # One mistake may cause several messages, for example where another key refers to the changed value.
    assert any(re.match(rf"{re.escape(file)}:{line or '[0-9]+'}: .*{re.escape(what)}", entry) for entry in found), found
