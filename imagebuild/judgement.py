"""The types of a judgement: a measurement beside what the hardware can do and what others measured."""

from __future__ import annotations

from typing import Literal

from imagebuild.fields import Model

Outcome = Literal["passed", "failed", "measurement-error", "not-comparable", "regression"]


class Limit(Model):
    """A number that a measurement is compared with, and where it comes from."""

    value: float
    unit: str
    what: str
    """For example `NVLS all_reduce ceiling: link * 2(N-1)/(N+1)`, or the source and date of a reference."""


class Judgement(Model):
    """What is said about the speed of one result. Whether its data were right is the verdict of the run."""

    source: str
    subject: str
    """For example `all_reduce, 8 ranks`, `device_to_device_memcpy_read_ce`."""
    measured: float | None
    """The best row at 1 GiB or more for collectives; in `unit`."""
    size_bytes: int | None = None
    unit: str
    ceiling: Limit | None
    reference: Limit | None
    tolerance: float | None
    """The least fraction of the reference that passes."""
    outcome: Outcome
    reason: str
