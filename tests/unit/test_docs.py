"""README.md, docs/ and the pages that the site generates."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import pytest

from imagebuild.cli.app import COMMANDS, load_command
from imagebuild.project.project import Project
from imagebuild.verify.checks import select_checks
from imagebuild.verify.rules import IMAGE_CHECKS
from tests.conftest import ROOT, ran

PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / ".github").rglob("*.md")), *PAGES]


WIDTH = 100
"""Characters of a code block that fit beside the navigation at 1280 pixels; tests/browser/test_docs.py measures it."""


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    language: str
    lines: list[str]
    needs: str
    """What running it takes, from the comment `<!-- needs: engine -->` before it. Default: nothing."""
    number: int
    """The line of the fence."""

    @property
    def joined(self) -> list[str]:
        """The lines, those that end with a backslash joined with the next one."""
        return "\n".join(self.lines).replace("\\\n", " ").split("\n")

    def commands(self) -> list[str]:
        """Return the lines that a shell runs; a console has output, too."""
        if self.language == "console":
            return [line[2:] for line in self.joined if line.startswith("$ ")]
        return self.joined if self.language == "sh" else []


def blocks(document: Path) -> Iterator[Block]:
    needs, inside = "", None
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if inside is not None and line.startswith("```"):
            yield inside
            needs, inside = "", None
        elif inside is not None:
            inside.lines.append(line)
        elif line.startswith("```"):
            inside = Block(line[3:].strip(), [], needs, number)
        elif comment := re.fullmatch("<!-- needs: (.+) -->", line):
            needs = comment[1]
        elif line:
            needs = ""


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
    assert sum(len(page.read_text().split()) for page in PAGES) <= 22_000
    assert len((ROOT / "docs/evidence.md").read_text().split()) <= 1_500
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


# Links and names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL))
    gone = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not gone


WRITTEN = {"IMAGEBUILD_NODES", "IMAGEBUILD_OWNER"}
"""Variables that imagebuild sets for other programs."""


def test_every_variable_that_the_program_reads_is_described() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "imagebuild").rglob("*.py"))
    read = set(re.findall(r'"(IMAGEBUILD_[A-Z_]+)"', code)) - WRITTEN
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


# Blocks of code

NEEDS = {"cluster", "engine", "files", "git", "network", "registry", "root"}
"""What a block may need: among these `git`, a history, and `files`, those of the reader."""
FILES = {"all_reduce.log": ROOT / "tests/data/nccl-logs/001.txt"}
"""Maps files that the commands read and the reader has to the tests' data."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_block_of_code_fits_on_a_laptop(document: Path) -> None:
    assert [(b.number, line) for b in blocks(document) for line in b.lines if len(line) > WIDTH] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_say_what_they_are_and_what_they_need(document: Path) -> None:
    targets = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = {target for line in targets for target in line.split()}
    for block in blocks(document):
        assert block.language, (document.name, block.number)
        assert {*block.needs.split(", ")} - {""} <= NEEDS, block
        for line in block.commands():
            made = re.match(r"make ((?:[a-z-]+ ?)+)", line)
            assert not made or {*made[1].split()} <= known, line


def calls(block: Block) -> Iterator[list[str]]:
    """Yield the words of each call of imagebuild in a block, also of those that `each` makes."""
    for line in block.commands():
        for part in re.split(r" -- |&& |\|\| |; ", line):
            if found := re.match(r"(?:\w+=\S+ )*imagebuild (.*)", part.strip()):
                yield list(
                    takewhile(lambda word: word not in ("|", "&", ">", "<"), shlex.split(found[1], comments=True))
                )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_command_line_takes_the_options_of_every_call(document: Path) -> None:
    """Also of those that need something, and so are not run."""
    known = dict(leaves())
    for words in (words for block in blocks(document) for words in calls(block)):
        name = next(name for name in (" ".join(words[:2]), words[0]) if name in known)
        command = known[name]
        _, rest, _ = command.make_parser(click.Context(command)).parse_args(words[len(name.split()) :])
        assert not rest, words


def pattern(line: str) -> str:
    """Return the expression for a line of output: `…` is any lines, or any part of one."""
    return r"(?:.*\n)*" if line == "…" else re.escape(line.rstrip()).replace("…", ".*") + r"\n"


class Shell:
    """Runs the blocks of a page in a folder that they share, without an engine."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "here"
        self.folder.mkdir()
        for name, file in FILES.items():
            (self.folder / name).symlink_to(file)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {
            "PATH": path,
            "HOME": str(root),
            "DOCKER_HOST": "tcp://127.0.0.1:1",
            "COLUMNS": str(WIDTH),
            "LANG": "C.UTF-8",
        }

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        done = ran("bash", "-euo", "pipefail", "-c", f"{script}\npwd > {self.root}/pwd", cwd=self.folder, env=self.env)
        if done.returncode == 0:
            self.folder = Path((self.root / "pwd").read_text().strip())
        return done

    def show(self, block: Block) -> None:
        """Write the file that a block is, run its commands, and compare what they print with the block."""
        if block.lines and (named := re.fullmatch(r"# ([\w/-]+\.\w+)", block.lines[0])):
            (self.folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / named[1]).write_text("\n".join([*block.lines[1:], ""]))
        if block.language == "sh" and not block.needs:
            done = self.run("\n".join(block.lines))
            assert done.returncode == 0, (block, done.stdout, done.stderr)
        if block.language == "console" and not block.needs:
            lines = block.joined
            starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
            for start, end in zip(starts, [*starts[1:], None], strict=True):
                done = self.run(lines[start][2:])
                printed = "".join(f"{line.rstrip()}\n" for line in (done.stdout + done.stderr).splitlines())
                wanted = "".join(map(pattern, lines[start + 1 : end]))
                assert re.fullmatch(wanted, printed), (block.number, lines[start], printed)


@pytest.mark.programs
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_run_and_print_what_the_page_shows(document: Path, tmp_path: Path) -> None:
    """A block that begins with `# NAME.yaml` is that file. Those whose comment says what they need are not run."""
    shell = Shell(tmp_path)
    for block in blocks(document):
        shell.show(block)
