"""The apt-get of steps, run with folders in place of the image's, and a program that shows how it was called."""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copytree

import pytest

from imagebuild.build.inputs import apt_get_for_mirrors, apt_get_for_proxy
from tests.conftest import ROOT, ran

pytestmark = pytest.mark.programs


class Image:
    """A file system with apt's configuration, and an apt-get that prints it."""

    def __init__(self, root: Path) -> None:
        self.root = copytree(ROOT / "tests/data/apt/image", root, dirs_exist_ok=True)
        for folder in ("shm", "lists", "archives"):
            (root / folder).mkdir()

    def run(self, script: str, *words: str) -> str:
        places = {"/usr/bin/apt-get": "apt-get", "/dev/shm": "shm", "/etc/apt": "etc/apt"}
        places |= {"/var/lib/apt/lists": "lists", "/var/cache/apt/archives": "archives"}
        pattern = "|".join(map(re.escape, places))
        script = re.sub(pattern, lambda found: str(self.root / places[found[0]]), script)
        done = ran("sh", "-c", script, "apt-get", *words)
        assert (done.returncode, done.stderr) == (7, "")
        assert not list((self.root / "shm").iterdir())
        return done.stdout.replace(str(self.root), "")


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def test_addresses_become_those_of_mirrors(image: Image) -> None:
    mirrors = {
        "https://archive.example/": "http://10.0.0.1:8080/a/",
        "http://archive.example/debian-security/": "http://10.0.0.2/s/",
        "https://packages.example/": "https://mirror.site/p&q/",
    }
    shown = image.run(apt_get_for_mirrors(mirrors), "install", "-y", "x=1")
    assert "deb http://10.0.0.1:8080/a/debian/ trixie main" in shown
    assert "URIs: http://10.0.0.2/s/" in shown.splitlines()
    assert "deb [signed-by=/k.gpg] https://mirror.site/p&q/cuda/ /" in shown
    assert "deb http://other.example/ x y" in shown
    assert "Pin: origin mirror.site" in shown
    assert shown.splitlines()[-1].endswith("install -y x=1")


def test_a_rule_does_not_see_what_another_wrote_and_passwords_are_in_no_argument(image: Image) -> None:
    mirrors = {"http://archive.example/": "http://packages.example/x/", "https://packages.example/": "http://m.site/"}
    shown = image.run(apt_get_for_mirrors(mirrors, "machine m.site login me password geheim\n"), "update")
    netrc, _, called = shown.partition("called:")
    assert "deb http://packages.example/x/debian/ trixie main" in netrc
    assert "machine m.site login me password geheim" in netrc
    assert "geheim" not in called


@pytest.mark.parametrize(
    ("recording", "command", "left"),
    [
        (True, "update", []),
        (False, "update", ["archives/x.deb"]),
        (True, "install", ["archives/x.deb", "lists/x_Packages"]),
    ],
)
def test_all_goes_through_a_bundle_s_proxy_and_what_is_cached_hides_nothing(
    image: Image, recording: bool, command: str, left: list[str]
) -> None:
    for name in ("archives/x.deb", "lists/x_Packages"):
        (image.root / name).write_text("")
    shown = image.run(apt_get_for_proxy("http://10.0.0.1:99", recording=recording), "-qq", command)
    assert "deb [signed-by=/k.gpg] http://packages.example:443/cuda/ /" in shown
    assert "Pin: origin packages.example" in shown
    assert "-o Acquire::http::Proxy=http://10.0.0.1:99" in shown
    assert ("Check-Valid-Until" in shown) is not recording
    assert [f for f in ("archives/x.deb", "lists/x_Packages") if (image.root / f).exists()] == left
