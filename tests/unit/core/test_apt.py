from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from imagebuild.build import private
from imagebuild.build.private import install
from imagebuild.core import debian
from imagebuild.core.debian import (
    AptSource,
    apt_sources,
    as_oneline,
    debian_sources,
    parse_deb822,
    parse_oneline,
    sources_for_release,
)
from imagebuild.core.errors import CommandError
from tests.conftest import ROOT
from tests.unit.conftest import Runner

KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"
MAIN = "http://archive.example.org/debian"
SECURITY = "http://archive.example.org/debian-security"
DEB822, ONE_LINE = ((ROOT / f"tests/data/apt/{name}").read_text() for name in ("debian.sources", "sources.list"))


@dataclass
class Machine:
    """A machine with an /etc/apt of its own: Debian 12 with its archive."""

    etc: Path
    release: dict[str, str] = field(default_factory=dict)

    def become(self, name: str, version: str, codename: str) -> None:
        self.release |= {"ID": name, "VERSION_ID": version, "VERSION_CODENAME": codename}

    def listing(self, name: str) -> Path:
        return self.etc / "sources.list.d" / name


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    for folder in ("sources.list.d", "preferences.d"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(debian, "ETC", tmp_path)
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: made.release)
    monkeypatch.setattr(private, "POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")
    made.become("debian", "12", "bookworm")
    made.listing("debian.sources").write_text(DEB822)
    return made


def test_both_formats_of_sources() -> None:
    found = parse_deb822(DEB822)
    assert [(s.uri, s.suite) for s in found] == [
        (MAIN, "bookworm"), (MAIN, "bookworm-updates"), (MAIN, "bookworm-backports"),
        (f"{SECURITY}/", "bookworm-security"),
    ]  # fmt: skip
    assert (found[0].components, found[0].signed_by) == (("main", "contrib"), KEY)
    assert "abc" in (found[3].signed_by or "")
    plain = (AptSource(MAIN, "bookworm", ("main", "contrib"), KEY), AptSource(SECURITY, "bookworm-security", ("main",)))
    assert parse_oneline(ONE_LINE) == plain == parse_oneline(as_oneline(plain))
    assert "PGP" not in as_oneline(found)


def test_sources_are_read_from_every_file_and_of_mirrors_the_first(here: Machine) -> None:
    (here.etc / "sources.list").write_text(ONE_LINE)
    here.listing("same.list").write_text(ONE_LINE)
    here.listing("off.list.disabled").write_text("deb http://disabled.example.org bookworm main\n")
    (here.etc / "mirrors").write_text("# ours\nhttp://first.example.org\tpriority:1\nhttp://second.example.org\n")
    here.listing("cloud.list").write_text(f"deb mirror+file://{here.etc}/mirrors bookworm main\n")
    found = apt_sources()
    assert len(found) == 6  # bookworm main is in both files
    assert AptSource("http://first.example.org", "bookworm", ("main",)) in found
    assert not any("disabled" in s.uri for s in found)


def test_for_release_translates_the_archive_and_ignores_third_parties() -> None:
    others = (
        AptSource("http://vendor.example.org", "bookworm", ("stable",)),
        AptSource("http://vendor2.example.org", "bookworm", ("main",), "/etc/apt/keyrings/vendor2.gpg"),
        AptSource("http://vendor3.example.org", "bookworm-pgdg", ("main",)),
    )
    assert sources_for_release((*others, *parse_oneline(ONE_LINE)), "bookworm", "trixie") == (
        AptSource(MAIN, "trixie", ("main", "contrib"), KEY),
        AptSource(SECURITY, "trixie-security", ("main",)),
    )
    # A key of the site that signs the updates, too, is that of the distribution's mirror.
    mirror = [AptSource(MAIN, s, ("main",), "/etc/inhouse.gpg") for s in ("bookworm", "bookworm-updates")]
    assert [s.suite for s in sources_for_release(mirror, "bookworm", "trixie")] == ["trixie", "trixie-updates"]


def test_debian_lines(here: Machine) -> None:
    assert as_oneline(debian_sources()).splitlines() == [
        f"deb [signed-by={KEY}] {MAIN} trixie main",
        f"deb [signed-by={KEY}] {MAIN} trixie-updates main",
        f"deb {SECURITY}/ trixie-security main",
    ]
    here.become("ubuntu", "24.04", "noble")
    assert debian_sources() == ()
    here.release.clear()
    assert debian_sources() == ()


@pytest.mark.parametrize("configured", [False, True])
def test_debian_12_takes_the_engine_from_the_next_release_and_nothing_else(here: Machine, configured: bool) -> None:
    if configured:
        here.listing("next.list").write_text(f"deb [signed-by={KEY}] {MAIN} trixie main\n")
    run = Runner({"apt-get": ""})
    install(["docker.io", "iptables"], run)
    (installed,) = run.of("apt-get install")
    assert installed.endswith(" --no-remove --no-install-recommends docker.io/trixie iptables")
    own = here.listing("imagebuild-trixie.list")
    assert own.exists() is not configured, "a second entry"
    if not configured:
        suites = [source.suite for source in parse_oneline(own.read_text())]
        assert suites == ["trixie", "trixie-updates", "trixie-security"]
        assert "Pin-Priority: 50" in (here.etc / "preferences.d" / "imagebuild-trixie").read_text()


@pytest.mark.parametrize(
    ("machine", "message"),
    [(("fedora", "41", ""), r"install by hand: docker\.io"), (("debian", "12", "bookworm"), "no archive of bookworm")],
)
def test_what_cannot_be_installed(here: Machine, machine: tuple[str, str, str], message: str) -> None:
    here.become(*machine)
    here.listing("debian.sources").unlink()
    run = Runner({"apt-get": ""})
    with pytest.raises(CommandError, match=message):
        install(["docker.io"], run)
    assert not run.calls


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_services_are_held_during_the_installation_by_us_or_the_machines_own_policy(
    here: Machine, own: bool, fails: bool
) -> None:
    here.become("debian", "13", "trixie")
    if own:
        private.POLICY.write_text("exit 104\n")
    held: list[str] = []

    def work() -> str:
        held.append(private.POLICY.read_text())
        if fails:
            raise CommandError("broken")
        return ""

    with suppress(CommandError):
        install(["iproute2"], Runner({"apt-get": work}))
    assert held[-1].endswith("exit 104\n" if own else "exit 101\n")
    assert private.POLICY.exists() == own
