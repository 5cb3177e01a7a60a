"""The rendered Dockerfile of a target. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from imagebuild.core.fields import Platform
from imagebuild.render.stages import digest, stages_of


@dataclass(frozen=True)
class Dockerfile:
    """The rendered Dockerfile of a target."""

    text: str

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """Maps each stage to its key, a digest of all that it depends on, on any platform. In order of appearance."""
        first, *others = (stages_of(self.text, platform) for platform in get_args(Platform))
        return {name: digest(stage.key, *(other[name].key for other in others)) for name, stage in first.items()}
