"""An MkDocs hook: make the README the first page, and generate the references when the site is built."""

import ast
import inspect
import os
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from imagebuild.cli.app import COMMANDS, load_command
from imagebuild.core.fields import Model
from imagebuild.core.settings import Settings
from imagebuild.project.component import Component
from imagebuild.project.load import load_project
from imagebuild.project.matrix import Matrix
from imagebuild.verify.checks import ImageCheck, select_checks
from imagebuild.verify.rules import IMAGE_CHECKS

ROOT = Path(__file__).parent.parent
COMMIT = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/blob/{GITHUB_SHA}"
REPOSITORY = COMMIT.format(**os.environ) if "GITHUB_REPOSITORY" in os.environ else ROOT.as_uri()
FILES: dict[str, type[Model]] = {"matrix.yaml": Matrix, "component.yaml": Component, "config.yaml": Settings}
"""Maps each file that people write to the type that reads it."""


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are not files in this folder."""
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    pages = {"index.md": readme, "commands.md": commands_page(), "files.md": files_page(), "checks.md": checks_page()}
    pages["modules.md"] = modules_page()
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - MkDocs passes it
    """Point links at files without a page of their own to the repository."""

    def target(link: re.Match[str]) -> str:
        here = ROOT / ("README.md" if page.file.src_uri == "index.md" else f"docs/{page.file.src_uri}")
        file = (here.parent / link[1]).resolve()
        ours = file.exists() and not files.get_file_from_path(os.path.relpath(file, ROOT / "docs"))
        return f"]({REPOSITORY}/{file.relative_to(ROOT)}{link[2]})" if ours else link[0]

    return re.sub(r"\]\(([^)#:\s]+)(#[^)\s]*|)\)", target, markdown)


def cell(text: str) -> str:
    """Return a text as one cell of a table. In code, Python-Markdown takes `|` as it is."""
    return re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or "\\|", " ".join(text.split()))


# Commands


def commands_page() -> str:
    """Return the reference of all commands, from their help."""
    text = "# Commands\n\n`imagebuild COMMAND --help` prints the same, with examples.\n"
    for section, entries in COMMANDS.items():
        lines = [line for name in entries for line in command_lines(name, load_command(name))]
        text += "\n".join([f"\n## {section}", *lines, ""])
    return text


def command_lines(name: str, command: click.Command) -> Iterator[str]:
    """Yield the section of a command, or the sections of all commands in a group."""
    if inner := getattr(command, "commands", None):
        for word, element in inner.items():
            yield from command_lines(f"{name} {word}", element)
        return
    context = click.Context(command)
    arguments = [p.make_metavar(context) for p in command.params if isinstance(p, click.Argument)]
    yield f"\n### imagebuild {name}\n\n`imagebuild {' '.join([name, *arguments])}`\n"
    yield inspect.cleandoc(command.help or "") + "\n\n| option | |\n|---|---|"
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.help and not parameter.hidden:
            value = "" if parameter.is_flag else f" {parameter.make_metavar(context)}"
            usage = ", ".join(parameter.opts) + value
            variable = f" Or the variable `{parameter.envvar}`." if parameter.envvar else ""
            yield f"| `{usage}` | {cell(parameter.help)}{variable} |"


# Keys of the files


def files_page() -> str:
    """Return the reference of all keys, from the types that read the files."""
    text = "# Keys of the files\n"
    for name, model in FILES.items():
        schema = model.model_json_schema(by_alias=True)
        inner = {n: s for n, s in sorted(schema.get("$defs", {}).items()) if "properties" in s}
        tables = [line for title, part in {"The file": schema, **inner}.items() for line in key_lines(title, part)]
        text += "\n".join([f"\n## {name}", *tables, ""])
    return text


def key_lines(title: str, schema: dict[str, Any]) -> Iterator[str]:
    """Yield a section: a description and a table of keys."""
    yield f"\n### {title}\n\n{cell(schema.get('description', ''))}\n\n| key | value | |\n|---|---|---|"
    for name, value in schema["properties"].items():
        needed = "**required.** " if name in schema.get("required", ()) else ""
        yield f"| `{name}` | {kind_of(value)} | {needed}{cell(value.get('description', ''))} |"


def kind_of(schema: dict[str, Any]) -> str:
    """Return the kind of a value in a few words: `text`, `list of whole number`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        kinds = [kind_of(element) for element in schema["anyOf"] if element.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {kind_of(schema['items'])}" if "items" in schema else "list"
    if schema.get("type") == "object":
        values = next(iter(schema.get("patternProperties", {}).values()), schema.get("additionalProperties"))
        return f"mapping to {kind_of(values)}" if isinstance(values, dict) else "mapping"
    words = {"string": "text", "integer": "whole number", "boolean": "true or false", "number": "number"}
    return words.get(str(schema.get("type")), "text")


# Checks


def checks_page() -> str:
    """Return the reference of all checks, grouped by what they need to run."""

    def needs(entry: ImageCheck) -> tuple[str, ...]:
        return tuple(entry.check.needs) or ("a container",) if entry.check else ()

    checks = sorted(select_checks(load_project(ROOT), IMAGE_CHECKS), key=lambda e: (len(needs(e)), needs(e)))
    text = "# Checks\n"
    for names, group in groupby(checks, key=needs):
        title = f"Needs {' and '.join(names)}" if names else "Reads the image, starts nothing"
        rows = [f"| {entry} | {cell(entry.description)} |" for entry in group]
        text += "\n".join(["", f"## {title}", "", "| check | what it proves |", "|---|---|", *rows, ""])
    return text


# Modules


def modules_page() -> str:
    """Return the list of all modules, from the first sentences of their docstrings."""
    text = "# Modules\n"
    for package, modules in groupby(sorted(ROOT.glob("imagebuild/*/*.py")), key=lambda path: path.parent.name):
        rows = [f"| `{path.stem}` | {cell(subject_of(path))} |" for path in modules if path.stem != "__init__"]
        text += "\n".join(["", f"## {package}", "", "| module | subject |", "|---|---|", *rows, ""])
    return text


def subject_of(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.split(r"(?<=\.)\s", docstring, maxsplit=1)[0]
