"""Rules about files: what no layer may hold, and modes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from imagebuild.inspection import secrets
from imagebuild.inspection.context import Inspection
from imagebuild.inspection.facts import Entry, Finding

KEY_NAME = re.compile(r"(^|/)(ssh_host_\w+_key|\.ssh/id_\w+)$")
SECRET_NAME = re.compile(
    r"""(^|/)(\.netrc | \.pgpass | \.pypirc | \.git-credentials | \.docker/config\.json | \.aws/credentials
    | \.kube/config | \.config/(gh/hosts\.yml | gcloud/.*credentials.*) | \.cache/huggingface/token
    | \.(bash|zsh|python|sh)_history)$ | ^run/secrets/. | ^kaniko/""",
    re.VERBOSE,
)
"""Files that hold secrets by their purpose."""
LEFTOVERS = (
    (re.compile(r"^var/lib/apt/lists/(?!lock$).*[^/]$"), "a package list of apt"),
    (re.compile(r"^var/cache/apt/(.*\.deb|(src)?pkgcache\.bin)$"), "a cache of apt"),
    (re.compile(r"^var/cache/(yum|dnf|libdnf5|zypp|apk|pacman)/."), "a cache of the package manager"),
    (re.compile(r"^lib/apk/db/.*APKINDEX|^var/lib/(yum|dnf)/repos/"), "a package list"),
    (re.compile(r"(^|/)\.cache/(pip|uv|pypoetry|conda|ccache|go-build|npm|yarn)/."), "a cache of what built it"),
    (re.compile(r"(^|/)\.(npm/_cacache|cargo/registry|conda/pkgs)/."), "a cache of what built it"),
    (re.compile(r"^(var/)?tmp/."), "a temporary file"),
)
ANCHORS = re.compile(
    r"^(usr/local/share/ca-certificates|etc/pki/ca-trust/source/anchors|usr/share/pki/trust/anchors|etc/ca-certificates/trust-source/anchors)/."
)
"""Where sites put certificates of their own."""
TRUSTED = re.compile(r"^usr/share/(ca-certificates|pki/ca-trust-source)/")
"""Where distributions keep what they trust."""
SITE = re.compile(r"^(etc|root|home|tmp|run|srv|usr/local/share|usr/local/etc)/")
"""Where certificates are a site's, unless the distribution has them; elsewhere packages have test data."""
BY_DISTRIBUTION = re.compile(r"^(etc/ssl/certs/ssl-cert-snakeoil\.pem)$")
SETUID = frozenset(
    f"usr/{folder}/{name}"
    for folder in ("bin", "sbin", "lib", "libexec")
    for name in (
        "chage", "chfn", "chsh", "crontab", "dbus-1.0/dbus-daemon-launch-helper", "dbus-daemon-launch-helper",
        "expiry", "fusermount", "fusermount3", "gpasswd", "grub2-set-bootflag", "mount", "newgrp",
        "openssh/ssh-keysign", "pam_extrausers_chkpwd", "pam_timestamp_check", "passwd", "pkexec",
        "polkit-1/polkit-agent-helper-1", "ssh-agent", "ssh-keysign", "su", "sudo", "umount", "unix_chkpwd",
        "utempter/utempter", "wall", "write",
    )
)  # fmt: skip
"""Programs that distributions install setuid or setgid."""
CAPABLE = frozenset({"usr/bin/ping", "usr/bin/newgidmap", "usr/bin/newuidmap", "usr/bin/arping", "usr/bin/clockdiff"})
"""Programs that distributions give capabilities."""


def no_keys(about: Inspection) -> Iterator[Finding]:
    for entry in _contents(about):
        if KEY_NAME.search(entry.path):
            yield _in_layer(entry, "is a private key of ssh")
        elif found := [kind for kind in entry.secrets if "private key" in kind]:
            yield _in_layer(entry, f"holds a {found[0]}")


def no_tokens(about: Inspection) -> Iterator[Finding]:
    for entry in _contents(about):
        if SECRET_NAME.search(entry.path):
            yield _in_layer(entry, "is a file for secrets")
        for kind in entry.secrets:
            if "private key" not in kind:
                yield _in_layer(entry, f"holds what looks like a {kind}")
    for place, text in _settings(about):
        for kind in sorted(secrets.in_text(text)):
            yield Finding(place, f"holds what looks like a {kind}")
        if secrets.CREDENTIALS.search(text):
            yield Finding(place, "holds an address with a password")


def _settings(about: Inspection) -> Iterator[tuple[str, bytes]]:
    """What the configuration says: commands with build arguments are in its history."""
    config = about.image.config
    yield from ((f"environment {name}", value.encode()) for name, value in about.image.env.items())
    yield from ((f"label {name}", str(value).encode()) for name, value in about.image.labels.items())
    for number, step in enumerate(config.get("history") or (), 1):
        yield f"history, step {number}", str(step.get("created_by", "")).encode()


def no_site_ca(about: Inspection) -> Iterator[Finding]:
    trusted = {c for entry in about.files() if TRUSTED.search(entry.path) for c in entry.certificates}
    for entry in _contents(about):
        if ANCHORS.search(entry.path):
            yield _in_layer(entry, "is a certificate that a site trusts")
        elif (
            SITE.search(entry.path)
            and not BY_DISTRIBUTION.search(entry.path)
            and (others := len(set(entry.certificates) - trusted))
        ):
            yield _in_layer(entry, f"holds {others} certificates that the distribution does not have")


def no_leftovers(about: Inspection) -> Iterator[Finding]:
    for entry in _contents(about):
        if kind := next((kind for pattern, kind in LEFTOVERS if pattern.search(entry.path)), None):
            yield _in_layer(entry, f"is {kind}")


def not_world_writable(about: Inspection) -> Iterator[Finding]:
    for entry in about.tree:
        sticky = entry.kind == "folder" and entry.mode & 0o1000
        if entry.kind in ("file", "folder", "hardlink") and entry.mode & 0o002 and not sticky:
            yield Finding(f"/{entry.path}", f"everybody can write to it (mode {entry.mode:o})")


def setuid(about: Inspection) -> Iterator[Finding]:
    for entry in about.tree:
        if entry.kind not in ("file", "hardlink"):
            continue
        place = re.sub(r"^(s?bin|lib)/", r"usr/\1/", entry.path)
        if entry.mode & 0o6000 and place not in SETUID:
            yield Finding(f"/{entry.path}", f"runs with the rights of its owner or group (mode {entry.mode:o})")
        elif entry.capabilities and place not in CAPABLE | SETUID:
            yield Finding(f"/{entry.path}", "runs with capabilities of the kernel")


def _contents(about: Inspection) -> Iterable[Entry]:
    return (e for e in about.files() if e.kind in ("file", "hardlink") and "/.wh." not in f"/{e.path}")


def _in_layer(entry: Entry, text: str) -> Finding:
    return Finding(f"/{entry.path}", f"{text}, in layer {entry.layer + 1}")
