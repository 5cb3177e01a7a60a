"""What people write wrong: each is one line with file, line, cause and remedy, and never a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from imagebuild.core import ConfigError
from imagebuild.project import make_plan
from tests.conftest import LIBRARY, MATRIX, TOOL, Files
from tests.unit.conftest import Call

TARGET = "tiny-cuda13.0-debian13-runtime"
COMPONENT = "dockerfiles/components/tool/component.yaml"
CHECK = "checks:\n  - {name: a, description: x, run: x, expect: x, needs: [gpu], timeout-s: 3, attempts: 2}\n"
TEXTS = {"matrix.yaml": MATRIX, COMPONENT: TOOL + CHECK}
Place = tuple[str | int, ...]


def places(node: Any, place: Place = ()) -> Iterator[tuple[Place, Any, Any]]:
    """Each key of a file with its value."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*place, key.value), key, value
            yield from places(value, (*place, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from places(value, (*place, i))


FREE = {"versions", "bases", "images", "when", "axes", "github-runners"}
"""Their keys are names that the writer chooses."""


def mutations() -> Iterator[tuple[str, str, int, str]]:
    """File, text with one mistake, its line, and what the message begins with."""
    for file, text in TEXTS.items():
        for place, key, value in places(yaml.compose(text)):
            name, line = ".".join(map(str, place)), key.start_mark.line + 1
            start, end = value.start_mark.index, value.end_mark.index
            if len(place) == 1 or place[-2] not in FREE:
                wrong = f"{key.value}x"
                yield (
                    file,
                    text[: key.start_mark.index] + wrong + text[key.end_mark.index :],
                    line,
                    f"{name}x: unknown key",
                )
            if isinstance(value, yaml.ScalarNode) or value.flow_style:
                before, after = text[:start], text[end:]
                if key.start_mark.column == 0:
                    twice = f"{key.value}: {text[start:end]}\n{text}"
                    yield file, twice, line + 1, f"{name}: the key is there twice"
                yield file, f"{before}[[[]]]{after}", line, name
                yield file, f"{before}{{x: {{y: {{z: 1}}}}}}{after}", line, name
                yield file, f"{before}a\0b{after}", line, "may not be in a file"
                yield file, f"{before}'{after}", 0, "not YAML"


GENERATED = list(dict.fromkeys(mutations()))


def complaints(files: Files) -> list[str]:
    with pytest.raises(ConfigError) as error:
        make_plan(files.load())
    return str(error.value).replace(f"{files.root}/", "").splitlines()


@pytest.mark.parametrize(("file", "text", "line", "what"), GENERATED, ids=str)
def test_one_mistake_is_one_line_about_its_place(tiny: Files, file: str, text: str, line: int, what: str) -> None:
    tiny.write(COMPONENT, TEXTS[COMPONENT])
    tiny.write(file, text)
    found = complaints(tiny)
    assert all(re.match(r"[\w./-]+:\d+: \S.*", one) for one in found), found
    assert not any(
        word in one for one in found for word in ("Input should", "String should", "instance of", "valid")
    ), found
    # A value that names others is wrong where it is, and may be missing where it was used.
    assert any(re.match(rf"{re.escape(file)}:{line or '[0-9]+'}: .*{re.escape(what)}", one) for one in found), found


def component(more: str, build: str | None = None) -> Callable[[Files], None]:
    return lambda files: files.component("tool", TOOL + more, build)


def edit(old: str, new: str) -> Callable[[Files], None]:
    return lambda files: files.replace("matrix.yaml", old, new)


def write(name: str, text: str) -> Callable[[Files], None]:
    return lambda files: files.write(name, text)


def nothing(files: Files) -> None:
    """The files are right."""


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
TEMPLATE = "dockerfiles/components/tool/build.j2"
TABLE: list[tuple[Callable[[Files], object], str, str]] = [
    (nothing, "plan --set os=rhel9", "--set os: no base 'rhel9'; known: debian13"),
    (nothing, "plan --json - --set os=rhel9", "--set os: no base 'rhel9'"),
    (nothing, "plan --set cuda=13.0 --set cuda=13.1", "--set cuda=13.1: cuda is set twice; give an axis several"),
    (nothing, "plan --set cuda=13.0,13.0", "--set cuda: cuda 13.0 is there twice; remove one"),
    (nothing, "plan --set library=a;b", "--set library=a;b: must be a version: letters, digits"),
    (nothing, "plan --set libary=1", "--set libary=1: neither an axis nor a pin; did you mean 'library'?"),
    (nothing, "plan --github --json -", "--json, --markdown, --github and --why exclude each other"),
    (nothing, "plan --with tool --without tool", "--with and --without exclude each other; leave one out"),
    (nothing, "plan --without gone", "--without gone: unknown component; known: library, tool"),
    (nothing, "plan tniy", "no target fits tniy; did you mean 'tiny'?"),
    (nothing, "plan cdua=13.0", "no axis 'cdua'; did you mean 'cuda'?"),
    (nothing, "plan cuda=99", "no target has it; known: 12.9, 13.0"),
    (nothing, "plan cuda>=14", "no target has it; known: 12.9, 13.0"),
    (nothing, "plan cuda>=x", "'>=x' is not a version specifier"),
    (nothing, "plan --project gone", "gone/matrix.yaml: cannot be read"),
    (nothing, "init --repository Acme", "--repository Acme: not a registry and folder such as ghcr.io/acme"),
    (nothing, "init", "matrix.yaml: is there already; name an empty folder"),
    (write("matrix.yaml", "x: &a [*a]\n"), "plan", "matrix.yaml:1: x.0: an alias of itself; write the value instead"),
    (write("matrix.yaml", ALIASES), "plan", "aliases make more than 200000 values"),
    (write("matrix.yaml", "[" * 100_000), "plan", "matrix.yaml:1: has more than 100 levels"),
    (write("matrix.yaml", "- " * 100_000), "plan", "matrix.yaml:1: has more than 100 levels"),
    (write("matrix.yaml", ""), "plan", "matrix.yaml:1: repository: is missing"),
    (write("matrix.yaml", "- a\n"), "plan", "matrix.yaml:1: the file: must be a mapping of keys and values, not a list"),
    (write("imagebuild.lock", '{"a":' * 100_000), "plan", "imagebuild.lock:1: has more than 100 levels"),
    (write("imagebuild.lock", "{\n" + '"archives":' + "[" * 200_000), "plan", "imagebuild.lock:1: has more than 100"),
    (write("imagebuild.lock", '{\n "imges": {}\n}'), "plan", "imagebuild.lock:2: imges: unknown key; did you mean"),
    (write("imagebuild.lock", '{\n "archives": {\n"x": 3}}'), "plan", "imagebuild.lock:3: archives.x: must be"),
    (write("imagebuild.lock", '{"date": "2026-01-01", "date": "2026-01-02"}'), "plan", "date: the key is there twice"),
    (write("imagebuild.lock", '{\n "archives": {},,\n}'), "plan", "imagebuild.lock:2: not JSON"),
    (edit("repository: example", "repository: Example"), "plan", "matrix.yaml:1: repository: must be lower case as"),
    (edit("    tags:", "    build-with: {complier: library}\n    tags:"), "plan", "no component builds with 'complier'"),
    (edit("    tags:", "    size-limit-mb: {runtim: 4}\n    tags:"), "plan", "no variant 'runtim'; did you mean 'runtime'?"),
    (edit("    tags:", "    packages: {apt: [a; b]}\n    tags:"), "plan", "packages.apt.0: must be a package: name or"),
    (edit("    tags:", '    env: {X: "a\\nb"}\n    tags:'), "plan", "env.X: must be one line without quotes"),
    (edit("    tags:", '    labels: {X: a}\n    tags:'), "plan", "labels.X: must be the name of a label"),
    (edit('["12.9", "13.0"]', '["13.0", "13.0"]'), "plan", "matrix.yaml:14: cuda 13.0 is there twice; remove one"),
    (edit('"1.2"', '"1 2"'), "plan", "matrix.yaml:8: versions.library: must be a version"),
    (edit("13-slim", "13 slim"), "plan", "matrix.yaml:4: bases.debian13.image: must be an image such as debian:13-slim"),
    (edit("images:", 'gpu-architectures: {"x": {gpus: x, cuda: "1"}}\nimages:'), "plan", "must be a compute capability"),
    (edit("{cuda}-{os}", "{cuda-{os}"), "plan", "matrix.yaml:19: images.tiny.tags.0: 'example/tiny:{cuda-debian13"),
    (edit("platforms: [linux/amd64]", "platforms: linux/amd64"), "plan", "must be a list, not 'linux/amd64'; write [linux"),
    (component("version-axis: cudaa\n"), "plan", "version-axis: image tiny has no axis 'cudaa'; did you mean 'cuda'?"),
    (component("variants: [dev]\n"), "plan", "variants.0: must be 'runtime' or 'devel', not 'dev'"),
    (edit("variant: [", "variant: [dev, "), "plan", "images.tiny.axes.variant: must be 'runtime' or 'devel', not 'dev'"),
    (component("build-only: true\n"), "plan", "images.tiny.components: tool is a tool of build stages; leave it out"),
    (component("provides: [library]\n"), "plan", "library and tool provide 'library'; leave one out, or --without"),
    (component("checks:\n  - {name: a, description: x}\n"), "plan", "checks/a.sh is missing; add it, or `run`"),
    (component("checks:\n" + "  - {name: a, description: x, run: x}\n" * 2), "plan", "two are called 'a'; rename one"),
    (component("checks:\n  - {name: a, description: x, run: x, expect: (}\n"), "plan", "'(' is no regular expression"),
    (lambda files: files.component("new", LIBRARY), f"render {TARGET} --with new", "--with new: has no version; add"),
    (component("", "RUN x\n"), f"render {TARGET}", f"{TEMPLATE}:1: has no stage tool; write `FROM … AS tool`"),
    (component("", ""), f"render {TARGET}", f"{TEMPLATE}:1: has no stage tool"),
    (component("", "\n{{ 1 / 0 }}"), f"render {TARGET}", f"{TEMPLATE}:2: division by zero; correct the template"),
    (component("", "\n{{ source() }}"), f"render {TARGET}", f"{TEMPLATE}:2: "),
    (component("", "{{ cuda }}"), f"render {TARGET}", "'cuda' is undefined; a stage sees only its key"),
    (component("", "{% if %}"), f"render {TARGET}", f"{TEMPLATE}:1: Expected an expression"),
    (component("", "{{ file('gone') }}"), f"render {TARGET}", "files/gone: cannot be read"),
    (lambda files: (files.root / TEMPLATE).write_bytes(b"\xff"), f"render {TARGET}", f"{TEMPLATE}: cannot be read: not UTF-8"),
    (lambda files: (files.root / "dockerfiles/macros.j2").unlink(), f"render {TARGET}", "macros.j2: cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "line", "message"), TABLE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_command_says_it_in_one_line(
    tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Files], None], line: str, message: str
) -> None:
    monkeypatch.chdir(tiny.root)
    spoil(tiny)
    status, printed, said = command(*line.split())
    assert (status in (2, 3), printed) == (True, "")
    assert message in said
    assert len(said.splitlines()) <= 2


def test_there_are_two_hundred_of_them() -> None:
    assert len(GENERATED) + len(TABLE) >= 200


def test_merge_keys_give_what_the_block_lacks(tiny: Files) -> None:
    tiny.replace(
        "matrix.yaml", "    description: A small image\n", "    <<: {description: merged, platforms: [gone]}\n"
    )
    image = tiny.load().matrix.model.images["tiny"]
    assert (image.description, image.platforms) == ("merged", ("linux/amd64",))
