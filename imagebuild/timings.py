"""How long steps took in past builds, from their `result.json`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from imagebuild.errors import ConfigError
from imagebuild.events import NAME
from imagebuild.files import read_text
from imagebuild.records import BuildResult
from imagebuild.steps import Step

Place = tuple[str, int, int, str, str]
"""Stage, number of the step, steps of the stage, command, platform of the image."""


@dataclass(frozen=True)
class Past:
    """Seconds that steps took when they were executed.

    A step is known again by its place: it is the n-th of m steps of the same stage, with the same command, for the
    same platform. What it runs may have changed, such as a version.
    """

    taken: dict[Place, list[float]] = field(default_factory=dict)

    def seconds(self, step: Step, platforms: Iterable[str]) -> float | None:
        """Median of the past times of a step that is for these platforms, None without any."""
        places = [(step.stage, step.number, step.total, step.word, platform) for platform in platforms]
        found = [seconds for place in places for seconds in self.taken.get(place, ())]
        return round(median(found), 3) if found else None


def load_past(folder: Path) -> Past:
    """Read `<target>/result.json` under a folder of builds. Raises ConfigError for one that cannot be read."""
    return past_of(load_result(path) for path in sorted(folder.glob("*/result.json")))


def load_result(path: Path) -> BuildResult:
    """A build's result. Raises ConfigError if the file is not one."""
    try:
        return BuildResult.model_validate_json(read_text(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: is no result of a build; remove it: {error.errors()[0]['msg']}") from None


def past_of(results: Iterable[BuildResult]) -> Past:
    """Times of steps that were executed; a step that several results report counts once."""
    events: dict[tuple[Place, str, float], None] = {}
    for result in results:
        # With a base image from a registry, that is step 1 of the stages that start from it.
        shifted = {step.stage for step in result.steps if re.match(r"\[[^]]*\] FROM ", step.name)}
        for step in result.steps:
            found = NAME.match(step.name)
            if not found or step.cached or step.error:
                continue
            number, total = map(int, found["n"].split("/"))
            word = found["text"].partition(" ")[0]
            for platform in _platforms(found["platform"], result):
                place = (step.stage, number - (step.stage in shifted), total, word, platform)
                events[place, step.name, step.seconds] = None
    taken: dict[Place, list[float]] = {}
    for place, _, seconds in events:
        taken.setdefault(place, []).append(seconds)
    return Past(taken)


def _platforms(shown: str | None, result: BuildResult) -> tuple[str, ...]:
    """`linux/amd64->arm64` is a step on amd64 for arm64; builds for one platform do not show it."""
    if not shown:
        return result.platforms
    runs_on, arrow, arch = shown.partition("->")
    return (f"linux/{arch}" if arrow else runs_on,)
