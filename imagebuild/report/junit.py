"""JUnit XML: one suite for each file or image, one test case for each claim; correctness and speed are two cases."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from xml.etree import ElementTree as ET

from imagebuild.report.assertions import Assertion
from imagebuild.report.clean import visible
from imagebuild.report.document import Report

OUTPUT_CHARACTERS = 64 * 1024
"""The end of a failed check's output; servers that show JUnit refuse large files."""


def xml(report: Report) -> str:
    """The document."""
    root = ET.Element("testsuites", {"name": visible(report.about.title), **_counts(report.assertions)})
    claims = sorted(report.assertions, key=lambda claim: claim.source)
    for source, group in groupby(claims, key=lambda claim: claim.source):
        cases = tuple(group)
        about = {"name": visible(source), "timestamp": report.about.created}
        suite = ET.SubElement(root, "testsuite", {**about, **_counts(cases)})
        seen: Counter[tuple[str, str]] = Counter()
        for claim in cases:
            seen[claim.kind, claim.subject] += 1
            _case(suite, claim, seen[claim.kind, claim.subject])
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ET.Element, claim: Assertion, number: int) -> None:
    # Servers that follow a case from run to run know it by class and name: the name says no numbers that change.
    name = visible(f"{claim.subject}: {claim.kind}") + (f" #{number}" if number > 1 else "")
    case = ET.SubElement(
        suite, "testcase", name=name, classname=f"imagebuild.{claim.kind}", time=f"{claim.seconds:.3f}"
    )
    message = visible(": ".join(filter(None, (claim.word, claim.reason))))
    if claim.state == "failed":
        ET.SubElement(case, "failure", message=message, type=claim.word).text = visible(claim.reason)
    elif claim.state == "skipped":
        ET.SubElement(case, "skipped", message=message)
    if claim.output:
        ET.SubElement(case, "system-out").text = visible(claim.output[-OUTPUT_CHARACTERS:])


def _counts(claims: tuple[Assertion, ...]) -> dict[str, str]:
    states = Counter(claim.state for claim in claims)
    return {
        "tests": str(len(claims)),
        "failures": str(states["failed"]),
        "errors": "0",
        "skipped": str(states["skipped"]),
        "time": f"{sum(claim.seconds for claim in claims):.3f}",
    }
