"""The command line as a whole: what its help says, what it imports, and what goes to the standard output."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebuild import __version__
from imagebuild.cli.app import COMMANDS, load_command
from tests.conftest import ROOT, Files, ran
from tests.unit.conftest import Call
from tests.unit.test_workflows import SHELL

ENTRIES = {name: summary for section in COMMANDS.values() for name, (_, summary) in section.items()}


def leaves() -> Iterator[tuple[str, Any]]:
    """Every command that does something: those of groups are `group command`."""
    for name in ENTRIES:
        command = load_command(name)
        for sub, child in getattr(command, "commands", {"": command}).items():
            yield f"{name} {sub}".strip(), child


LEAVES = dict(leaves())


@pytest.mark.parametrize("more", [(), ("plan",)])
def test_version(command: Call, more: tuple[str, ...]) -> None:
    assert command("--version", *more) == (0, f"imagebuild {__version__}\n", "")


@pytest.mark.parametrize("name", ENTRIES)
def test_the_line_in_the_help_is_the_commands_own(name: str) -> None:
    help_of_command = load_command(name).help or ""
    assert " ".join(help_of_command.split("\n\n")[0].split()).startswith(ENTRIES[name].rstrip("."))


@pytest.mark.parametrize("name", LEAVES)
def test_a_command_has_an_example_that_calls_it(name: str, command: Call) -> None:
    status, text, _ = command(*name.split(), "--help")
    assert status == 0
    assert re.search(rf"imagebuild {name}\b", text.partition("Examples:")[2])


def imported_by(*words: str) -> set[str]:
    """Modules that a command imports, when texts are cached."""
    code = (
        f"import sys; from imagebuild.__main__ import main; sys.argv = ['imagebuild', *{words}]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(' '.join(sys.modules))"
    )
    done = [ran(sys.executable, "-c", code, cwd=ROOT, check=True).stdout for _ in range(2)]
    return set(done[-1].splitlines()[-1].split())


@pytest.mark.programs
def test_the_help_imports_no_command() -> None:
    found = imported_by("--help")
    assert not found & {"pydantic", "rich", "docker", "jinja2"}
    assert {name for name in found if name.startswith("imagebuild.")} <= {
        "imagebuild.__main__", "imagebuild.cli", "imagebuild.cli.app", "imagebuild.core", "imagebuild.core.errors",
    }  # fmt: skip


@pytest.mark.programs
@pytest.mark.parametrize(
    ("words", "needed", "unneeded"),
    [
        ("render", "imagebuild.render.templates", {"jinja2", "rich", "docker", "requests", "debian", "imagebuild.core.console", "imagebuild.core.settings"}),
        # Both end where they look for an engine.
        ("build --base registry", "imagebuild.build.buildx", {"jinja2", *(f"imagebuild.{n}" for n in ("build.base", "build.bundle", "build.impact", "build.inputs", "publish", "verify"))}),
        ("verify", "imagebuild.verify.rules", {"jinja2", *(f"imagebuild.{n}" for n in ("build", "publish", "jobs", "report"))}),
    ],
)  # fmt: skip
def test_commands_import_what_they_need(
    monkeypatch: pytest.MonkeyPatch, words: str, needed: str, unneeded: set[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    found = imported_by(*words.split(), "quickstart-cuda13.5-debian13-runtime")
    assert needed in found
    assert not found & unneeded


@pytest.mark.parametrize(
    "arguments",
    [("plan",), ("impact", "nothing"), ("limits",), ("limits", "h100"), ("verify", "--list"), ("doctor",)],
)
def test_json_to_the_standard_output_is_alone_there(
    command: Call, tiny: Files, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("imagebuild.build.doctor.examine_machine", lambda: ())
    own = () if arguments[0] in ("limits", "doctor") else ("--project", tiny.root)
    status, out, _ = command(*arguments, *own, "--json", "-")
    assert status == 0
    json.loads(out)
    file = tiny.root / "out.json"
    status, table, _ = command(*arguments, *own, "--json", file)
    assert json.loads(file.read_text()) == json.loads(out)
    assert table != out


def code_of(document: Path) -> str:
    text = document.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join(blocks + re.findall(r"(?<!`)`([^`\n]+)`", text))


CODE = {path.name: code_of(path) for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))}
CODE["workflows"] = "\n".join(SHELL)


@pytest.mark.parametrize("where", CODE)
def test_commands_in_documents_and_workflows_have_options_that_exist(where: str) -> None:
    code = re.sub(r"\$\((?!imagebuild )[^()\n]*\)", "", CODE[where].replace(" -- ", "\n"))
    for found in re.finditer(r"(?<![^\s(;&])imagebuild (?!-)((?:\\\n|[^\n;&|>#])+)", code):
        quoted = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")  # may be another program's command line
        words = quoted.sub("QUOTED", found[1].replace("\\\n", " ")).split()
        name = next((n for n in (" ".join(words[:2]), *words[:1]) if n in LEAVES or n in ENTRIES), "")
        commands = [c for n, c in LEAVES.items() if n == name or n.startswith(f"{name} ")]
        known = {option for c in commands for p in c.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
        assert used <= known if name else where != "workflows", found[0]
