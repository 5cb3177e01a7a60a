"""Where images wait to be verified: pushed by digest, beside the repository that people pull from. Pure.

Nobody pulls by the one tag that a push gets. It says when that was and what was pushed, so that `prune` finds old
digests: registries list nothing that has no tag.
"""

from __future__ import annotations

from datetime import UTC, datetime

from imagebuild.config import Project
from imagebuild.models import Target

DIGITS = 12


def repository_of(project: Project, target: Target) -> str:
    """Registry and repository that a target is pushed to before it is verified."""
    return repository_name(project, target.image)


def repository_name(project: Project, image: str) -> str:
    """Registry and repository that builds of an image are pushed to."""
    matrix = project.matrix.model
    return matrix.publish.staging.format(repository=matrix.repository, image=image)


def staged_tag(digest: str, now: datetime) -> str:
    """`staged-20261121T104500Z-0123456789ab`."""
    return f"staged-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{digest.removeprefix('sha256:')[:DIGITS]}"
