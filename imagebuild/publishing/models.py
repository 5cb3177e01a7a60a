"""What `matrix.yaml` says about publishing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from imagebuild.fields import Condition, Model

Attachment = Literal["sbom", "provenance", "verification", "benchmark", "scan"]


class Requirement(Model):
    """Checks that must have passed on the image, wherever they ran, and not only been skipped."""

    when: Condition = Field(default_factory=dict)
    """Targets that it is for; besides axes there are `image` and `arch`."""
    checks: Annotated[tuple[str, ...], Field(min_length=1)]
    """`component/check` or shell patterns of that; a component alone means all of its checks."""


class Publish(Model):
    """What an image must have shown before it gets a tag.

    Always: on every platform no check failed, and each that needs nothing special of the place passed.
    """

    staging: str = "{repository}/{image}-staging"
    """Where builds are pushed by digest, until they are verified."""
    require: tuple[Requirement, ...] = ()
    """What must have passed besides, for example on GPUs."""
    require_attachments: tuple[Attachment, ...] = ()
    """What must be there to be attached to every platform's image."""
