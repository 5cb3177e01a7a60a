"""Are the variables of NCCL ones that the image's NCCL reads, and do they say more than the default? Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from packaging.version import Version

from imagebuild.jobs.merge import Placed
from imagebuild.jobs.models import Parameters

OTHERS = ("NCCL_TESTS_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_IBEXT_", "NCCL_OFI_")
"""Read by nccl-tests or by plug-ins, not by NCCL."""


def lint(placed: Iterable[Placed], parameters: Parameters, nccl: str | None) -> list[str]:
    """`warning: …` for names that NCCL does not read, `note: …` for values that are the default."""
    release = nearest(parameters, nccl)
    found = []
    for one in placed:
        name = one.entry.name
        if not name.startswith("NCCL_") or name.startswith(OTHERS):
            continue
        known = parameters.names.get(name)
        if known is None:
            found.append(f"warning: {one.where}: NCCL {release} does not read {name}{_near(name, parameters)}")
        elif not _reads(known.since, known.until, known.absent, release, parameters):
            others = f"releases {known.since} to {known.until} do"
            found.append(f"warning: {one.where}: NCCL {release} does not read {name}; {others}")
        elif one.value is not None and default(parameters, name, release) == one.value:
            found.append(f"note: {one.where}: {name}={one.value} is the default of NCCL {release}")
    if found and nccl and release != nccl:
        found.append(f"note: the image has NCCL {nccl}; {release} is the nearest release that the table of names has")
    return found


def nearest(parameters: Parameters, nccl: str | None) -> str:
    """The newest release of the table that is not newer than the image's; of an unknown one, the newest."""
    if nccl is None:
        return parameters.releases[-1]
    older = [r for r in parameters.releases if Version(r) <= Version(nccl)]
    return older[-1] if older else parameters.releases[0]


def default(parameters: Parameters, name: str, release: str) -> str | None:
    """The default of a name in a release, where it is a plain number."""
    rows = parameters.names[name].defaults
    known = [value for since, value in rows.items() if Version(since) <= Version(release)]
    return known[-1] or None if known else None


def _reads(since: str, until: str, absent: tuple[str, ...], release: str, parameters: Parameters) -> bool:
    order = parameters.releases.index
    return order(since) <= order(release) <= order(until) and release not in absent


def _near(name: str, parameters: Parameters) -> str:
    near = get_close_matches(name, list(parameters.names), n=1, cutoff=0.85)
    return f"; did you mean {near[0]!r}?" if near else ""
