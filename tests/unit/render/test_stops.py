"""What ends a build says why; conditions of components name what an image has, not which image it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from imagebuild.project import Project
from tests.conftest import ROOT

COMPONENTS = ROOT / "dockerfiles" / "components"
PLACE = r"(?:^\s*|[;&|({]\s*|\b(?:then|do|else)\s+)"
WORDLESS = re.compile(rf"{PLACE}!?\s*(?:grep|test|\[|\[\[|cmp|diff)\s")
ASKED = re.compile(r"^\s*(?:if|elif|while|until)\s|\|\|")


def wordless(script: str) -> Iterator[str]:
    """Commands that end a script under `set -e` and print nothing: alone or in a pipe, not asked about or answered."""
    joined = re.sub(r"(\\|\||&&)\n\s*", r"\1 ", script)
    for line in joined.splitlines():
        command = re.sub(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"", "''", line)
        if script.startswith("#!/bin/sh"):  # which has no pipefail
            command = re.sub(r"[^|;]*[^|]\|(?!\|)", "", command)
        if not command.lstrip().startswith("#") and WORDLESS.search(command) and not ASKED.search(command):
            yield line.strip()


def scripts() -> Iterator[tuple[str, str]]:
    for path in [*ROOT.glob("dockerfiles/*.j2"), *COMPONENTS.glob("*/*.j2"), *COMPONENTS.glob("*/files/*")]:
        if path.suffix == ".j2" or path.read_text().startswith("#!"):
            yield str(path.relative_to(COMPONENTS.parent)), path.read_text()
    for path in COMPONENTS.glob("*/component.yaml"):
        packages = yaml.safe_load(path.read_text()).get("packages", {})
        for when in ("before-install", "after-install"):
            yield f"{path.parent.name}: {when}", packages.get(when, "")


def test_no_step_ends_without_a_word() -> None:
    assert [f"{place}: {line}" for place, text in scripts() for line in wordless(text)] == []


def test_such_a_step_is_seen() -> None:
    silent = ["grep -F x file", "cd /x; [ -e y ]", "for a in b; do test -d $a; done", "grep x f |\n  xargs rm",
              "#!/bin/sh\nsort | grep x"]  # fmt: skip
    fine = ["grep x f || stop", "if grep x f; then :; fi", 'echo "grep x"', "find . -exec grep x {} ';'",
            "#!/bin/sh\ngrep x f | sort"]  # fmt: skip
    assert all(list(wordless(script)) for script in silent)
    assert not [line for script in fine for line in wordless(script)]


def test_no_component_knows_an_image_by_its_name(project: Project) -> None:
    named = {
        f"{name}: {entry.when}"
        for name, document in project.components.items()
        for key in ("supports", "excludes", "facts", "env", "checks", "waivers")
        for entry in getattr(document.model, key)
        if "image" in entry.when
    }
    assert named == set()
