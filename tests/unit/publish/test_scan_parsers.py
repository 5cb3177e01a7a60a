"""What scanners print is read; what is no such output is an error and never "nothing found"."""

from datetime import UTC, datetime

import pytest

from imagebuild.core import ResultError
from imagebuild.project import Vulnerability
from imagebuild.publish import parse_debsecan, parse_grype, parse_trivy, scan
from tests.unit.publish import vulnerability_samples as samples

BUILT = datetime(2099, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_grype() -> None:
    reading = parse_grype(samples.grype(), "")
    assert reading.findings == (
        Vulnerability(
            id="CVE-2099-0001",
            severity="critical",
            package="libssl3t64",
            version="3.5.7-1",
            fixed_in="3.5.98-1~deb13u1",
            link="https://example.org/CVE-2099-0001",
        ),
        Vulnerability(id="GHSA-aaaa-bbbb-cccc", severity="medium", package="pip", version="25.1"),
        Vulnerability(id="CVE-2099-0009", severity="unknown", package="bash", version="5.2"),
    )
    assert (reading.version, reading.database, reading.built) == ("0.87.0", "schema 5", BUILT)
    assert reading.distribution == "debian 13"


def test_grype_with_the_newer_form_of_the_database() -> None:
    reading = parse_grype(samples.grype(descriptor=samples.NEW_DATABASE, ignoredMatches=[{}, {}]), "")
    assert (reading.version, reading.database, reading.built) == ("0.92.0", "schema v6.0.2", BUILT)
    assert reading.notes == ("grype left out 2 matches by rules of its own",)


def test_grype_without_distribution_or_age() -> None:
    reading = parse_grype(
        samples.grype(distro={}, descriptor={"version": "1", "db": {"built": "0001-01-01T00:00:00Z"}}), ""
    )
    assert reading.distribution is None
    assert reading.built is None


def test_trivy() -> None:
    reading = parse_trivy(samples.trivy(), samples.TRIVY_VERSION)
    assert [(f.id, f.severity, f.package, f.fixed_in) for f in reading.findings] == [
        ("CVE-2099-0001", "high", "libssl3t64", "3.5.98-1~deb13u1"),
        ("CVE-2099-0002", "low", "libc6", None),
    ]
    assert (reading.version, reading.database) == ("0.58.0", "version 2")
    assert reading.built == BUILT.replace(microsecond=123456)
    assert reading.distribution == "debian 13.1"
    assert parse_trivy(samples.trivy(Metadata={}), samples.TRIVY_VERSION).distribution is None


def test_debsecan() -> None:
    reading = parse_debsecan(samples.DEBSECAN, "0.4.20.1")
    assert [(f.id, f.severity, f.package, f.version, f.fixed_in) for f in reading.findings] == [
        # Of the versions of several releases, the least that is newer than what is installed.
        ("CVE-2099-0001", "high", "libssl3t64", "3.5.7-1~deb13u3", "3.5.98-1~deb13u1"),
        ("CVE-2099-0002", "medium", "libc6", "2.41-12", None),
        ("TEMP-0000000-0A1B2C", "unknown", "bash", "5.2.37-2+b10", None),
    ]
    assert parse_debsecan("", "0.4").findings == ()


@pytest.mark.parametrize(
    ("parser", "output", "about"),
    [
        ("grype", "", ""),
        ("grype", "[]", ""),
        ("grype", "{}", ""),
        ("grype", samples.grype(matches=[{"vulnerability": {}}]), ""),
        ("grype", samples.grype(matches=None), ""),
        ("grype", samples.grype(descriptor={"db": {"built": "yesterday"}}), ""),
        ("trivy", samples.trivy(Results=[{"Vulnerabilities": [{}]}]), samples.TRIVY_VERSION),
        ("trivy", samples.trivy(Results="none"), samples.TRIVY_VERSION),
        ("trivy", samples.trivy(), "0.58.0"),
        ("trivy", "null", samples.TRIVY_VERSION),
        ("debsecan", "error: something else\n", ""),
        ("debsecan", "CVE-2099-0001 (high urgency)\n  but no package\n", ""),
    ],
)
def test_what_is_no_output_of_a_scanner_is_an_error(parser: str, output: str, about: str) -> None:
    with pytest.raises(ResultError, match=parser):
        getattr(scan, f"parse_{parser}")(output, about)
