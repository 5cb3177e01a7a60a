"""The text of a Dockerfile: its layout, and the keys of its stages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from imagebuild import steps
from imagebuild.fields import Platform

EVERYWHERE = tuple(steps.Setting(platform, "linux/amd64") for platform in get_args(Platform))


@dataclass(frozen=True)
class Dockerfile:
    """A rendered target."""

    text: str

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """Stage → key: digest of all that it depends on, in order of appearance."""
        return stage_keys(self.text)


def stage_keys(text: str) -> dict[str, str]:
    """Stage → digest of all that it depends on, on any platform, for each stage of a Dockerfile."""
    return steps.stage_keys(text, EVERYWHERE)


def spaced(text: str) -> str:
    """One blank line at most in a row, and one after each heredoc: easier on the eye, and hadolint needs it."""
    text = text.replace("\nEOF\n", "\nEOF\n\n")
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip() + "\n"
