"""Pages that `make golden` writes from the code, and what a page by hand must mention."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from imagebuild.cli.app import COMMANDS, load_command
from imagebuild.core.fields import Model
from imagebuild.core.settings import Settings
from imagebuild.project.component import Component
from imagebuild.project.matrix import Matrix
from tests.conftest import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def kind_of(schema: dict[str, Any]) -> str:
    """What a value may be, in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(
            dict.fromkeys(kind_of(element) for element in schema["anyOf"] if element.get("type") != "null")
        )
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {kind_of(schema['items'])}" if "items" in schema else "list"
    if schema.get("type") == "object":
        values = next(iter(schema.get("patternProperties", {}).values()), schema.get("additionalProperties"))
        return f"mapping to {kind_of(values)}" if isinstance(values, dict) else "mapping"
    words = {"string": "text", "integer": "whole number", "boolean": "true or false", "number": "number"}
    return words.get(str(schema.get("type")), "text")


def keys(title: str, schema: dict[str, Any]) -> Iterator[str]:
    """A section: a description and a table of keys."""
    yield f"\n### {title}\n\n{cell(schema.get('description', ''))}\n\n| key | what it is | |\n|---|---|---|"
    for name, value in schema["properties"].items():
        needed = "**required.** " if name in schema.get("required", ()) else ""
        yield f"| `{name}` | {kind_of(value)} | {needed}{cell(value.get('description', ''))} |"


def reference(model: type[Model]) -> Iterator[str]:
    schema = model.model_json_schema(by_alias=True)
    yield from keys("The file", schema)
    for name, element in sorted(schema.get("$defs", {}).items()):
        if "properties" in element:
            yield from keys(name, element)


def test_the_reference_of_files_is_fresh(golden: Callable[[str, str], None]) -> None:
    text = "# Reference of the files\n\nWritten by `make golden` from the types that read them.\n"
    for name, model in (("matrix.yaml", Matrix), ("component.yaml", Component), ("config.yaml", Settings)):
        text += "\n".join([f"\n## {name}", *reference(model), ""])
    golden("docs/reference.md", text)


def command_lines(name: str, command: Any) -> Iterator[str]:
    if inner := getattr(command, "commands", None):
        for word, element in inner.items():
            yield from command_lines(f"{name} {word}", element)
        return
    words = [p for p in command.params if p.param_type_name == "argument"]
    arguments = " ".join((p.metavar if p.required else f"[{p.metavar}]") + "..." * (p.nargs < 0) for p in words)
    yield f"\n### imagebuild {name}\n\n`imagebuild {' '.join([name, *([arguments] if arguments else [])])}`\n"
    yield (command.help or "").strip() + "\n\n| option | |\n|---|---|"
    for parameter in command.params:
        if parameter.param_type_name != "argument" and parameter.help and not parameter.hidden:
            usage = ", ".join(parameter.opts) + (f" {parameter.metavar}" if parameter.metavar else "")
            variable = f" Or the variable `{parameter.envvar}`." if parameter.envvar else ""
            yield f"| `{cell(usage)}` | {cell(parameter.help)}{variable} |"


def test_the_page_of_commands_is_fresh(golden: Callable[[str, str], None]) -> None:
    text = "# Every command\n\nWritten by `make golden`; `imagebuild COMMAND --help` says the same, with examples.\n"
    for section, entries in COMMANDS.items():
        lines = [line for name in entries for line in command_lines(name, load_command(name))]
        text += "\n".join([f"\n## {section}", *lines, ""])
    golden("docs/commands.md", text)


def test_every_variable_that_the_program_reads_is_described() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "imagebuild").rglob("*.py"))
    read = set(re.findall(r'"(IMAGEBUILD_[A-Z_]+)"', code)) - {"IMAGEBUILD_NODES"}  # it writes that
    page = (ROOT / "docs/configuration.md").read_text()
    assert read
    assert {name for name in read if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Any) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL))
    gone = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not gone


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
