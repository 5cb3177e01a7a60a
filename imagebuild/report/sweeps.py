"""Find slow hosts in a sweep: many runs of the same benchmark, each on another group of hosts. Pure.

docs/report.md has the rules. The value of a host is that of its best run, because a slow partner makes any run slow:
only a slow host has no fast run. The centre is the median of the values of all hosts. If many hosts are slow, it does
not show which."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Literal

from imagebuild.bench.judge import best_row
from imagebuild.bench.models import Run, State, describe_run
from imagebuild.core.fields import Model, natural_order

LEAST = 0.10
"""Fraction of the centre. A run is slow if its value is more than this fraction below the centre."""
EVEN = 0.20
"""Largest difference between the slowest and the fastest run of an even sweep, as a fraction of the fastest run."""
LEAST_GROUPS = 4
"""Smallest number of different groups in a sweep. Exception: the three pairs of three hosts are a sweep, too."""


class GroupSpeed(Model):
    """The bandwidth of a host, a pair or a larger group of hosts."""

    hosts: tuple[str, ...]
    gb_s: float
    """Bandwidth of the fastest run."""
    least_gb_s: float
    """Bandwidth of the slowest run."""
    runs: int
    """Number of runs that the group took part in."""
    slow_runs: int
    """Number of those runs that were slow."""

    @property
    def label(self) -> str:
        return host_label(self.hosts)


class Sweep(Model):
    """A sweep of a cluster, with the bandwidths of its hosts and groups of hosts, the slowest first."""

    collective: str | None
    ranks: int | None
    nodes: int
    devices: tuple[str, ...]
    dtype: str
    size_bytes: int
    """The largest message size, which is the same in all runs."""
    centre_gb_s: float
    """The median over all hosts of the bandwidth of each host's fastest run."""
    limit_gb_s: float
    """Bandwidth below which a run is slow."""
    groups: tuple[GroupSpeed, ...]
    hosts: tuple[GroupSpeed, ...]
    outliers: tuple[GroupSpeed, ...]
    """Slow hosts, then groups without a slow host in which at least one run was slow."""

    @property
    def subject(self) -> str:
        return describe_run(self.collective, self.ranks, self.nodes)

    @property
    def scope(self) -> str:
        """The size of the sweep, such as `136 runs of 17 hosts`."""
        return f"{sum(group.runs for group in self.groups)} runs of {len(self.hosts)} hosts"

    @property
    def extremes(self) -> tuple[float, float]:
        """The bandwidths of the slowest and the fastest run, in GB/s."""
        return min(group.least_gb_s for group in self.groups), max(group.gb_s for group in self.groups)

    @property
    def range(self) -> str:
        """A text such as `370 GB/s, 310 to 380`: the median of the hosts, then the slowest and the fastest run."""
        slowest, fastest = self.extremes
        return f"{self.centre_gb_s:.4g} GB/s, {slowest:.4g} to {fastest:.4g}"

    @property
    def word(self) -> Literal["slow", "even", "uneven"]:
        slowest, fastest = self.extremes
        return "slow" if self.outliers else "even" if slowest >= (1 - EVEN) * fastest else "uneven"

    @property
    def state(self) -> State:
        return "failed" if self.outliers else "passed" if self.word == "even" else "open"

    def holds(self, result: object) -> bool:
        """Return whether a result is a run of this sweep. A run with wrong data counts, too."""
        return isinstance(result, Run) and sweep_key(result) == tuple(getattr(self, name) for name in KEY_FIELDS)

    def reason(self, outlier: GroupSpeed) -> str:
        """Return by how much and how often an outlier (host or group) is slow, as text.
        The speed in the text is the speed of the best run, or of the slowest run if the best run is not slow."""
        slow = outlier.gb_s if outlier.gb_s < self.limit_gb_s else outlier.least_gb_s
        share, runs = 1 - slow / self.centre_gb_s, f"{outlier.slow_runs} of its {outlier.runs} runs"
        return f"{slow:.4g} GB/s, {share:.0%} below the median of {self.scope}, {self.subject}; slow in {runs}"


def host_label(hosts: tuple[str, ...]) -> str:
    """Return `node1`, `node1 ↔ node2` or `node1 … node18 (18 hosts)`."""
    return f"{hosts[0]} … {hosts[-1]} ({len(hosts)} hosts)" if len(hosts) > 2 else " ↔ ".join(hosts)


KEY_FIELDS = ("collective", "ranks", "nodes", "devices", "dtype", "size_bytes")
"""Fields with the same value in all runs of a sweep."""


def sweep_key(run: Run) -> tuple[object, ...] | None:
    """Return the values of `KEY_FIELDS`, or None if the run cannot be part of a sweep."""
    if not (run.hosts and run.rows):
        return None
    return run.collective, run.ranks, len(run.hosts), run.devices, run.rows[-1].dtype, run.rows[-1].size_bytes


def find_sweeps(runs: Iterable[Run]) -> tuple[Sweep, ...]:
    """Return the sweeps among runs. Runs with wrong or missing data are left out."""
    alike: defaultdict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        if (key := sweep_key(run)) and run.verdict == "ok":
            alike[key].append(run)
    return tuple(filter(None, map(_sweep_of, alike.values())))


def _sweep_of(runs: list[Run]) -> Sweep | None:
    """Return the sweep that these runs make, or None if there are too few groups with a bandwidth (see
    `LEAST_GROUPS`)."""
    by_group: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    by_host: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        if value := best_row(run)[0]:
            by_group[tuple(sorted(run.hosts, key=natural_order))].append(value)
            for host in run.hosts:
                by_host[host].append(value)
    if len(by_group) < LEAST_GROUPS and not len(by_group) == len(by_host) == 3:
        return None
    centre = median(map(max, by_host.values()))
    limit = (1 - LEAST) * centre

    def speed_of(names: tuple[str, ...], values: list[float]) -> GroupSpeed:
        fastest, slowest = round(max(values), 3), round(min(values), 3)
        slow = sum(value < limit for value in values)
        return GroupSpeed(hosts=names, gb_s=fastest, least_gb_s=slowest, runs=len(values), slow_runs=slow)

    groups = sorted((speed_of(*item) for item in by_group.items()), key=lambda group: (group.gb_s, group.least_gb_s))
    hosts = sorted((speed_of((name,), values) for name, values in by_host.items()), key=lambda host: host.gb_s)
    several = Counter(host for group in by_group for host in group if len(group) > 1)
    slow_hosts = [host for host in hosts if host.gb_s < limit and several[host.label] > 1]
    named = {host.label for host in slow_hosts}
    return Sweep(
        **dict(zip(KEY_FIELDS, sweep_key(runs[0]) or (), strict=True)), centre_gb_s=round(centre, 3),
        limit_gb_s=round(limit, 3), groups=tuple(groups), hosts=tuple(hosts),
        outliers=(*slow_hosts, *(group for group in groups if group.slow_runs and named.isdisjoint(group.hosts))),
    )  # fmt: skip
