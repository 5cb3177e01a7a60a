"""Runs of nccl-tests as curves, each beside what the hardware can do and what others measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from imagebuild.catalog.models import Bound, Curve
from imagebuild.judge import Known, judge_run, subject
from imagebuild.judgement import Judgement, Limit
from imagebuild.profiles import Profile
from imagebuild.report import words
from imagebuild.results.models import Results, Run

Judged = Mapping[str, tuple[Judgement, ...]]
"""Source → what is said about what it printed."""


def of_results(
    digest: str, results: Iterable[Results], judged: Judged, profiles: Mapping[str, Profile], profile: str | None = None
) -> tuple[Curve, ...]:
    """A curve for each run that has a bandwidth; `digest` is of the file they come from.

    A run that nothing is said about is judged by `profile`, or by the profile that fits its GPU if it ran on one host.
    """
    runs = [run for part in results for run in part.runs]
    found = [_curve(digest, run, judged, profiles, profile) for run in runs]
    return tuple(curve for curve in found if curve)


def _curve(digest: str, run: Run, judged: Judged, profiles: Mapping[str, Profile], name: str | None) -> Curve | None:
    points = {row.size_bytes: speed for row in run.rows if row.size_bytes > 0 and (speed := words.busbw(row))}
    if not points:
        return None
    own = subject(run.collective, run.ranks, run.nodes)
    said = judged.get(run.source, ())
    judgement = next((one for one in said if one.subject == own), said[0] if len(said) == 1 else None)
    profile = profiles.get(name) if name else _fitting(run, profiles)
    if judgement is None and profile and run.verdict == "ok":
        judgement = judge_run(run, profile, Known())
    best = max(points, key=lambda size: (points[size], -size))
    return Curve(
        evidence=digest,
        collective=run.collective or "unknown",
        ranks=run.ranks,
        nodes=run.nodes,
        device=run.device,
        points=tuple(sorted(points.items())),
        best_gb_s=points[best],
        best_bytes=best,
        verdict=run.verdict,
        outcome=judgement.outcome if judgement else "",
        reason=judgement.reason if judgement else "",
        profile=name or (profile.name if profile and judgement else None),
        ceiling=_bound(judgement.ceiling) if judgement else None,
        reference=_bound(judgement.reference) if judgement else None,
    )


def _bound(limit: Limit | None) -> Bound | None:
    # Of collectives, all limits are in GB/s; another unit could not be drawn in.
    return Bound(gb_s=limit.value, what=limit.what) if limit and limit.unit == "GB/s" else None


def _fitting(run: Run, profiles: Mapping[str, Profile]) -> Profile | None:
    """The plainest profile of the run's GPU; none for several hosts, whose network the output does not tell."""
    if run.device is None or (run.nodes or 1) > 1:
        return None
    fits = [profile for profile in profiles.values() if profile.has(run.device)]
    return min(fits, key=lambda p: (p.extends is not None, len(p.name), p.name), default=None)


def distinct(curves: Iterable[Curve]) -> tuple[Curve, ...]:
    """Of the same measurement from several files, the one that most is said about; collectives in their usual order."""
    found: dict[object, Curve] = {}
    for curve in curves:
        key = (curve.collective, curve.ranks, curve.nodes, curve.device, curve.points)
        if key not in found or (found[key].ceiling is None and curve.ceiling is not None):
            found[key] = curve
    return tuple(sorted(found.values(), key=lambda c: (c.collective != "all_reduce", c.collective, c.ranks or 0)))
