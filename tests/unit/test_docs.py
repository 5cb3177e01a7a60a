"""README.md, docs/ and the pages that the site generates."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebuild.cli.app import COMMANDS, load_command
from imagebuild.project.plan import Project
from imagebuild.verify.checks import select_checks
from imagebuild.verify.rules import IMAGE_CHECKS
from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / ".github").rglob("*.md")), *PAGES]


@pytest.fixture(scope="module")
def site() -> Any:
    """The hook that generates pages when MkDocs builds the site."""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs/site.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Sizes


def test_the_docs_stay_short() -> None:
    assert len(PAGES) <= 16
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


# Links and names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL))
    gone = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not gone


def test_every_variable_that_the_program_reads_is_described() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "imagebuild").rglob("*.py"))
    read = set(re.findall(r'"(IMAGEBUILD_[A-Z_]+)"', code)) - {"IMAGEBUILD_NODES"}  # it writes that
    page = (ROOT / "docs/reference.md").read_text()
    assert read
    assert {name for name in read if f"`{name}`" not in page} == set()


# Generated pages


def leaves() -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, such as `plan` and `attest verify`."""
    for name in (name for section in COMMANDS.values() for name in section):
        command = load_command(name)
        for sub, child in getattr(command, "commands", {"": command}).items():
            yield f"{name} {sub}".strip(), child


def test_the_page_of_commands_has_every_command_and_option(site: Any) -> None:
    sections = dict(re.findall(r"^### imagebuild ([^\n]+)\n(.*?)(?=^##|\Z)", site.commands_page(), re.M | re.S))
    commands = dict(leaves())
    assert set(sections) == set(commands)
    for name, command in commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.help and not parameter.hidden:
                assert all(
                    f"`{option}" in sections[name] or f", {option}" in sections[name] for option in parameter.opts
                )


def properties(schema: dict[str, Any]) -> set[str]:
    return {key for part in (schema, *schema.get("$defs", {}).values()) for key in part.get("properties", ())}


def test_the_page_of_keys_has_every_key(site: Any) -> None:
    text = site.files_page()
    assert list(site.FILES) == re.findall(r"^## (.+)$", text, re.MULTILINE)
    for name, model in site.FILES.items():
        part = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert properties(model.model_json_schema(by_alias=True)) == set(
            re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)
        )


def test_the_page_of_checks_has_every_check(site: Any, project: Project) -> None:
    listed = re.findall(r"^\| (\S+/\S+) \|", site.checks_page(), re.MULTILINE)
    assert sorted(listed) == sorted(str(check) for check in select_checks(project, IMAGE_CHECKS))
