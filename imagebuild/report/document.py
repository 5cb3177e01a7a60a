"""The document of a report: everything that was read, what is said about it, and the exit status. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from imagebuild.fields import Model
from imagebuild.judgement import Judgement
from imagebuild.records import VerifyResult
from imagebuild.report import assertions as claims
from imagebuild.report.assertions import Assertion
from imagebuild.report.clean import one_line
from imagebuild.results.models import Results

Overall = Literal["ok", "failed", "not-verified", "nothing-read"]

EXIT_STATUS: dict[Overall, int] = {"ok": 0, "failed": 1, "not-verified": 1, "nothing-read": 5}


class About(Model):
    """Where a report comes from."""

    title: str
    created: str
    """Time of the report, ISO 8601, UTC."""
    imagebuild: str
    """Version that wrote it."""
    files: tuple[str, ...]
    """As they were named."""
    profile: str | None = None
    """The hardware that results were compared with."""
    baseline: str | None = None
    """The earlier report that results were compared with."""
    verdict: Overall | None = None
    """On everything, for programs that read the file."""


class Report(Results):
    """What `imagebuild report --json` writes: what was read, and beside it what is said about it."""

    about: About
    judgements: tuple[Judgement, ...] = ()
    """About speed. Whether data were right is the verdict of each result."""
    verifications: tuple[VerifyResult, ...] = ()
    """Results of `imagebuild verify`."""
    nothing_in: tuple[str, ...] = ()
    """Files that were named and hold no result."""

    @property
    def assertions(self) -> tuple[Assertion, ...]:
        """All that is claimed about the results, problems first, otherwise in the order of the files."""
        found = claims.of_results(self)
        found += claims.of_judgements(self.judgements)
        found += [claim for verification in self.verifications for claim in claims.of_verification(verification)]
        found += claims.of_unread(self.nothing_in)
        return tuple(sorted(found, key=lambda claim: claim.state != "failed"))

    @property
    def overall(self) -> Overall:
        """The verdict on everything."""
        if not (self.runs or self.tests or self.tables or self.ucx or self.diagnostics or self.verifications):
            return "nothing-read"
        states = Counter(claim.state for claim in self.assertions)
        if states["failed"]:
            return "failed"
        return "ok" if states["passed"] else "not-verified"

    @property
    def exit_status(self) -> int:
        """0 all is well, 1 something is not (or nothing was verified), 5 nothing could be read."""
        return EXIT_STATUS[self.overall]

    @property
    def counts(self) -> str:
        """`12 passed, 1 failed, 3 skipped`."""
        states = Counter(claim.state for claim in self.assertions)
        return ", ".join(f"{states[state]} {state}" for state in claims.STATES)

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        failed = [claim for claim in self.assertions if claim.state == "failed"]
        if self.overall == "nothing-read":
            return "No result could be read"
        if self.overall == "not-verified":
            return "Nothing was verified: everything was skipped"
        if not failed:
            return "All is well"
        if len(failed) == 1:
            return f"{one_line(failed[0].subject)}: {failed[0].word.replace('-', ' ')}"
        return f"{len(failed)} of {len(self.assertions)} assertions failed"

    @property
    def unread_lines(self) -> int:
        """Lines that look like a result and could not be read, in all files."""
        return sum(source.unread for source in self.sources)
