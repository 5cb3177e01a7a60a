"""The machine's own package archive: where it is, what its next release offers, how packages get installed.

Reading and translating apt's sources is pure; `sources`, `machine` and `install` are the edges. No archive
address is written in this file: every one is derived from the sources that the machine already trusts.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from imagebuild.errors import CommandError

Run = Callable[..., str]
"""Runs a program (`run("ip", "-j", "route")`), returns what it printed, raises CommandError if it fails."""

ETC = Path("/etc/apt")
OS_RELEASE = Path("/etc/os-release")
POLICY = Path("/usr/sbin/policy-rc.d")
UNITS = [Path("/usr/lib/systemd/system") / n for n in ("docker.service", "docker.socket", "containerd.service")]

# Debian 12 is the one release whose own engine is too old while the next release's packages install on it.
NEXT = {"bookworm": "trixie"}
FROM_NEXT = frozenset({"docker.io", "docker-cli", "docker-buildx", "qemu-user-static", "cosign"})

MINIMUM = {"docker.io": (26, 0), "docker-buildx": (0, 13)}
"""Docker Engine 26 is the first that embeds BuildKit 0.13 (25 has 0.12)."""

# 101 means "not allowed" and 104 "allowed" to both invoke-rc.d and deb-systemd-invoke.
HOLD_SERVICES = '#!/bin/sh\ncase "$1" in docker*|containerd*) exit 101 ;; esac\nexit 104\n'


@dataclass(frozen=True)
class Source:
    """One suite of one archive. `signed_by` is a keyring's path, or the key itself, or nothing."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str | None = None


@dataclass(frozen=True)
class Machine:
    """Which distribution this is; fields are empty where /etc/os-release does not say."""

    id: str
    version: str
    codename: str


def parse_os_release(text: str) -> Machine:
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    field = {key.strip(): value.strip().strip("\"'") for key, value in pairs}
    return Machine(field.get("ID", ""), field.get("VERSION_ID", ""), field.get("VERSION_CODENAME", ""))


def machine() -> Machine:
    return parse_os_release(OS_RELEASE.read_text() if OS_RELEASE.exists() else "")


def _stanzas(text: str) -> Iterator[dict[str, str]]:
    fields: dict[str, str] = {}
    name = ""
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):  # even in the middle of a field, where it does not end the field
            continue
        if not line.strip():
            if fields:
                yield fields
            fields, name = {}, ""
        elif line[0].isspace():
            fields[name] = f"{fields.get(name, '')}\n{line.strip()}"
        elif ":" in line:
            name, value = line.split(":", 1)
            name = name.strip().lower()
            fields[name] = value.strip()


def parse_deb822(text: str) -> tuple[Source, ...]:
    """The enabled binary sources of a `*.sources` file."""
    return tuple(
        Source(
            uri,
            suite,
            tuple(stanza.get("components", "").split()),
            stanza.get("signed-by", "").strip() or None,
        )
        for stanza in _stanzas(text)
        if "deb" in stanza.get("types", "").split() and stanza.get("enabled", "yes").lower() != "no"
        for uri in stanza.get("uris", "").split()
        for suite in stanza.get("suites", "").split()
    )


_ONE_LINE = re.compile(r"^\s*deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?P<components>.*)$")


def parse_oneline(text: str) -> tuple[Source, ...]:
    """The binary sources of a `*.list` file; an installation medium (`cdrom:`) is not an archive."""
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.match(line.split("#", 1)[0])
        if match and not match["uri"].startswith("cdrom:"):
            keyring = re.search(r"signed-by=(\S+)", match["options"] or "")
            components = tuple(match["components"].split())
            found.append(Source(match["uri"], match["suite"], components, keyring[1] if keyring else None))
    return tuple(found)


def _behind_mirror_list(source: Source) -> Source:
    """`mirror+file:/list` names a file of addresses: cloud images use it, other tools do not know it."""
    listing = Path(source.uri.removeprefix("mirror+file:").replace("///", "/"))
    if not source.uri.startswith("mirror+file:") or not listing.is_file():
        return source
    lines = [line.split()[0] for line in listing.read_text().splitlines() if line.strip() and line[0] != "#"]
    return replace(source, uri=lines[0]) if lines else source


def sources(paths: Iterable[Path] | None = None) -> tuple[Source, ...]:
    """Every source apt would read, one entry per suite; of `paths`, or of /etc/apt."""
    if paths is None:
        parts = ETC / "sources.list.d"
        paths = [ETC / "sources.list", *sorted(parts.glob("*.list")), *sorted(parts.glob("*.sources"))]
    found: list[Source] = []
    for path in filter(Path.is_file, paths):
        parse = parse_deb822 if path.suffix == ".sources" else parse_oneline
        found.extend(map(_behind_mirror_list, parse(path.read_text())))
    return tuple(dict.fromkeys(found))


def for_release(found: Iterable[Source], codename_from: str, codename_to: str) -> tuple[Source, ...]:
    """The distribution's own archive among `found`, with the suites of another release, without backports.

    Third parties may use a release's name as a suite too (`bookworm main`). What tells them apart is that the
    archive is signed with the distribution's key: the one of its -updates or -security, or apt's default.
    """
    translated = {codename_from + part: codename_to + part for part in ("", "-updates", "-security")}
    own = [s for s in found if s.suite in translated and "main" in s.components]
    keys = {s.signed_by for s in own if s.suite != codename_from} | {None}
    archive = [s for s in own if s.signed_by in keys or "-archive-" in Path(s.signed_by or "").name]
    return tuple(dict.fromkeys(replace(s, suite=translated[s.suite]) for s in archive))


def as_deb822(wanted: Iterable[Source]) -> str:
    """The text of a `*.sources` file."""
    stanzas = []
    for source in wanted:
        lines = ["Types: deb", f"URIs: {source.uri}", f"Suites: {source.suite}"]
        lines.append(f"Components: {' '.join(source.components)}")
        if source.signed_by:
            lines.append("Signed-By: " + source.signed_by.replace("\n", "\n "))
        stanzas.append("\n".join(lines) + "\n")
    return "\n".join(stanzas)


def as_oneline(wanted: Iterable[Source]) -> str:
    """The text of a `*.list` file; a key given in full has no place there, so apt's keyring is used."""
    lines = []
    for source in wanted:
        keyring = source.signed_by if source.signed_by and "\n" not in source.signed_by else None
        option = f"[signed-by={keyring}] " if keyring else ""
        lines.append(f"deb {option}{source.uri} {source.suite} {' '.join(source.components)}\n")
    return "".join(lines)


def debian_lines(release: str = "trixie") -> list[str]:
    """One-line sources of a Debian `release` in this machine's archive; [] if the machine is not Debian."""
    here = machine()
    if here.id != "debian" or not here.codename:
        return []
    found = for_release(sources(), here.codename, release)
    return as_oneline(replace(source, components=("main",)) for source in found).splitlines()


def numbers(text: str) -> tuple[int, ...]:
    """The first version in `text` as numbers: `1:26.1.5+dfsg1` is (26, 1, 5); () if there is none."""
    match = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def candidate(package: str, run: Run) -> str:
    """The version apt would install, or "" if it knows none."""
    match = re.search(r"^\s*Candidate: (?!\(none\))(\S+)", run("apt-cache", "policy", package), re.MULTILINE)
    return match[1] if match else ""


@contextmanager
def _services_held(run: Run) -> Iterator[None]:
    """Keep a container service that a package brings from starting, now (by policy) and at the next boot.

    It would be a second engine, on docker0. A service that was there before stays as it is, and a machine
    that has a policy of its own (container images do) keeps that.
    """
    ours = not POLICY.exists()
    before = {unit for unit in UNITS if unit.exists()}
    if ours:
        POLICY.write_text(HOLD_SERVICES)
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)
        for unit in UNITS:
            if unit.exists() and unit not in before and shutil.which("systemctl"):
                run("systemctl", "disable", "--quiet", unit.name)


def _add_next_release(release: str, codename: str, run: Run) -> None:
    """Make `release` known to apt, at a priority so low that nothing comes from it unless named."""
    found = sources()
    wanted = for_release(found, codename, release)
    if not wanted:
        raise CommandError(f"no archive of {codename} is among apt's sources in {ETC}; add the distribution's own")
    listing = ETC / "sources.list.d" / f"imagebuild-{release}.sources"
    if not listing.exists() and any(s.suite == release for s in found):
        return _refresh(("docker.io",), run)  # the owner of this machine added it, and decides on priorities
    pin = f"Package: *\nPin: release n={release}*\nPin-Priority: 50\n"
    for path, text in ((ETC / "preferences.d" / f"imagebuild-{release}", pin), (listing, as_deb822(wanted))):
        path.write_text(text)
        path.chmod(0o644)  # apt's tools also run for users, whatever root's umask is
    if not candidate("iptables", run):  # an index was never fetched here, and dependencies come from it
        return _refresh(("iptables",), run)
    only = (f"Dir::Etc::SourceList={listing}", "Dir::Etc::SourceParts=-", "APT::Get::List-Cleanup=0")
    run("apt-get", "update", *(word for option in only for word in ("-o", option)))
    return None


def _refresh(packages: Iterable[str], run: Run) -> None:
    """Fetch every index. A third party's broken one is no obstacle as long as `packages` are known."""
    try:
        run("apt-get", "update")
    except CommandError:
        if not all(candidate(package, run) for package in packages):
            raise


def _available(packages: Sequence[str], run: Run) -> list[str]:
    """`packages` as the machine's own release has them; raises CommandError if one is too old."""
    _refresh(packages, run)
    version = {package: candidate(package, run) for package in packages}
    for package, least in MINIMUM.items():
        if package in version and numbers(version[package]) < least:
            offer = version[package] or "missing"
            raise CommandError(
                f"{package} is {offer} in this distribution, {'.'.join(map(str, least))} or newer is needed; "
                "install Docker with its buildx plug-in from another source, and imagebuild will use it"
            )
    # Where no docker-cli exists (Ubuntu), docker.io contains the client.
    return [package for package in packages if version[package] or package != "docker-cli"]


def install(packages: Sequence[str], run: Run) -> None:
    """Install `packages` without starting a service, removing a package or touching other versions.

    Raises CommandError if the distribution is not Debian 12+ or Ubuntu, has them too old, or apt fails.
    """
    here = machine()
    old = here.id == "debian" and here.version.isdigit() and int(here.version) < 12
    if here.id not in ("debian", "ubuntu") or old:
        what = " ".join(packages)
        raise CommandError(f"packages are installed on Debian 12+ and Ubuntu only; install by hand: {what}")
    later = NEXT.get(here.codename) if here.id == "debian" and FROM_NEXT.intersection(packages) else None
    if later:
        _add_next_release(later, here.codename, run)
        wanted = [f"{package}/{later}" if package in FROM_NEXT else package for package in packages]
    else:
        wanted = _available(packages, run)
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    with _services_held(run):
        run("apt-get", "install", "--yes", "--no-remove", "--no-install-recommends", *wanted, env=quiet)
