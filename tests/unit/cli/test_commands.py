"""The command line as a whole: what its help says, what it imports, and what goes to the standard output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from imagebuild.cli import COMMANDS, app, load_command
from tests.conftest import Files
from tests.unit.conftest import Call

ENTRIES = {name: entry for section in COMMANDS.values() for name, entry in section.items()}


def leaves() -> Iterator[tuple[str, Any]]:
    """Every command that does something: those of groups are `group command`."""
    for name, entry in ENTRIES.items():
        command = load_command(name, entry)
        for sub, child in getattr(command, "commands", {"": command}).items():
            yield f"{name} {sub}".strip(), child


LEAVES = dict(leaves())


@pytest.mark.parametrize("name", ENTRIES)
def test_the_line_in_the_help_is_the_commands_own(name: str) -> None:
    help_of_command = load_command(name, ENTRIES[name]).help
    assert " ".join(help_of_command.split("\n\n")[0].split()).startswith(ENTRIES[name].summary.rstrip("."))


@pytest.mark.parametrize("name", LEAVES)
def test_a_command_has_an_example_that_calls_it(name: str) -> None:
    assert re.search(rf"imagebuild {name}\b", LEAVES[name].epilog or "")


@pytest.mark.parametrize("name", LEAVES)
def test_options_are_explained_in_sentences(name: str) -> None:
    for parameter in LEAVES[name].params:
        if parameter.name == "help":
            continue
        text = parameter.help or ""
        assert re.match(r"[A-Z].*\S \S.*\.$", text, re.DOTALL), f"{name} {parameter.name}: {text!r}"
        assert parameter.metavar or parameter.is_flag, f"{name} {parameter.name}: has no metavar"


def test_the_same_option_means_the_same_in_every_command() -> None:
    """An option's text is the same wherever it is shared, but for what depends on the command."""
    own = {
        "--catalog", "--database", "--key", "--no-tlog", "--nodes", "--offline", "--output", "--platform", "--profile",
        "--results", "--set", "--sign", "--with", "--jobs",
    }  # fmt: skip
    meanings: dict[str, set[str]] = {}
    for command in LEAVES.values():
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    meanings.setdefault(option, set()).add(parameter.help)
    assert {option for option, texts in meanings.items() if len(texts) > 1} <= own


@pytest.mark.programs
def test_the_help_imports_no_command() -> None:
    code = (
        "import sys; from imagebuild.__main__ import main; sys.argv = ['imagebuild', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith('imagebuild.') or m in ('pydantic', 'rich', 'docker', 'jinja2')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout.splitlines()[-1].replace("'", '"'))) <= {
        "imagebuild.__main__", "imagebuild.cli", "imagebuild.cli.app", "imagebuild.core", "imagebuild.core.errors",
    }  # fmt: skip


def test_completion_knows_commands_without_importing_them() -> None:
    environ = {"_IMAGEBUILD_COMPLETE": "complete_bash", "COMP_WORDS": "imagebuild p", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], prog_name="imagebuild", env=environ)
    assert done.output.split() == ["plan", "publish", "prune"]


@pytest.mark.parametrize(
    "arguments",
    [("plan",), ("plan", "--from", "nothing"), ("limits",), ("limits", "h100"), ("verify", "--list"), ("doctor",)],
)
def test_json_to_the_standard_output_is_alone_there(
    command: Call, tiny: Files, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("imagebuild.build.doctor.examine_machine", lambda: ())
    own = () if arguments[0] in ("limits", "doctor") else (
        "--matrix", tiny.root / "matrix.yaml", "--dockerfiles", tiny.root / "dockerfiles"
    )  # fmt: skip
    status, out, _ = command(*arguments, *own, "--json", "-")
    assert status == 0
    json.loads(out)
    file = tiny.root / "out.json"
    status, table, _ = command(*arguments, *own, "--json", file)
    assert json.loads(file.read_text()) == json.loads(out)
    assert table != out
