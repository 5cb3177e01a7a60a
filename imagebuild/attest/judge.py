"""What each kind of attachment has to say about an image, and whether it does. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from imagebuild import provenance
from imagebuild.errors import ConfigError
from imagebuild.fields import Platform
from imagebuild.recipe import Recipe
from imagebuild.records import ScanResult, VerifyResult
from imagebuild.report.document import Report
from imagebuild.results.models import Results
from imagebuild.sbom import spdx

SHOWN = 3
"""Differing sources that are named."""
LONG = re.compile(r"([0-9a-f]{12})[0-9a-f]{20,}")
"""Digests and commits; their beginning tells which."""


@dataclass(frozen=True)
class Subject:
    """The manifest that attachments have to be about."""

    digest: str
    platform: str
    index: str
    """Digest of the index that has it, or its own."""


@dataclass(frozen=True)
class Verdict:
    """What an attachment says."""

    outcome: Literal["passed", "failed", "broken"]
    detail: str


@dataclass(frozen=True)
class Checkout:
    """What a provenance is compared with."""

    recipe: Callable[[str], Recipe | None] | None = None
    """The recipe of a target of this checkout; None if it has no such target."""
    why_not: str = "no project is here"
    """Why nothing is compared, if nothing is."""

    def sources(self, target: str, platform: str) -> frozenset[tuple[str, str]]:
        """What the lock has for a target. Raises ConfigError if that cannot be told."""
        if self.recipe is None:
            raise ConfigError(self.why_not)
        recipe = self.recipe(target)
        if recipe is None:
            raise ConfigError(f"this checkout has no target {target}")
        if platform not in recipe.target.platforms:
            raise ConfigError(f"{target} of this checkout is not for {platform}")
        known: Platform = "linux/arm64" if platform == "linux/arm64" else "linux/amd64"
        return provenance.expected(recipe, recipe.project.lock, known)


def judge(kind: str, content: bytes, subject: Subject, checkout: Checkout) -> Verdict:
    """Whether an attachment is about the image, and what it says. Anybody may have written it: nothing is believed."""
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            return Verdict("broken", "is no JSON object")
        if kind == "provenance":
            return _provenance(document, subject, checkout)
        return JUDGES[kind](document, subject)
    except ValidationError as error:
        first = error.errors()[0]
        return Verdict("broken", f"cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    except RecursionError:
        return Verdict("broken", "cannot be read: it is nested too deeply")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return Verdict("broken", f"cannot be read: {type(error).__name__}: {error}")


def _sbom(document: Mapping[str, Any], subject: Subject) -> Verdict:
    if not str(document["spdxVersion"]).startswith("SPDX-2"):
        return Verdict("broken", f"is {document['spdxVersion']}, not SPDX 2")
    named = spdx.digests(document)
    if subject.digest not in named:
        return Verdict("broken", f"is about another image: {_listed(sorted(named))}")
    return Verdict("passed", f"{len(document['packages']) - 1} packages and components")


def _verification(document: Mapping[str, Any], subject: Subject) -> Verdict:
    result = VerifyResult.model_validate(document)
    platforms = {p.strip() for p in result.platform.split(",")}
    if result.digest not in (subject.digest, subject.index):
        return Verdict("broken", f"is about another image: {result.digest}")
    if subject.platform not in platforms:
        return Verdict("broken", f"is about {result.platform}")
    outcomes = [check.outcome for check in result.checks]
    passed, skipped = outcomes.count("passed"), outcomes.count("skipped")
    counts = f"{passed} checks passed, {skipped} skipped"
    if failed := [f"{c.component}/{c.check}" for c in result.checks if c.outcome == "failed"]:
        return Verdict("failed", f"failed: {_listed(failed)}; {counts}")
    return Verdict("passed" if passed else "failed", counts)


def _scan(document: Mapping[str, Any], subject: Subject) -> Verdict:
    result = ScanResult.model_validate(document)
    if result.digest != subject.digest:
        return Verdict("broken", f"is about another image: {result.digest}")
    about = f"{result.scanner}, {len(result.findings)} findings, {result.started[:10]}"
    if result.verdict == "failed":
        return Verdict("failed", f"{result.reason or 'the policy objects'}; {about}")
    return Verdict("passed", about)


def _benchmark(document: Mapping[str, Any], subject: Subject) -> Verdict:
    if "about" not in document:
        found: Results = Results.model_validate(document)
    else:
        found = report = Report.model_validate(document)
        others = {v.digest for v in report.verifications if v.digest} - {subject.digest, subject.index}
        if others:
            return Verdict("broken", f"is about another image too: {_listed(sorted(others))}")
    count = len(found.runs) + len(found.tests) + len(found.tables) + len(found.ucx) + len(found.diagnostics)
    return Verdict("passed", f"{count} results") if count else Verdict("broken", "has no result")


JUDGES: Mapping[str, Callable[[Mapping[str, Any], Subject], Verdict]] = {
    "sbom": _sbom,
    "verification": _verification,
    "scan": _scan,
    "benchmark": _benchmark,
}


def _provenance(document: Mapping[str, Any], subject: Subject, checkout: Checkout) -> Verdict:
    if misfit := _misfit(document, subject):
        return Verdict("broken", misfit)
    definition = document["predicate"]["buildDefinition"]
    found, replaced = provenance.dependencies(document), provenance.replaced(document)
    about = f"{len(found) + len(replaced)} sources, {_revision(definition)}"
    if unpinned := provenance.unpinned(document):
        return Verdict("failed", f"built from folders that nobody can compare: {_listed(unpinned)}")
    if replaced:
        about += (
            f", of which {len(replaced)} stood in for others ({_listed([uri.partition('?')[0] for uri in replaced])})"
        )
    try:
        if definition["buildType"] != provenance.BUILD_TYPE:
            raise ConfigError("it was not built by imagebuild")
        wanted = checkout.sources(str(definition["externalParameters"]["target"]), subject.platform)
    except ConfigError as error:
        return Verdict("passed", f"{about}; not compared: {str(error).splitlines()[0]}")
    # What stood in for something is not in the lock, and what it stood in for is not in the statement.
    absent = {(uri, digest) for uri, digest in wanted - found if uri not in replaced}
    if differing := sorted({uri.partition("?")[0] for uri, _ in absent | (found - wanted)}):
        return Verdict("failed", f"sources are not those of this checkout's lock: {_listed(differing)}; {about}")
    return Verdict("passed", f"{about}, as in this checkout's lock")


def _misfit(document: Mapping[str, Any], subject: Subject) -> str:
    """Why a statement is not how this image was made; empty if it is."""
    kind = document["_type"], document["predicateType"]
    if kind != (provenance.STATEMENT, provenance.PREDICATE):
        return f"is {' with '.join(map(str, kind))}, not SLSA's provenance v1"
    named = [str(item["digest"].get("sha256")) for item in document["subject"]]
    if named != [subject.digest.removeprefix("sha256:")]:
        return f"is about another image: {_listed(named)}"
    definition = document["predicate"]["buildDefinition"]
    platform = definition["externalParameters"].get("platform", subject.platform)
    return "" if platform == subject.platform else f"is about {platform}"


def _revision(definition: Mapping[str, Any]) -> str:
    for item in definition["resolvedDependencies"]:
        if item.get("name") == "project":
            changed = " and files that differ from it" if item.get("annotations") else ""
            return f"commit {str(item['digest']['gitCommit'])[:12]}{changed}"
    return "an unknown commit"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(LONG.sub(r"\1…", name) for name in names[:SHOWN]) or "none") + more
