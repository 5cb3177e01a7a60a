"""The policy: what fails, what is waived until when, and what is wrong with the policy itself."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core import ConfigError, YamlFile
from imagebuild.project import Plan, Severity, Vulnerability
from imagebuild.publish import Policy, PolicyVerdict, judge_vulnerabilities, load_policy
from tests.conftest import ROOT

NOW = datetime(2099, 6, 15, 12, tzinfo=UTC)
IMAGE = {"cuda": "13.5", "os": "debian13", "image": "open", "arch": "amd64"}
WAIVER = {"id": "CVE-1-1", "until": "2099-06-15", "reason": "nothing here calls it"}


def finding(
    name: str = "CVE-1-1", severity: Severity = "high", fixed: str | None = "2", package: str = "p"
) -> Vulnerability:
    return Vulnerability(id=name, severity=severity, package=package, version="1", fixed_in=fixed)


def judged(
    *found: Vulnerability,
    worst: Severity = "critical",
    age: timedelta | None = timedelta(hours=1),
    now: datetime = NOW,
    **rules: Any,
) -> PolicyVerdict:
    rules = {"fail": {"severity": "high"}, **rules}
    document = YamlFile(Path("p.yaml"), Policy.model_validate(rules), {})
    return judge_vulnerabilities(
        found, document, IMAGE, worst=worst, database=None if age is None else now - age, now=now
    )


@pytest.mark.parametrize(
    ("fail", "found", "fails"),
    [
        ({"severity": "high"}, finding(), True),
        ({"severity": "high"}, finding(severity="critical"), True),
        ({"severity": "critical"}, finding(), False),
        ({"severity": "high"}, finding(severity="medium"), False),
        ({"severity": "high"}, finding(fixed=None), True),
        ({"severity": "high", "only-fixed": True}, finding(fixed=None), False),
        ({"severity": "high"}, finding(severity="unknown"), False),
        ({"severity": "negligible"}, finding(severity="unknown"), False),
        ({"severity": "high", "unknown-severity": True}, finding(severity="unknown"), True),
        (
            {"severity": "high", "unknown-severity": True, "only-fixed": True},
            finding(severity="unknown", fixed=None),
            False,
        ),
    ],
)
def test_what_fails(fail: dict[str, Any], found: Vulnerability, fails: bool) -> None:
    made = judged(found, fail=fail)
    assert [f.fails for f in made.findings] == [fails]
    assert bool(made.reason) is fails
    assert not made.notes


def test_a_scanner_without_critical_fails_by_its_worst() -> None:
    made = judged(finding(), fail={"severity": "critical"}, worst="high")
    assert made.findings[0].fails
    assert made.notes == ("this scanner reports nothing worse than high, so that fails instead of critical",)


@pytest.mark.parametrize(
    ("changes", "waives"),
    [
        ({}, True),
        ({"package": "p"}, True),
        ({"package": "p*"}, True),
        ({"package": "q"}, False),
        ({"id": "CVE-1-2"}, False),
        ({"when": {"image": "open", "cuda": ">=13"}}, True),
        ({"when": {"cuda": "<13"}}, False),
        ({"when": {"cuda-major": "13", "arch": "amd64"}}, True),
        ({"when": {"unheard": "x"}}, False),
        ({"until": "2099-06-14"}, False),
    ],
)
def test_waivers(changes: dict[str, Any], waives: bool) -> None:
    made = judged(finding(), waivers=[{**WAIVER, **changes}])
    assert made.findings[0].fails is not waives
    assert made.findings[0].waived == ("until 2099-06-15: nothing here calls it" if waives else None)


def test_a_waiver_holds_to_the_end_of_its_last_day() -> None:
    last = datetime(2099, 6, 15, 23, 59, 59, tzinfo=UTC)
    assert not judged(finding(), waivers=[WAIVER], now=last).reason
    after = judged(finding(), waivers=[WAIVER], now=last + timedelta(seconds=1))
    assert after.reason
    assert "ended on 2099-06-15" in after.notes[0]


def test_waivers_that_are_of_no_use_are_said() -> None:
    rows = [{**WAIVER, "id": "CVE-9-9"}, {**WAIVER, "id": "CVE-9-8", "when": {"image": "hpcx"}}]
    made = judged(finding(severity="low"), waivers=rows)
    assert made.notes == ("p.yaml:1: the waiver of CVE-9-9 matches nothing in this image",)


@pytest.mark.parametrize(
    ("rules", "age", "fails", "said"),
    [
        ({"maximum-database-age-days": 7}, timedelta(days=8), True, "8.0 days old; at most 7"),
        ({"maximum-database-age-days": 7}, timedelta(days=6, hours=23), False, ""),
        ({"maximum-database-age-days": 7}, None, True, "does not say how old it is"),
        ({"maximum-database-age-days": 7, "old-database": "warn"}, timedelta(days=8), False, "8.0 days old"),
        ({}, None, False, ""),
        ({}, timedelta(days=999), False, ""),
    ],
)
def test_the_age_of_the_database(rules: dict[str, Any], age: timedelta | None, fails: bool, said: str) -> None:
    made = judged(age=age, **rules)
    assert bool(made.reason) is fails
    assert said in f"{made.reason} {made.notes}"
    assert bool(made.notes) is (bool(said) and not fails)


def test_the_worst_comes_first() -> None:
    found = [
        finding("CVE-3", "unknown"),
        finding("CVE-2", "critical", None),
        finding("CVE-1", "high"),
        finding("CVE-0", "low"),
    ]
    made = judged(*found, fail={"severity": "high", "only-fixed": True})
    assert [f.id for f in made.findings] == ["CVE-1", "CVE-2", "CVE-0", "CVE-3"]
    assert made.reason == "1 finding that the policy does not allow"


def test_mistakes_in_the_file_have_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "fail:\n  severity: hgih\nwaivers:\n  - id: CVE-1-1\n    untill: 2099-01-01\n    reason: short\n"
        "  - {id: CVE-1-1, until: tomorrow, reason: long enough}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_policy(path)
    said = str(raised.value)
    assert f"{path}:2: fail.severity: Input should be" in said
    assert f"{path}:5: waivers.0.untill: unknown key; did you mean 'until'?" in said
    assert f"{path}:4: waivers.0.until: is missing" in said
    assert f"{path}:6: waivers.0.reason" in said
    assert f"{path}:7: waivers.1.until" in said


def test_conditions_name_axes_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "waivers:\n  - id: CVE-1-1\n    until: 2099-01-01\n    reason: long enough\n    when:\n      cdua: '13'\n      cuda: '>=x'\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_policy(path, {"cuda": (), "os": ()})
    assert f"{path}:6: waivers.0.when: unknown axis 'cdua'; did you mean 'cuda'?" in str(raised.value)
    assert f"{path}:7: waivers.0.when.cuda: '>=x' is not a version specifier" in str(raised.value)


def test_the_policy_of_this_project(full_plan: Plan) -> None:
    rules = load_policy(ROOT / "scan-policy.yaml", {axis: () for target in full_plan.targets for axis in target.axes})
    assert rules.model.fail.only_fixed
    assert rules.model.maximum_database_age_days


def test_schema(golden: Callable[[str, str], None]) -> None:
    golden("schemas/scan-policy.json", json.dumps(Policy.model_json_schema(by_alias=True), indent=1) + "\n")
