"""What sources need from the lock."""

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.project.lockfile import (
    UNREAD,
    Archive,
    BaseImage,
    GitRef,
    Source,
    WheelSet,
    check_pinned,
    lacks,
)
from tests.unit.lock.lock_fakes import ENTRIES, lock_of, packages, wheel

PYTHON = {
    ("wheels", f"python 3.13 {wanted}"): (wheel("x", "1"), wheel("z", "1")) for wanted in ("x==1 without y", "x[z]==2")
}
LOCK = lock_of({**ENTRIES, **PYTHON})


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (Archive("x", "https://example.org/a.tar"), ""),
        (Archive("x", "https://example.org/b.tar"), "not in the lock"),
        (GitRef("https://example.org/g.git", "v1"), ""),
        (GitRef("https://example.org/g.git", "v3"), "not in the lock"),
        (GitRef("https://example.org/g.git", "v3", "3" * 40), ""),
        (BaseImage("debian:13"), ""),
        (BaseImage("debian:13", facts=True), UNREAD),
        (packages("a", "b=2"), ""),
        (packages("a", "b=3", "c"), "no version of b=3, c"),
        (WheelSet("cuda", "13.0", ("nvidia_nvcc==13.0.*",)), ""),
        (WheelSet("cuda", "13.0", ("nvidia-nvcc==13.1.*",)), "the pinned wheels do not fulfil nvidia-nvcc==13.1.*"),
        (
            WheelSet("cuda", "13.0", ("nvidia-nvcc==13.0.*", "x")),
            "the pinned wheels do not fulfil nvidia-nvcc==13.0.*, x",
        ),
        (WheelSet("python", "3.13", ("x==1",), "3.13", ("y",)), ""),
        (WheelSet("python", "3.13", ("x==1",), "3.13"), "not in the lock"),
        (WheelSet("python", "3.13", ("x[z]==2",), "3.13"), "the pinned wheels do not fulfil x[z]==2"),
    ],
)
def test_what_the_lock_lacks(source: Source, answer: str) -> None:
    assert lacks(LOCK, source) == answer
    if answer:
        with pytest.raises(ConfigError, match="imagebuild.lock: 1 of 2 sources have no pin.*`imagebuild lock x`") as no:
            check_pinned(LOCK, [source, GitRef("https://example.org/g.git", "v1"), source], "imagebuild lock x")
        assert str(no.value).endswith(f": {answer}")
    else:
        check_pinned(LOCK, [source])


@pytest.mark.parametrize(
    "text",
    [
        "nvidia-nvcc=13", "x @ file:///src/x", "x @ git+https://example.org/x", "./x", "-e./x", "-r x", "--help", "x.zip",
        "x.tar.gz[y]", "x==1+a.zip", "x===1.WHL ; python_version > '3'", "x===1/y", "x\n./y", "https://example.org/x.whl",
    ],
)  # fmt: skip
def test_only_packages_of_the_index_are_wheels(text: str) -> None:
    """pip would run the code of anything else, to find out its version."""
    with pytest.raises(ConfigError, match="component cuda: wheels: "):
        WheelSet("cuda", "13.0", (text,))


@pytest.mark.parametrize(
    ("name", "version"), [("./x", "1"), ("x", "1+a.zip"), ("x @ file:///x.zip", "1"), ("x\ny", "1")]
)
def test_only_packages_of_the_index_are_pinned(name: str, version: str) -> None:
    with pytest.raises(ValueError, match="Wheel"):
        wheel(name, version)
