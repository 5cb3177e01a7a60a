"""docs/architecture.md describes packages, their order and modules as they are; test files are named after modules."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
MODULES = sorted((ROOT / "imagebuild").glob("*/*.py"))
WITHOUT_MODULE = {"bench/damage": "reader and judge together, over all samples"}
"""Test files that are not named after one module, with the reason."""
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rows(page: str, heading: str) -> list[tuple[set[str], set[str]]]:
    """Return the names in backticks in the first two columns of the first table after a heading."""
    table = re.search(
        rf"^{heading}\n(?:[^|\n][^\n]*\n|\n)*\|[^\n]*\n\|---[^\n]*\n((?:\|[^\n]*\n)+)", page, re.MULTILINE
    )
    assert table
    cells = [line.split("|")[1:3] for line in table[1].splitlines()]
    return [(set(re.findall("`(.+?)`", first)), set(re.findall("`(.+?)`", second))) for first, second in cells]


def test_the_first_line_of_every_module_names_its_subject() -> None:
    """The site lists these lines, and so does the command in docs/architecture.md."""
    firsts = {path: path.read_text().partition("\n")[0] for path in MODULES}
    assert [str(path) for path, first in firsts.items() if not re.match('"""[A-Z`].{12}', first)] == []


def test_every_test_file_names_a_module() -> None:
    """Each tests/unit/<package>/test_<module>.py tests imagebuild/<package>/<module>.py."""
    modules = {f"{path.parent.name}/{path.stem}" for path in MODULES}
    tests = {f"{path.parent.name}/{path.stem.removeprefix('test_')}" for path in ROOT.glob("tests/unit/*/test_*.py")}
    assert tests - modules == set(WITHOUT_MODULE)


def test_the_order_is_the_one_that_is_checked() -> None:
    """The table lists the packages that make images, those that measure clusters, and `core`, which both import."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    images, measuring = (
        [set(re.findall(r"imagebuild\.(\w+)", layer)) for layer in contract["layers"]]
        for contract in contracts
        if contract["type"] == "layers"
    )
    assert images.pop() == measuring.pop() == {"core"}
    assert [packages for packages, _ in rows(PAGE, "# Architecture")] == [*images, *measuring, {"core"}]
    assert set().union(*images, *measuring, {"core"}) == {path.parent.name for path in MODULES}
    forbidden = {
        frozenset(module.removeprefix("imagebuild.") for module in contract["source_modules"]): {
            module.removeprefix("imagebuild.") for module in contract["forbidden_modules"]
        }
        for contract in contracts
        if contract["type"] == "forbidden" and not contract.get("allow_indirect_imports")
    }
    assert forbidden[frozenset().union(*measuring)] == set().union(*images)
    without_measuring = set().union(*images, {"core"}) - {"cli", "verify", "publish"}
    assert forbidden[frozenset(without_measuring)] == set().union(*measuring)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_of_a_module_exists(document: Path) -> None:
    for path in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", document.read_text()):
        assert (ROOT / path).is_file() or (ROOT / "imagebuild" / path).is_file(), path


def test_chains_of_imports_are_short() -> None:
    """A chain goes from a module through imported modules to a module that imports nothing of the project."""
    graph = grimp.build_graph("imagebuild")

    @cache
    def chain(module: str) -> int:
        imported = graph.find_modules_directly_imported_by(module) - {"imagebuild"}
        return 1 + max(map(chain, imported), default=0)

    longest = {module: chain(module) for module in graph.modules}
    module = max(longest, key=longest.__getitem__)
    assert longest[module] <= 12, (module, longest[module])
