"""The types of what `imagebuild attest verify` finds."""

from __future__ import annotations

from typing import Literal

from imagebuild.fields import Model

Outcome = Literal["passed", "failed", "broken", "missing", "skipped"]
"""`failed`: it is genuine, and says that something is wrong. `broken`: it is damaged, or about something else."""


class Finding(Model):
    """What is said about one thing that refers to an image, or should."""

    subject: str
    """A platform, or `index`."""
    digest: str
    """Of the manifest that it refers to."""
    kind: str
    """`sbom`, `provenance`, `verification`, `benchmark`, `scan` or `signature`."""
    outcome: Outcome
    detail: str
    attachment: str | None = None
    """Digest of the manifest that refers."""
    required: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether the image must not be trusted for it: damage always counts, an absence where it was required."""
        return self.outcome == "broken" or (self.required and self.outcome != "passed")


class AttestResult(Model):
    """The file that `imagebuild attest verify --json` writes."""

    image: str
    """As it was named."""
    digest: str
    """Of the index, or the manifest."""
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Literal["passed", "failed"]:
        return "failed" if any(finding.is_wrong for finding in self.findings) else "passed"
