import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from imagebuild.build import install, private
from imagebuild.core import (
    AptSource,
    CommandError,
    apt_sources,
    as_deb822,
    as_oneline,
    debian,
    debian_sources,
    parse_deb822,
    parse_oneline,
    sources_for_release,
    version_numbers,
)
from tests.unit.conftest import Runner

KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"
MAIN = "http://archive.example.org/debian"
SECURITY = "http://archive.example.org/debian-security"

DEB822 = f"""\
# the archive
Types: deb deb-src
# http://snapshot.example.org/debian
URIs: {MAIN}
Suites: bookworm bookworm-updates bookworm-backports
Components: main
# a comment between a field
 contrib
Signed-By: {KEY}

Types: deb
URIs: {SECURITY}/
Suites: bookworm-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://off.example.org
Suites: bookworm
Components: main
Enabled: no

Types: deb-src
URIs: http://source.example.org
Suites: bookworm
Components: main
"""

ONE_LINE = f"""\
# deb http://commented.example.org bookworm main
deb [arch=amd64 signed-by={KEY}] {MAIN} bookworm main contrib # a remark
deb-src {MAIN} bookworm main
deb {SECURITY} bookworm-security main
deb cdrom:[Debian 12]/ bookworm main
"""


class Apt(Runner):
    """Answers `apt-cache policy` from a table of candidates; of what begins with `fails`, apt is broken.

    `meanwhile` is called with each program.
    """

    def __init__(
        self, candidates: Mapping[str, str] | None = None, fails: str = "", meanwhile: Callable[[str], object] = str
    ) -> None:
        policies = {name: f"{name}:\n  Candidate: {version}\n" for name, version in (candidates or {}).items()}
        super().__init__({f"apt-cache policy {name}": text for name, text in policies.items()} | {"": ""})
        self.fails, self.meanwhile = fails, meanwhile

    def __call__(self, *argv: str, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
        self.meanwhile(argv[1])
        if self.fails and " ".join(argv).startswith(self.fails):
            raise CommandError(f"`{' '.join(argv)}` failed (100): broken")
        return super().__call__(*argv)


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
    monkeypatch.setattr(private, "UNITS", [tmp_path / "docker.service"])
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
    assert parse_deb822(as_deb822(found)) == found
    assert "PGP" not in as_oneline(found)


def test_sources_reads_every_file_and_drops_repetitions(here: Machine) -> None:
    (here.etc / "sources.list").write_text(ONE_LINE)
    here.listing("same.list").write_text(ONE_LINE)
    here.listing("off.list.disabled").write_text("deb http://disabled.example.org bookworm main\n")
    found = apt_sources()
    assert len(found) == 5  # bookworm main is in both files
    assert not any("disabled" in s.uri for s in found)


def test_a_mirror_list_is_replaced_by_its_first_address(tmp_path: Path) -> None:
    (tmp_path / "mirrors").write_text(f"# ours\n{MAIN}\tpriority:1\nhttp://second.example.org\n")
    listing = tmp_path / "cloud.list"
    listing.write_text(f"deb mirror+file://{tmp_path}/mirrors bookworm main\n")
    assert apt_sources([listing]) == (AptSource(MAIN, "bookworm", ("main",)),)


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("26.1.5+dfsg1-9+deb13u1", (26, 1, 5)),
        ("1:10.0.13+ds-0", (10, 0, 13)),
        ("Docker version 28.2.2, build e6534b4", (28, 2, 2)),
        ("(none)", ()),
    ],
)
def test_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert version_numbers(text) == expected


@pytest.mark.parametrize("configured", [False, True])
def test_debian_12_takes_the_engine_from_the_next_release_and_nothing_else(here: Machine, configured: bool) -> None:
    if configured:
        here.listing("next.list").write_text(f"deb [signed-by={KEY}] {MAIN} trixie main\n")
    run = Apt({"iptables": "1.8.9-2"})
    install(["docker.io", "iptables"], run)
    (installed,) = run.of("apt-get install")
    assert installed.endswith(" --no-remove --no-install-recommends docker.io/trixie iptables")
    own = here.listing("imagebuild-trixie.sources")
    assert own.exists() is not configured, "a second entry"
    if not configured:
        suites = [source.suite for source in parse_deb822(own.read_text())]
        assert suites == ["trixie", "trixie-updates", "trixie-security"]
        assert "Pin-Priority: 50" in (here.etc / "preferences.d" / "imagebuild-trixie").read_text()


def test_ubuntu_uses_its_own_archive_where_the_client_is_part_of_the_engine(here: Machine) -> None:
    here.become("ubuntu", "24.04", "noble")
    run = Apt({"docker.io": "28.2.2-0ubuntu1", "docker-buildx": "0.21.3-0ubuntu1"})
    install(["docker.io", "docker-cli", "docker-buildx"], run)
    assert run.of("apt-get install")[0].endswith("-recommends docker.io docker-buildx")


@pytest.mark.parametrize(
    ("machine", "known", "message"),
    [
        (("ubuntu", "22.04", "jammy"), {"docker.io": "24.0.7-0ubuntu2"}, r"docker\.io is 24\.0\.7.*26\.0 or newer"),
        (("debian", "13", "trixie"), {}, r"docker\.io is missing in this distribution"),
        (("fedora", "41", ""), {}, r"install by hand: docker\.io"),
        (("debian", "11", "bullseye"), {}, r"install by hand: docker\.io"),
        (("debian", "12", "bookworm"), {}, "no archive of bookworm"),
    ],
)
def test_what_cannot_be_installed(
    here: Machine, machine: tuple[str, str, str], known: dict[str, str], message: str
) -> None:
    here.become(*machine)
    here.listing("debian.sources").unlink()
    run = Apt(known)
    with pytest.raises(CommandError, match=message):
        install(["docker.io"], run)
    assert not run.of("apt-get install")


@pytest.fixture
def trixie(here: Machine) -> Machine:
    here.become("debian", "13", "trixie")
    return here


def test_a_broken_third_party_source_is_no_obstacle(trixie: Machine) -> None:
    run = Apt({"docker.io": "26.1.5"}, fails="apt-get update")
    install(["docker.io"], run)
    assert run.of("apt-get install")
    with pytest.raises(CommandError, match="broken"):
        install(["docker.io"], Apt(fails="apt-get update"))


@pytest.mark.parametrize("fails", ["", "apt-get install"])
def test_services_are_held_only_during_the_installation(trixie: Machine, fails: str) -> None:
    held: dict[str, bool] = {}
    run = Apt({"iproute2": "6.1"}, fails, lambda word: held.update({word: private.POLICY.exists()}))
    with suppress(CommandError):
        install(["iproute2"], run)
    assert held["install"]
    assert not private.POLICY.exists()
    private.POLICY.write_text("exit 104\n")  # the machine's own is kept
    with suppress(CommandError):
        install(["iproute2"], run)
    assert private.POLICY.read_text() == "exit 104\n"


def test_a_service_that_came_with_a_package_is_disabled_an_older_one_is_not(trixie: Machine) -> None:
    def come(word: str) -> None:
        if word == "install":
            private.UNITS[0].touch()

    for called in (["systemctl disable --quiet docker.service"], []):
        run = Apt({"docker.io": "26.1.5"}, meanwhile=come)
        install(["docker.io"], run)
        assert run.of("systemctl") == called


def test_two_that_install_do_so_in_turn(trixie: Machine) -> None:
    at_work: list[str] = []

    def work(_: str) -> None:
        at_work.append(threading.current_thread().name)
        time.sleep(0.01)

    run = Apt({"iproute2": "6.1"}, meanwhile=work)
    threads = [threading.Thread(target=install, args=(["iproute2"], run), name=name) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_work in (["a"] * 3 + ["b"] * 3, ["b"] * 3 + ["a"] * 3)
