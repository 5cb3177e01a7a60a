"""The rules about processes find what a library would not open, and what a process would load twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imagebuild.project.plan import make_plan
from imagebuild.verify.rules import RULES, read_images, rule_name
from imagebuild.verify.subject import ImageFinder
from tests.conftest import Files, data
from tests.unit.image_files import layout, member

ROWS = [row for row in data("processes") if row["rule"] != "wheels"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_what_is_found_and_loaded(tmp_path: Path, tiny: Files, row: dict[str, Any]) -> None:
    check_rule(tmp_path, tiny, row)


def check_rule(root: Path, tiny: Files, row: dict[str, Any]) -> None:
    """Check that the rule finds in the image of a row what the row says."""
    files = {path: member(value) for path, value in row.get("files", {}).items()}
    env = [f"{name}={value}" for name, value in row.get("env", {}).items()]
    layout(root / "image", {"opt/x": b"", **files}, Env=env)
    project = tiny.load()
    (rule,) = [rule for rule in RULES if rule_name(rule) == row["rule"]]
    with ImageFinder().find(str(root / "image")) as image:
        (inspection,) = read_images(image, project, make_plan(project))
        found = [str(finding) for finding in rule(inspection) if not finding.note]
    says = row.get("says", ())
    assert len(found) == len(says)
    assert all(part in text for part, text in zip(says, found, strict=True))
