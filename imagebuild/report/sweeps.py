"""Find slow hosts and pairs among runs of the same benchmark on many groups of hosts: a sweep of a cluster. Pure.

A run counts with the bandwidth that is judged. Since a slow host spoils the runs of its partners too, statistics are
robust, and are made so that slow runs do not move them:

* The centre is the median of the hosts' medians. In a sweep of pairs one slow host of four has half of all runs. One of
  three has two of the three: there the centre is the fastest pair.
* The spread is 1.4826 * the median deviation of the runs at or above the centre: the upper half of a double median
  absolute deviation (Rosenmai 2013), which slow runs cannot widen.
* A run is slow below min((1 - LEAST) * centre, centre - CUTOFF * spread).
* A host is slow if more than half of its runs are, two at least. Its runs are then left out, and the next one is
  looked for. A sweep of single hosts has no partners: each is its own group. Slow groups of which no host is slow are
  named themselves, and so is a group or host that is slow now and then: in some of its runs, though not in the median.
* A sweep is even if no run is slow and the slowest is at most EVEN below the fastest. One in which many hosts are slow
  has no centre by which to find them: it is uneven.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from imagebuild.bench.judge import best_row
from imagebuild.bench.models import Run, describe_run
from imagebuild.core.fields import Model

LEAST = 0.10
"""A run that is off by less is never called slow."""
EVEN = 0.20
"""The largest difference between the runs of an even sweep."""
CUTOFF = 3.5
"""Of Iglewicz and Hoaglin (1993), in standard deviations."""
MAD_SCALE = 1.4826
"""Standard deviation of a normal distribution / its median absolute deviation."""
LEAST_GROUPS = 4
"""Different groups of hosts that make a sweep; the three pairs of three hosts do as well."""


class GroupSpeed(Model):
    """Hold what a host, a pair or a larger group of hosts reached."""

    hosts: tuple[str, ...]
    gb_s: float
    """Median of its runs."""
    least_gb_s: float = 0.0
    """Its slowest run. Reports of earlier versions do not have it; their sweeps are found anew."""
    most_gb_s: float = 0.0
    """Its fastest run."""
    runs: int
    """Number of runs that it took part in."""
    slow_runs: int
    """Number of those that were slow."""

    @property
    def label(self) -> str:
        """Return `node1`, `node1 ↔ node2` or `node1 … node18 (18 hosts)`."""
        return host_label(self.hosts)


class Sweep(Model):
    """Hold a sweep of a cluster: how fast its hosts and groups of hosts are, the slowest first."""

    collective: str | None
    ranks: int | None
    nodes: int
    """Number of hosts in each run."""
    device: str | None
    dtype: str
    size_bytes: int
    """The largest message, the same in all runs."""
    centre_gb_s: float
    limit_gb_s: float
    """Runs below this are slow."""
    groups: tuple[GroupSpeed, ...]
    hosts: tuple[GroupSpeed, ...]
    outliers: tuple[GroupSpeed, ...]
    """Slow hosts, then groups without a slow host that are slow, or were in some runs."""

    @property
    def subject(self) -> str:
        """Return what ran on each group: `sendrecv, 2 ranks, 2 nodes`."""
        return describe_run(self.collective, self.ranks, self.nodes)

    @property
    def scope(self) -> str:
        """Return how large it is: `136 runs of 17 hosts`."""
        return f"{self.runs} runs of {len(self.hosts)} hosts"

    @property
    def range(self) -> str:
        """Return its centre, and what the slowest and the fastest run reached."""
        slowest, fastest = self.extremes
        return f"{self.centre_gb_s:.4g} GB/s, {slowest:.4g} to {fastest:.4g}"

    @property
    def extremes(self) -> tuple[float, float]:
        """Return what the slowest and the fastest run reached, in GB/s."""
        return min(group.least_gb_s for group in self.groups), max(group.most_gb_s for group in self.groups)

    @property
    def is_even(self) -> bool:
        """Return whether no run is slow, and all are about equally fast."""
        slowest, fastest = self.extremes
        return not self.outliers and slowest >= (1 - EVEN) * fastest

    def holds(self, result: object) -> bool:
        """Return whether a result is one of its runs, right or not."""
        return isinstance(result, Run) and sweep_key(result) == (
            self.collective, self.ranks, self.nodes, self.device, self.dtype, self.size_bytes
        )  # fmt: skip

    @property
    def runs(self) -> int:
        """Return the number of runs."""
        return sum(group.runs for group in self.groups)

    def shortfall(self, group: GroupSpeed) -> float:
        """Return how far a group is below the centre, as a fraction of that."""
        slowest = group.gb_s if group.gb_s < self.limit_gb_s else group.least_gb_s
        return 1 - slowest / self.centre_gb_s

    def reason(self, outlier: GroupSpeed) -> str:
        """Return how far off an outlier is, and in how many runs it and its hosts took part."""
        centre = "the fastest" if self.nodes == 2 and len(self.groups) == 3 else "the median"
        off = f"{self.shortfall(outlier):.0%} below {centre} of {self.scope}, {self.subject}"
        if outlier.gb_s >= self.limit_gb_s:
            return f"{outlier.least_gb_s:.4g} GB/s in {outlier.slow_runs} of its {outlier.runs} runs, {off}"
        off = f"{outlier.gb_s:.4g} GB/s, {off}"
        if self.nodes == 1:
            return off
        members = [host for host in self.hosts if host.label in outlier.hosts][:2]
        return "; ".join([off, *(f"{host.label} slow in {host.slow_runs} of its {host.runs} runs" for host in members)])


def host_label(hosts: tuple[str, ...]) -> str:
    """Return the name of a group of hosts."""
    if len(hosts) > 2:
        return f"{hosts[0]} … {hosts[-1]} ({len(hosts)} hosts)"
    return " ↔ ".join(hosts)


def host_order(host: str) -> list[tuple[int, str]]:
    """Return what names of hosts are sorted by: node9 comes before node10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", host)]


def sweep_key(run: Run) -> tuple[object, ...] | None:
    """Return what the runs of a sweep have in common, None if a run cannot be part of one."""
    if not run.hosts or not run.rows:
        return None
    return run.collective, run.ranks, len(run.hosts), run.device, run.rows[-1].dtype, run.rows[-1].size_bytes


def find_sweeps(runs: Iterable[Run]) -> tuple[Sweep, ...]:
    """Return the sweeps among runs; runs with wrong or missing data are not counted."""
    alike: defaultdict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        if (key := sweep_key(run)) and run.verdict == "ok":
            alike[key].append(run)
    sweeps = (_sweep_of(members) for members in alike.values())
    return tuple(sweep for sweep in sweeps if sweep)


def _sweep_of(runs: list[Run]) -> Sweep | None:
    """Return the sweep of runs that are alike, None if they are too few or measured no bandwidth."""
    speeds: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for run in runs:
        if value := best_row(run)[0]:
            speeds[tuple(sorted(run.hosts, key=host_order))].append(value)
    of_host: defaultdict[str, list[float]] = defaultdict(list)
    for names, values in speeds.items():
        for name in names:
            of_host[name] += values
    of_three = len(speeds) == len(of_host) == 3 and len(runs[0].hosts) == 2
    if len(speeds) < LEAST_GROUPS and not of_three:
        return None
    centre = max(map(median, speeds.values())) if of_three else median(map(median, of_host.values()))
    spread = MAD_SCALE * median(value - centre for values in speeds.values() for value in values if value >= centre)
    limit = min((1 - LEAST) * centre, centre - CUTOFF * spread)

    def speed_of(names: tuple[str, ...], values: list[float]) -> GroupSpeed:
        slow = sum(value < limit for value in values)
        middle, least, most = (round(value, 3) for value in (median(values), min(values), max(values)))
        return GroupSpeed(hosts=names, gb_s=middle, least_gb_s=least, most_gb_s=most, runs=len(values), slow_runs=slow)

    groups = sorted((speed_of(*item) for item in speeds.items()), key=lambda group: group.gb_s)
    hosts = sorted((speed_of((name,), values) for name, values in of_host.items()), key=lambda host: host.gb_s)
    slow_hosts, left = [], groups
    while len(runs[0].hosts) > 1:
        # Share of a host's groups that are slow → the host; a group alone does not tell whose fault it is.
        shares = {}
        for host in reversed(hosts):
            own = [group.gb_s < limit for group in left if host.label in group.hosts]
            if len(own) > 1:
                shares[sum(own) / len(own)] = host
        if max(shares, default=0) <= 0.5:
            break
        slow_hosts.append(shares[max(shares)])
        left = [group for group in left if slow_hosts[-1].label not in group.hosts]
    return Sweep(
        collective=runs[0].collective,
        ranks=runs[0].ranks,
        nodes=len(runs[0].hosts),
        device=runs[0].device,
        dtype=runs[0].rows[-1].dtype,
        size_bytes=runs[0].rows[-1].size_bytes,
        centre_gb_s=round(centre, 3),
        limit_gb_s=round(limit, 3),
        groups=tuple(groups),
        hosts=tuple(hosts),
        outliers=(*slow_hosts, *(group for group in left if group.slow_runs)),
    )
