"""How the catalogue words what is known of an image. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from imagebuild import console
from imagebuild.catalog.models import Checks, Curve, PublishedImage, PublishedPlatform, Scan, Severity
from imagebuild.report import words

MARKS = {"passed": "✓", "failed": "✗", "skipped": words.NONE}
NONE = words.NONE
EPOCH = "1970-01-01"


@dataclass(frozen=True)
class Badge:
    """A verdict: its state, for the colour, and what it says, for everybody."""

    state: str
    text: str


def checks(found: Iterable[Checks]) -> Badge:
    """All verifications of a platform together; a check counts where it went best, so numbers are those of the run
    that passed most.
    """
    runs = list(found)
    if not runs:
        return Badge("skipped", "not checked")
    failed = sum(run.failed for run in runs)
    most = max(runs, key=lambda run: run.passed)
    if failed:
        return Badge("failed", f"{failed} failed")
    gpus = max(run.gpus for run in runs)
    where = f", {gpus} GPU{'s' * (gpus != 1)}" if gpus else ""
    return Badge("passed" if most.passed else "skipped", f"{most.passed} passed{where}")


def scan(found: Scan | None) -> Badge:
    """`no findings`, or the gravest of them."""
    if found is None:
        return Badge("skipped", "not scanned")
    grave = [(s, found.counts[s]) for s in get_args(Severity) if found.counts.get(s)]
    text = f"{grave[0][1]} {grave[0][0]}" if grave else "no findings"
    return Badge(found.verdict, text)


def together_checks(image: PublishedImage) -> Badge:
    return together(checks(platform.checks) for platform in image.platforms)


def together_scan(image: PublishedImage) -> Badge:
    return together(scan(platform.scan) for platform in image.platforms)


def data(curve: Curve) -> Badge:
    """Whether the data were right."""
    return Badge("passed" if curve.verdict == "ok" else "failed", f"data {curve.verdict}")


def speed(curve: Curve) -> Badge:
    """What is said about the speed."""
    state = {"passed": "passed", "not-comparable": "skipped"}.get(curve.outcome, "failed")
    return Badge(state, f"speed {curve.outcome}")


def together(badges: Iterable[Badge]) -> Badge:
    """Of several platforms, the worst."""
    order = ("failed", "skipped", "passed")
    return min(badges, key=lambda badge: order.index(badge.state))


def size(platform: PublishedPlatform) -> str:
    return console.size(platform.size_bytes)


def day(time: str) -> str:
    """The day of a time; a dash for the beginning of Unix time, which means that nobody said it."""
    return NONE if not time or time.startswith((EPOCH, "0001-")) else time[:10]


def minute(time: str) -> str:
    """`2026-11-21 10:45 UTC`."""
    return NONE if day(time) == NONE else f"{time[:10]} {time[11:16]} UTC" if len(time) > 15 else time


def bandwidth(image: PublishedImage) -> str:
    """`475 GB/s, 68%`: the all_reduce of most ranks, else the best curve there is; of the ceiling if one is known."""
    found = [curve for platform in image.platforms for curve in platform.curves if curve.verdict == "ok"]
    if not found:
        return NONE
    best = max(found, key=lambda c: (c.collective == "all_reduce", c.ranks or 0, c.best_gb_s))
    ratio = f", {best.ratio:.0%}" if best.ratio is not None else ""
    return f"{best.best_gb_s:.3g} GB/s{ratio}"


def part(curve: Curve) -> str:
    """`, 94 % of the limit`."""
    return f", {curve.ratio:.0%} of the limit" if curve.ratio is not None else ""


def scale(curve: Curve) -> str:
    """`8 ranks, 1 node, NVIDIA H200`."""
    parts = [f"{curve.ranks} ranks" if curve.ranks else "", f"{curve.nodes} nodes" if (curve.nodes or 1) > 1 else ""]
    return ", ".join(filter(None, (*parts, curve.device or "")))


def title(curve: Curve) -> str:
    return f"{curve.collective}: {words.number(curve.best_gb_s)} GB/s at {words.bytes_text(curve.best_bytes)}"
