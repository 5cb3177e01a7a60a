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
    assert all(re.match(r"[\w./-]+:\d+: \S.*", entry) for entry in found), found
    assert not any(
        word in entry for entry in found for word in ("Input should", "String should", "instance of", "valid")
    ), found
    # A value that names others is wrong where it is, and may be missing where it was used.
    assert any(re.match(rf"{re.escape(file)}:{line or '[0-9]+'}: .*{re.escape(what)}", entry) for entry in found), found


def component(more: str, build: str | None = None) -> Callable[[Files], None]:
    return lambda files: files.component("tool", TOOL + more, build)


def edit(old: str, new: str) -> Callable[[Files], None]:
    return lambda files: files.replace("matrix.yaml", old, new)


def image(more: str) -> Callable[[Files], None]:
    return edit("    tags:", f"    {more}\n    tags:")


def write(name: str, text: str) -> Callable[[Files], None]:
    return lambda files: files.write(name, text)


def with_file(text: str) -> Callable[[Files], None]:
    """The stage of `tool` holds this file."""

    def change(files: Files) -> None:
        files.write("dockerfiles/components/tool/files/f", text)
        files.component("tool", TOOL, "FROM x AS tool\n{{ file('f') }}\n")

    return change


def built_with_itself(files: Files) -> None:
    files.component("tool", TOOL + "build-requires: [library]\n")
    files.replace("matrix.yaml", "    tags:", "    build-with: {library: tool}\n    tags:")


def without_stage(files: Files) -> None:
    files.component("tool", TOOL + "build-requires: [library]\n")
    (files.root / "dockerfiles/components/library/build.j2").unlink()


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
    (nothing, "plan --set cuda=13.0,13.0", "--set cuda: 13.0 is there twice; remove one"),
    (nothing, "plan --set library=a;b", "--set library=a;b: must be a version: letters, digits"),
    (nothing, "plan --set libary=1", "--set libary=1: neither an axis nor a pin; did you mean 'library'?"),
    (nothing, "plan --github --json -", "--json, --markdown, --github and --why exclude each other"),
    (nothing, "plan --with tool --without tool", "--with tool --without tool: they exclude each other; leave one out"),
    (nothing, "plan --without gone", "--without gone: unknown component; known: library, tool"),
    (nothing, "plan tniy", "no target fits tniy; did you mean 'tiny'?"),
    (nothing, "plan cdua=13.0", "no axis 'cdua'; did you mean 'cuda'?"),
    (nothing, "plan cuda=99", "no target has it; known: 12.9, 13.0"),
    (nothing, "plan cuda>=14", "no target has it; known: 12.9, 13.0"),
    (nothing, "plan cuda>=x", "'>=x' is not a version specifier"),
    (nothing, "plan --project gone", "gone/matrix.yaml: cannot be read"),
    (nothing, "init --repository Acme", "--repository Acme: must be lower case as ghcr.io/acme, without a tag"),
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
    (image("build-with: {complier: library}"), "plan", "no component builds with 'complier'"),
    (image("size-limit-mb: {runtim: 4}"), "plan", "no variant 'runtim'; did you mean 'runtime'?"),
    (image("packages: {apt: [a; b]}"), "plan", "packages.apt.0: must be a package in lower case: name or"),
    (image('env: {X: "a\\nb"}'), "plan", "env.X: must be one line without quotes"),
    (image('labels: {X: a}'), "plan", "labels.X: must be the name of a label"),
    (edit('["12.9", "13.0"]', '["13.0", "13.0"]'), "plan", "matrix.yaml:14: images.tiny.axes.cuda: 13.0 is there twice; remove"),
    (edit('"1.2"', '"1 2"'), "plan", "matrix.yaml:8: versions.library: must be a version"),
    (edit("13-slim", "13 slim"), "plan", "matrix.yaml:4: bases.debian13.image: must be an image such as debian:13-slim"),
    (edit("images:", 'gpu-architectures: {"x": {gpus: x, cuda: "1"}}\nimages:'), "plan", "must be a compute capability"),
    (edit("{cuda}-{os}", "{cuda-{os}"), "plan", "matrix.yaml:19: images.tiny.tags.0: 'example/tiny:{cuda-debian13"),
    (edit("platforms: [linux/amd64]", "platforms: linux/amd64"), "plan", "must be a list, not 'linux/amd64'; write [linux"),
    (component("version-axis: cudaa\n"), "plan", "takes the version of tool; correct 'cuda'"),
    (component("variants: [dev]\n"), "plan", "variants.0: must be 'runtime' or 'devel', not 'dev'"),
    (edit("variant: [", "variant: [dev, "), "plan", "images.tiny.axes.variant: no variant 'dev'; did you mean 'devel'?"),
    (component("build-only: true\n"), "plan", "images.tiny.components: tool is a tool of build stages; leave it out"),
    (component("provides: [library]\n"), "plan", "library and tool provide 'library'; leave one out, or --without"),
    (component("checks:\n  - {name: a, description: x}\n"), "plan", "checks/a.sh is missing; add it, or `run`"),
    (component("checks:\n" + "  - {name: a, description: x, run: x}\n" * 2), "plan", "two are called 'a'; rename one"),
    (lambda files: files.replace(COMPONENT, "license: MIT", "license: Apache 2"), "plan", "license: 'Apache 2' is no SPDX expression; write"),
    (component("checks:\n  - {name: a, description: x, run: x, expect: (}\n"), "plan", "'(' is no regular expression: missing )"),
    (lambda files: files.component("new", LIBRARY), f"render {TARGET} --with new", "--with new: has no version; add"),
    (component("", "RUN x\n"), f"render {TARGET}", f"{TEMPLATE}:1: has no stage tool; write `FROM … AS tool`"),
    (component("", ""), f"render {TARGET}", f"{TEMPLATE}:1: has no stage tool"),
    (component("", "\n{{ 1 / 0 }}"), f"render {TARGET}", f"{TEMPLATE}:2: division by zero; correct the template"),
    (component("", "\n{{ source() }}"), f"render {TARGET}", f"{TEMPLATE}:2: "),
    (component("", "{{ cuda }}"), f"render {TARGET}", "'cuda' is undefined; name it in `key` or `build-requires` of"),
    (component("", "FROM {{ stage.library }} AS tool"), f"render {TARGET}", "has no attribute 'library'; name it in `key` or `build-requires`"),
    (edit("[tool, library]", "[tool, library, mine]"), "plan", "unknown component 'mine'; write dockerfiles/components/mine/component"),
    (nothing, "plan --without library", "--without library: tool in tiny requires it; leave that out, too"),
    (write("dockerfiles/components/tool/Dockerfile", "FROM x\n"), "plan", "tool/Dockerfile:1: is not read; a component has"),
    (nothing, f"render {TARGET} --for nothing", "--for nothing: must be one of 'standalone'"),
    (nothing, "render", "*: 3 targets fit (tiny-cuda12.9-debian13-runtime, "),

    (component("", "{{ base.__class__.__mro__ }}"), f"render {TARGET}", "attribute '__class__' of 'str' object is unsafe"),
    (component("key: [cudaa]\n"), f"render {TARGET}", f"key: 'cudaa' is neither an axis nor a component of {TARGET}; did"),
    (component("", "{% if %}"), f"render {TARGET}", f"{TEMPLATE}:1: Expected an expression"),
    (component("", "{{ file('gone') }}"), f"render {TARGET}", f"{TEMPLATE}:1: dockerfiles/components/tool/files/gone cannot be read"),
    (lambda files: (files.root / TEMPLATE).write_bytes(b"\xff"), f"render {TARGET}", f"{TEMPLATE}:1: cannot be read: not UTF-8 text; write"),
    (lambda files: (files.root / "dockerfiles/macros.j2").unlink(), f"render {TARGET}", "macros.j2: is missing, and templates need it; write `extends"),
    # stages: `plan` renders what it lists
    (lambda files: (files.root / TEMPLATE).unlink(), "plan", f"{COMPONENT}:6: git: is for a build stage; write {TEMPLATE}, or"),
    (lambda files: files.component("mine", LIBRARY + "build-requires: [library]\n"), "plan", "mine/component.yaml:5: build-requires: is for a build stage"),
    (without_stage, "plan", f"{COMPONENT}:7: build-requires: library has no stage; write dockerfiles/components/library/build.j2"),
    (component("", "FROM {{ bsae }} AS tool"), "plan", f"{TEMPLATE}:1: 'bsae' is undefined; did you mean 'base'?"),
    (component("", "FROM x AS tool\nRUN <<'A'\nx\nA\necho y\nA\n"), "plan", f"{TEMPLATE}:5: unknown instruction 'ECHO'"),
    (write("dockerfiles/components/tool/install.j2", "RUN <<EOF\nx\n"), "plan", "tool/install.j2:1: the heredoc of `RUN <<EOF` has no end; write"),
    (write("dockerfiles/components/tool/install.j2", "FROM x\n"), "plan", "tool/install.j2:1: FROM would begin another image; leave"),
    (edit('"12.9", "13.0"', '"13.0rc"'), "plan", "matrix.yaml:14: images.tiny.axes.cuda: '13.0rc' is no version; write"),
    (edit('tool: "3.4"', 'tool: "3.5"'), f"render {TARGET}", "has no git https://example.org/tool.git 3.5, but 3.4; add it"),
    (lambda files: (files.root / "imagebuild.lock").unlink(), f"render {TARGET}", "imagebuild.lock (not there yet): has no image debian:13-slim; add"),
    (nothing, "verify tiny --list", "tiny: 3 targets fit (tiny-cuda12.9-debian13-runtime, tiny-"),
    (nothing, "verify tiny-* --list", "tiny-*: 3 targets fit (tiny-cuda12.9-debian13-runtime, tiny-"),
    (nothing, "each imagebuild verify {image}", "imagebuild: no such folder; before the command, name the one where builds are"),
    (lambda files: (files.root / "dockerfiles/components/x").symlink_to("/gone"), "plan", "components/x/component.yaml:1: is missing; write it, or"),
    (lambda files: (files.root / "matrix.yaml").rename(files.root / "gone").with_name("matrix.yaml").symlink_to("lost"), "plan", "matrix.yaml: cannot be read"),
    (write("dockerfiles/macros.j2", ""), "plan", "dockerfiles/macros.j2:1: has no macro rule; copy it"),
    (nothing, "build --registry ghcr.io/Acme", "--registry ghcr.io/Acme: must be lower case as ghcr.io/acme, without a tag"),
    (nothing, "build --cache x:y", "--cache x:y: must be lower case as ghcr.io/acme, without a tag"),
    # what gets into a Dockerfile
    (component("env: {MY-PATH: x}\n"), "plan", "component.yaml:7: env.MY-PATH: must be the name of a variable"),
    (component("env: {X: 'a\"b'}\n"), "plan", "component.yaml:7: env.X: must be one line without quotes"),
    (component("checks: [{name: a, description: x, run: x, environment: {A B: x}}]\n"), "plan", "environment.A B: must be the name of a var"),
    (component("packages: {runtime: ['x; rm -rf /']}\n"), "plan", "packages.runtime.0: must be a package: name or name={version}, not 'x"),
    (component("archive: htp://x/{version}.tar\n"), "plan", "component.yaml:7: archive: must be an address that begins with https"),
    (lambda files: files.replace(COMPONENT, "git: https:", "git: htp:"), "plan", "git: must be the address of a git repository, such as"),
    (component("libraries: [lib]\n"), "plan", "component.yaml:7: libraries.0: must be an absolute path, without blanks, not 'lib'"),
    (component("checks: [{name: a, description: x, run: x, when: {os: []}}]\n"), "plan", "checks.0.when.os: must not be empty"),
    (edit("[linux/amd64]", "[linux/amd64, linux/amd64]"), "plan", "matrix.yaml:17: images.tiny.platforms: linux/amd64 is there twice; remove"),
    (edit("[tool, library]", "[tool, library, tool]"), "plan", "matrix.yaml:18: images.tiny.components: tool is there twice; remove one"),
    (with_file("a\0b"), "plan", "files/f:1: a NUL cannot be in a text; remove it"),
    # conditions
    (edit('cuda: "<13"', 'cdua: "<13"'), "plan", "matrix.yaml:22: rules.when: unknown axis 'cdua'; did you mean 'cuda'?"),
    (edit("variant: devel}", "variant: dev}"), "plan", "matrix.yaml:22: rules.when.variant: no target has 'dev'; did you"),
    (image("aliases: [{tag: 'x/y:z', when: {varint: runtime}}]"), "plan", "aliases.when: unknown axis 'varint'; did you"),
    (image("aliases: [{tag: 'x/y:z', when: {cuda: '13'}}]"), "plan", "when.cuda: only cuda-major is '13'; did you mean"),
    (image("waivers: [{rule: plan, subject: x, reason: x, when: {arch: arm}}]"), "plan", "waivers.when.arch: no target has 'arm'; did you"),
    (edit('library: "1.2"', 'library: {when: {os: debian12}, version: "1"}'), "plan", "versions.library.when.os: no target"),
    (edit('library: "1.2"', 'library: {when: {cuda: "<9"}, version: "1"}'), "plan", "add `library: VERSION`, or a rule that"),
    (component("supports: [{when: {arch: amd64}, reason: x}]\n"), "plan", "component.yaml:7: supports.when: unknown axis"),
    (component("excludes: [{when: {image: gone}, reason: x}]\n"), "plan", "excludes.when: unknown axis 'image'; known: cuda"),
    (component("facts: [{when: {os: ubuntu24.04}, values: {x: y}}]\n"), "plan", "facts.when.os: no target has 'ubuntu24.04'"),
    (component("env: [{when: {variants: devel}, values: {X: y}}]\n"), "plan", "env.when: unknown axis 'variants'; did you"),
    (component("checks:\n  - {name: a, description: x, run: x, when: {cuda: 14}}\n"), "plan", "checks.when.cuda: no target has"),
    (edit("      variant: [runtime, devel]\n", ""), "plan", "tiny.axes: the axis 'variant' is missing; add `variant: [runtime]`"),
    (edit("      os: [debian13]\n", ""), "plan", "images.tiny.axes: the axis 'os' is missing; add `os: [debian13]`"),
    # the right form
    (image("packages: [jq]"), "plan", "packages: must be a mapping of keys and values, not a list; write {apt: [jq]}"),
    (image("packages: {apt: jq htop}"), "plan", "packages.apt: must be a list, not 'jq htop'; write [jq, htop]"),
    (image("env: [A=b, C=d]"), "plan", "env: must be a mapping of keys and values, not a list; write {A: b, C: d}"),
    (image("labels: com.acme=x"), "plan", "must be a mapping of keys and values, not 'com.acme=x'; write {com.acme: x}"),
    (image("cmd: sleep 3"), "plan", "matrix.yaml:19: images.tiny.cmd: must be a list, not 'sleep 3'; write [sleep, 3]"),
    (image("cmd: []"), "plan", "matrix.yaml:19: images.tiny.cmd: must not be empty\n"),
    (edit("repository:", "extends: {git: 'https://x.org/a.git'}\nrepository:"), "plan", "matrix.yaml:1: extends.commit: is missing"),
    (component("packages: [jq]\n"), "plan", "component.yaml:7: packages: must be a mapping of keys and values, not a list; write"),
    (component("checks:\n  - {name: a, description: x, run: x, expect: '{vers}'}\n"), "plan", "{vers} has no value here; only {v"),
    (image("\tx: y"), "plan", "matrix.yaml:19: not YAML: a tab, where only spaces may be; replace it by spaces"),
    (image("user: 'me"), "plan", "matrix.yaml:19: not YAML: found unexpected end of stream; correct the line"),
    # the files of a project
    (lambda files: (files.root / COMPONENT).unlink(), "plan", "tool/component.yaml:1: is missing; write it, or remove tool"),
    (lambda files: (files.root / TEMPLATE).rename(files.root / TEMPLATE.replace("build", "stage")), "plan", "stage.j2:1: is not read"),
    (write("dockerfiles/components/tool/check/a.sh", ""), "plan", "components/tool/check:1: is not read; a component"),
    (write("matrix.yaml", "repository: x\nimages: {}\n"), "plan", "has no bases and extends nothing; write `extends: imagebuild`"),
    (nothing, "plan --lock gone", "--lock gone: no such file; `imagebuild lock --lock gone` writes it"),
    (nothing, "lock --check --offline --lock gone", "--lock gone: no such file"),
    (image("base: ubuntu:24.04"), "plan", "base: ubuntu:24.04: packages and pins are for debian13; use a base image of that release"),
    # names that another file has to know
    (edit("components: [tool,", "components: [tol,"), "plan", "matrix.yaml:18: images.tiny.components: unknown component 'tol'; did you mean 'tool'?"),
    (edit("os: [debian13]", "os: [debain13]"), "plan", "matrix.yaml:15: images.tiny.axes.os: no base 'debain13'; did you mean 'debian13'?"),
    (edit("    platforms:", "    build-on: debain13\n    platforms:"), "plan", "matrix.yaml:17: images.tiny.build-on: no base 'debain13'; did"),
    (edit("build-on: debian13", "build-on: debain13"), "plan", "matrix.yaml:5: bases.debian13.build-on: no base 'debain13'; did"),
    (edit('"1.2"\n', '"1.2"\n  libary: "1"\n'), "plan", "matrix.yaml:9: versions: unknown component 'libary'; did you mean 'library'?"),
    (edit('  library: "1.2"\n', ""), "plan", "matrix.yaml:7: versions: no version for library, which tiny uses"),
    (lambda files: files.replace(COMPONENT, "[library]", "[libary]"), "plan", "component.yaml:5: requires: unknown component 'libary'; did"),
    (component("build-requires: [gone]\n"), "plan", "component.yaml:7: build-requires: unknown component 'gone'"),
    (lambda files: files.component("library", LIBRARY + "requires: [tool]\n"), "plan", "requires: goes in a circle: "),
    (edit('cuda: "<13"', 'cuda: "<12"'), "plan", "matrix.yaml:21: rules.no-old-devel: matches no combination; remove it, or correct its"),
    (edit('cuda: "<13"', 'cuda: "<<13"'), "plan", "matrix.yaml:22: rules.0.when.cuda: '<<13' is not a version specifier; write one such as '>=13"),
    (edit("repository: example", "repository: [example]"), "plan", "matrix.yaml:1: repository: must be a text, not a list"),
    (edit(":{cuda}-{os}-{variant}", ":{cuda}-{os}"), "plan", "matrix.yaml:19: tag example/tiny:13.0-debian13 names both tiny-cuda13.0-"),
    # tags and aliases
    (image("aliases: ['{repository}/{image}:x-{revision}']"), "plan", "images.tiny.aliases.0: no value for {revision}"),
    (image("aliases: ['{repository}/{image}:{cuda-mayor}']"), "plan", "did you mean 'cuda-major'"),
    (image("aliases: ['{repository}/{image}:a b']"), "plan", "'example/tiny:a b' is no image with a tag; write name:tag"),
    (image("aliases: [{tag: 'example/tiny:13.0-debian13-runtime', when: {variant: devel}}]"), "plan", "-devel would move a tag"),
    (edit(":{cuda}-{os}-{variant}", ":{cuda-major}"), "plan", "tags.0: no value for {cuda-major}"),
    # selection and settings
    (nothing, "plan cuda=12.9 variant=devel", "no-old-devel excludes tiny-cuda12.9-debian13-devel: nobody asked for it"),
    (nothing, "plan --set tool=4@main", "write it as tool=<tag> or tool=4@<40-digit commit>"),
    (image("build-with: {library: tool}"), "plan", "matrix.yaml:19: images.tiny.build-with: no component builds with 'library'"),
    (built_with_itself, "plan", "matrix.yaml:19: images.tiny.build-with.library: not a component that provides it: 'tool'; known"),
    (image("waivers: [{rule: licences, subject: x, reason: x}]"), "plan", "or 'gpu-code', not 'licences'; did you mean 'licenses'"),
    (edit('"12.9", "13.0"', "latest"), "plan", "matrix.yaml:14: images.tiny.axes.cuda: 'latest' is no version; write the one"),
    (nothing, "plan --set cuda=newest", "--set cuda: 'newest' is no version; write the one you mean; `imagebuild"),
    (edit('library: "1.2"', "library: latest"), "plan", "matrix.yaml:8: versions.library: 'latest' is no version; write the"),
    (nothing, "plan --set library=latest", "--set library=latest: 'latest' is no version; write the one you mean; `imagebuild"),
    (lambda files: files.write("matrix.yaml", MATRIX[: MATRIX.index("images:")] + "images: {}\n"), "plan", "images: there is none; add"),
    (nothing, f"plan {TARGET.replace('runtime', 'devel')} --set cuda=12.9", "no-old-devel excludes tiny-cuda12.9-debian13-devel: "),
    (edit("reason:", "reason: x\n  - name: all\n    when: {image: tiny}\n    reason:"), "plan", "axes: all excludes tiny-cuda12.9-debian13-runtime, and all others: "),
    (nothing, f"plan {TARGET} --set cuda=12.9", "no target fits tiny-cuda13.0-debian13-runtime; did you mean 'tiny-cuda12.9-"),
    (write("imagebuild.lock", "{}"), f"render {TARGET}", "imagebuild.lock:1: has no image debian:13-slim; add it with"),
    (write("folder/file", "x"), f"bundle create folder {TARGET}", "folder: is not empty; remove it, or name another folder"),
    (write("folder/file", "x"), "bundle verify folder", "folder: no bundle is here (SHA256SUMS is missing); make one with"),
    (nothing, f"build {TARGET} --offline", "--offline: no bundle is set; name one with --bundle DIR"),
    # what is appended, and heredocs
    (image("append: FROM x"), f"render {TARGET}", "matrix.yaml:19: images.tiny.append: FROM would begin another image; leave"),
    (image("append: RUNN x"), f"render {TARGET}", "append: unknown instruction 'RUNN'; did you mean 'RUN'?"),
    (image("append: 'RUN <<X'"), f"render {TARGET}", "append: the heredoc of `RUN <<X` has no end; write its last word on"),
    (write("more", "RUN x\n FROM y\n"), f"render {TARGET} --append more", "--append more: FROM would begin another image"),
    (write("more", "ENV x"), f"build {TARGET} --append less", "less: cannot be read: No such file or directory"),
    (nothing, f"build {TARGET} --base-image debian:13", "--base-image debian:13: nothing would verify it; add its digest"),
    (image("base: debian:13"), f"render {TARGET} --base-image debian:12", "error: --base-image debian:12: packages and pins are for debian13"),
    (nothing, f"build {TARGET} --base-image debian:12@sha256:{'a' * 64}", "packages and pins are for debian13; use a base"),
    (component("", "FROM x AS tool\nRUN <<'END'\ntrue\n"), f"render {TARGET}", f"{TEMPLATE}:2: the heredoc of `RUN <<'END'` has"),
    (with_file("cat <<EOF\nEOF\n"), f"render {TARGET}", "files/f:2: a line 'EOF' would end the heredoc that"),
    (component("", "FROM x AS tool\n{{ version | nofilter }}\n"), f"render {TARGET}", "No filter named 'nofilter'"),
    (component("wheels: [x]\n", "FROM x AS tool\n"), f"render {TARGET}", "has no wheels tool 3.4; add it with `imagebuild lock`"),
    (with_file("\necho {{ version }}\n"), f"render {TARGET}", "files/f:2: this is not filled in, as files are no templates; write @NAME@"),
]  # fmt: skip


PLACE = (
    r"error: (\S+:\d+: |--\w+|no target fits|'>=x'|\S+ \(not there yet\): |"
    r"\S+: (3 targets fit|cannot be read|is missing|is there already|no such folder|is not empty|no bundle))"
)
"""A file with its line, an option or an argument; or a file that there is not."""


@pytest.mark.parametrize(("spoil", "line", "message"), TABLE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_command_says_it_in_one_line(
    tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Files], None], line: str, message: str
) -> None:
    monkeypatch.chdir(tiny.root)
    spoil(tiny)
    status, printed, shown = command(*line.split())
    assert (status in (2, 3), printed) == (True, "")
    assert message in shown
    assert re.match(PLACE, shown)
    assert re.search("; |, not | must | write ", shown), "no remedy"
    assert len(shown.splitlines()) <= 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --to x", "need --from"),
        ("plan --github-jobs 9", "--github-jobs: need --github"),
        ("plan --base registry", "--platform and --base: need --from or --github"),
        ("plan --markdown", "need --from"),
        ("plan --from . --json - --markdown", "exclude each other"),
        ("plan --from . --why", "cannot be combined with --github or --why"),
        ("plan --from . --base mine", "--base mine: must be one of 'bootstrap', 'registry'"),
        ("plan --from . --platform linux/arm64", "is not for linux/arm64"),
        ("plan open:x:", "no target fits open:x:;"),
        ("plan --set x", "write it as name=value"),
        ("plan --sett x", "error: No such option: --sett"),
        ("plan --set", "error: Option '--set' requires an argument"),
        ("plan --github-jobs 8.5", "error: --github-jobs 8.5: must be a whole number"),
        ("plan --github-jobs=0", "error: --github-jobs 0: must be 1 or more"),
        ("report x --min-bw x", "error: --min-bw x: must be a number"),
        ("attest shw", "error: No such command 'shw'"),
        ("plan --changed-since main", "need --github"),
        ("plan --github --platform linux/arm64", "no selected target is for it"),
        ("plan --github --changed-since ./dockerfiles", "has no matrix.yaml"),
        ("plann", "No such command 'plann'"),
        ("render tiny-*", "3 targets fit"),
        ("render tiny-cuda12.9* --append gone", "gone: cannot be read"),
        ("render tiny-cuda12.9* -o /proc/no/file", "cannot be written"),
        ("render tiny-cuda12.9* --with libary", "did you mean 'library'"),
        ("build --load --push", "exclude each other"),
        ("build --platform linux/riscv64", "linux/riscv64: unknown platform; use linux/amd64"),
        ("build --stage gone", "no selected target has such a stage"),
        ("build --cache-write", "--cache-write: needs --cache REPOSITORY"),
        ("lock --json -", "--json: needs --check"),
        ("lock --offline", "--offline: needs --check"),
        ("lock --date 2026-11-21 --check", "--date and --show: exclude --check"),
        ("lock --date 2026-11-21 --update tool", "--date and --show: exclude --check"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_said_in_one_line(
    tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.chdir(tiny.root)
    status, printed, shown = command(*line.split())
    assert (status in (2, 3), printed, len(shown.splitlines())) == (True, "", 1)
    assert message in shown


def test_a_plan_says_which_versions_the_lock_does_not_have(
    tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.root)
    tiny.replace("matrix.yaml", 'tool: "3.4"', 'tool: "3.44"')
    status, printed, shown = command("plan")
    assert (status, TARGET in printed) == (0, True)
    assert shown.startswith("imagebuild.lock:1: has no git https://example.org/tool.git 3.44, but 3.4; add it with")


def test_there_are_two_hundred_of_them() -> None:
    assert len(GENERATED) + len(TABLE) >= 200


def test_merge_keys_give_what_the_block_lacks(tiny: Files) -> None:
    tiny.replace(
        "matrix.yaml", "    description: A small image\n", "    <<: {description: merged, platforms: [gone]}\n"
    )
    image = tiny.load().matrix.model.images["tiny"]
    assert (image.description, image.platforms) == ("merged", ("linux/amd64",))
