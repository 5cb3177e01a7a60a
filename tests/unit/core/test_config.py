"""Every mistake is shown with file:line, what is wrong and the nearest valid name."""

import marshal
from pathlib import Path
from unittest.mock import Mock

import pytest

from imagebuild.core import ConfigError
from imagebuild.project import make_plan
from imagebuild.render import Renderer
from tests.conftest import LIBRARY, TOOL, Files


def complaint(tiny: Files) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan(tiny.load())
    return str(caught.value).replace(f"{tiny.root}/", "")


def test_versions_stay_text(tiny: Files) -> None:
    tiny.replace("matrix.yaml", 'library: "1.2"', "library: 1.10")
    assert tiny.load().matrix.model.versions["library"][0].version == "1.10"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    axes:", "    axez:", "matrix.yaml:13: images.tiny.axez: unknown key; did you mean 'axes'?"),
        ("platforms: [linux/amd64]", "platforms: [linux/s390x]", "matrix.yaml:17: images.tiny.platforms.0: must be 'linux/amd64' or 'linux/arm64', not 'linux/s390x'"),
        ("components: [tool,", "components: [tol,", "matrix.yaml:18: images.tiny.components: unknown component 'tol'; did you mean 'tool'?"),
        ("os: [debian13]", "os: [debain13]", "matrix.yaml:15: images.tiny.axes.os: no base 'debain13'; did you mean 'debian13'?"),
        ('cuda: "<13", variant', 'cudda: "<13", variant', "matrix.yaml:22: rules.when: unknown axis 'cudda'; did you mean 'cuda'?"),
        ('cuda: "<13", variant', 'cuda: "<12", variant', "matrix.yaml:21: rules.no-old-devel: matches no combination; remove it, or correct its 'when'"),
        ('cuda: "<13", variant', 'cuda: "<<13", variant', "matrix.yaml:22: rules.0.when.cuda: '<<13' is not a version specifier such as '>=13,<13.4'"),
        (":{cuda}-{os}-{variant}", ":{cuda}-{os}", "matrix.yaml:19: tag example/tiny:13.0-debian13 names both tiny-cuda13.0-debian13-runtime and tiny-cuda13.0-debian13-devel; add the axis that differs"),
        (":{cuda}-{os}", ":{kuda}-{os}", "matrix.yaml:19: images.tiny.tags.0: no value for {kuda}; did you mean 'cuda'?"),
        (":{cuda}-{os}", ":+{cuda}-{os}", "is not a valid image name and tag"),
        ('  library: "1.2"\n', "", "matrix.yaml:7: versions: no version for library, which tiny uses"),
        ('  library: "1.2"\n', '  library: "1.2"\n  libary: "1"\n', "matrix.yaml:9: versions: unknown component 'libary'; did you mean 'library'?"),
        ("build-on: debian13", "build-on: debain13", "matrix.yaml:5: bases.debian13.build-on: no base 'debain13'; did you mean 'debian13'?"),
        ("    platforms:", "    build-on: debain13\n    platforms:", "matrix.yaml:17: images.tiny.build-on: no base 'debain13'; did you mean 'debian13'?"),
        ("    description: A small image\n", "", "matrix.yaml:11: images.tiny.description: is missing"),
        ("repository: example", "repository: [example]", "matrix.yaml:1: repository: must be a text, not a list"),
        ("repository: example", "repository: example\nrepository: other", "matrix.yaml:2: repository: the key is there twice"),
        ("repository: example", "repository: {", "not YAML"),
    ],
)  # fmt: skip
def test_mistakes_in_the_matrix(tiny: Files, old: str, new: str, message: str) -> None:
    tiny.replace("matrix.yaml", old, new)
    assert message in complaint(tiny)


def test_mistakes_in_a_component(tiny: Files) -> None:
    tiny.component("tool", TOOL.replace("requires: [library]", "requires: [libary]\nbuild-requires: [gone]"))
    text = complaint(tiny)
    assert "components/tool/component.yaml:5: requires: unknown component 'libary'; did you mean 'library'?" in text
    assert "components/tool/component.yaml:6: build-requires: unknown component 'gone'" in text


def test_a_requirement_circle_is_named(tiny: Files) -> None:
    tiny.component("library", LIBRARY + "requires: [tool]\n")
    assert "goes in a circle: " in complaint(tiny)


def test_a_cached_text_reads_as_one_that_was_not(tiny: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = tiny.load(), tiny.load()
    assert (first.matrix, first.components) == (second.matrix, second.components)
    files = list((tmp_path / "cache/imagebuild/yaml").iterdir())
    assert len(files) == 1 + len(first.components)
    tiny.replace("matrix.yaml", 'library: "1.2"', 'library: "1.3"')
    assert tiny.load().matrix.model.versions["library"][0].version == "1.3"
    for content in (b"", b"damaged", marshal.dumps(("only one",))):
        for file in files:
            file.write_bytes(content)
        assert tiny.load().components == first.components


def test_mistakes_are_not_cached(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "repository: example", "repository: example\nrepository: other")
    assert complaint(tiny) == complaint(tiny)
    assert "the key is there twice" in complaint(tiny)


@pytest.mark.parametrize("home", ["/proc", None])
def test_nothing_can_be_cached(tiny: Files, monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home:
        monkeypatch.setenv("HOME", home)
    else:
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    project = tiny.load()
    target = make_plan(project).targets[0]
    assert "FROM debian" in Renderer(project, project.matrix.model.versions).dockerfile(target).text


def test_all_mistakes_at_once(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "description: A small", "descripton: A small")
    tiny.replace("matrix.yaml", "platforms: [linux/amd64]", "platforms: []")
    tiny.component("tool", TOOL + "cheks: []\n")
    lines = complaint(tiny).splitlines()
    assert len(lines) == 4
    assert any("cheks: unknown key; did you mean 'checks'?" in line for line in lines)


def test_a_missing_file_is_said(tiny: Files) -> None:
    (tiny.root / "matrix.yaml").unlink()
    assert "matrix.yaml: cannot be read" in complaint(tiny)


def test_a_lock_that_is_cut_short(tiny: Files) -> None:
    tiny.write("imagebuild.lock", '{"wheels": {')
    assert "imagebuild.lock:1: not JSON" in complaint(tiny)
