"""What is done with images once BuildKit has built them: weighed in the engine, or read as layouts and pushed by digest.

Nothing is pushed by a name that people pull. The one tag of a push says when it was made and what, so that `prune` can
find old digests: registries list nothing that has no tag.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagebuild import bake, buildx
from imagebuild.config import Project
from imagebuild.errors import CommandError
from imagebuild.files import write_text
from imagebuild.inspection import layout as layouts
from imagebuild.models import Target
from imagebuild.records import BuildResult
from imagebuild.registry import push as pushing
from imagebuild.registry.reference import parse

DIGITS = 12


def staging(project: Project, target: Target) -> str:
    """Registry and repository that a target is pushed to before it is verified."""
    matrix = project.matrix.model
    return matrix.publish.staging.format(repository=matrix.repository, image=target.image)


def staged_tag(digest: str, now: datetime) -> str:
    """`staged-20261121T104500Z-0123456789ab`."""
    return f"staged-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{digest.removeprefix('sha256:')[:DIGITS]}"
