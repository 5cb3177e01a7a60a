"""What one copy or one network card can reach: the tests of nvbandwidth, p2pBandwidthLatencyTest and perftest. Pure."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from imagebuild.judgement import Limit
from imagebuild.profiles import Copy, Measured, Profile, Wire

GBIT = {"MB/sec": 2**20 * 8 / 1e9, "MiB/sec": 2**20 * 8 / 1e9, "Gb/sec": 1.0}
"""Unit that perftest prints → Gb/s. What it calls MB is 2^20 bytes."""

_PATHS = (
    (r"latency|local_copy|p2p_disabled|connectivity", None, 0),
    (r"device_to_device_bidirectional\w*_(read|write)[12]$", "link", 1),
    (r"device_to_device_bidirectional|^bidirectional_p2p_enabled", "link", 2),
    (r"device_to_device|all_to_one|one_to_all|p2p_enabled", "link", 1),
    (r"host_to_|_to_host", "host-link", 1),
)
"""Name of a test → what its bytes pass, and how many times that rate its figure can be. A bidirectional test between
GPUs reports each direction and their total, one between a GPU and the host only the direction that it names."""


def copy_ceiling(profile: Profile, test: str) -> Limit | None:
    """The most one cell of the test's matrix can be, in GB/s; `None` where it is not known."""
    path, times = next(((path, times) for p, path, times in _PATHS if re.search(p, test.casefold())), (None, 0))
    if path == "link":
        # Which of several links joins a pair is not printed: the fastest is the limit.
        link = max(profile.links, key=lambda link: link.pair or link.rate)
        kind, rate = link.kind, link.pair or link.rate
    elif path == "host-link" and profile.host_link:
        kind, rate = profile.host_link.kind, profile.host_link.rate
    else:
        return None
    return Limit(value=times * rate, unit="GB/s", what=f"{kind}, {'both directions' if times > 1 else 'one way'}")


def wire_ceiling(profile: Profile, test: str) -> Limit | None:
    """The most one network card can move, in Gb/s."""
    if not profile.network:
        return None
    times = 2 if "bidirectional" in test.casefold() else 1
    what = f"one {profile.network.kind} port, {'both directions' if times > 1 else 'one way'}"
    return Limit(value=times * profile.network.rate * 8, unit="Gb/s", what=what)


def copy_reference(profile: Profile, test: str) -> Copy | None:
    """The first reference for the test."""
    return next((c for c in profile.copies if _names(c.tests, test)), None)


def wire_reference(profile: Profile, test: str) -> Wire | None:
    """The lowest reference for the test: its output does not say whether buffers were in GPU memory."""
    found = [w for w in profile.wires if _names(w.tests, test)]
    return min(found, key=lambda w: w.rate * w.tolerance, default=None)


def cited(measured: Measured, value: float, unit: str) -> Limit:
    """A reference as what a judgement shows."""
    return Limit(value=value, unit=unit, what=f"{measured.source}, {measured.date}")


def _names(patterns: tuple[str, ...], test: str) -> bool:
    return any(fnmatchcase(test.casefold(), pattern.casefold()) for pattern in patterns)
