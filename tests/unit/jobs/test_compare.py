"""The script of a paired comparison."""

import re
import subprocess
from pathlib import Path

import pytest

from imagebuild.bench.alternation import Alternation, ComparisonReader
from imagebuild.core.errors import ConfigError
from imagebuild.jobs.compare import comparison_script, parse_sides

pytestmark = pytest.mark.programs


def read(output: str) -> tuple[Alternation, list[list[str]]]:
    """Return the comparison in the output of a script, and the lines that each run printed."""
    reader = ComparisonReader()
    for number, line in enumerate(output.splitlines(), 1):
        reader.read(line, number)
    (found,) = reader.found
    runs = re.findall(r"compare begin \d+\n(.*?)\n*# imagebuild-compare end", output, re.DOTALL)
    return found, [run.splitlines() for run in runs]


def test_runs_alternate_and_get_their_settings(tmp_path: Path) -> None:
    for version in ("2.30.7", "2.32.3"):
        library = tmp_path / f"nccl-{version}/nvidia/nccl/lib/libnccl.so.2"
        library.parent.mkdir(parents=True)
        library.touch()
    command = ("sh", "-c", 'echo "$LD_LIBRARY_PATH $1"; exit ${2:-0}', "x", "a b")
    sides = parse_sides("nccl=2.30.7,2.32.3")
    text = comparison_script(sides, command, libraries=str(tmp_path), blocks=12, seed=3)
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=True, env={"LD_LIBRARY_PATH": "/x"}
    )
    found, texts = read(done.stdout)
    order, sections = found.order, found.sections
    assert (found.sides, found.blocks) == (sides, 12)
    assert order[0] == (0, 1)
    assert len(order) == 1 + 12
    assert all(
        sorted(first) == [0, 1] and second == first[::-1]
        for first, second in zip(order[1::2], order[2::2], strict=True)
    )
    assert len(set(order[1:])) == 2, "the order of the blocks is random"
    runs = [side for row in order for side in row]
    assert [sections[n].side for n in range(len(runs))] == runs
    for number, section in sections.items():
        folder = tmp_path / f"nccl-{('2.30.7', '2.32.3')[section.side]}/nvidia/nccl/lib"
        assert texts[number][0] == f"{folder}:/x a b"
        assert section.status == 0
    assert comparison_script(sides, command, libraries=str(tmp_path), blocks=12, seed=3) == text


def test_an_absent_library_stops_before_the_first_run(tmp_path: Path) -> None:
    text = comparison_script(parse_sides("nccl=2.30.7,2.32.3"), ["true"], libraries=str(tmp_path), blocks=12, seed=1)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"run `pip install --no-deps --target {tmp_path}/nccl-2.30.7 nvidia-nccl-cu13==2.30.7`" in done.stderr


def test_a_program_that_does_not_exist_is_tried_once() -> None:
    text = comparison_script(parse_sides("env:A=1,2"), ["no-such-program"], libraries="", blocks=12, seed=1)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("compare begin")) == (127, 1)


def test_a_variable_may_be_unset(tmp_path: Path) -> None:
    text = comparison_script(
        parse_sides("env:NCCL_ALGO=Ring,"), ["printenv", "NCCL_ALGO"], libraries="", blocks=12, seed=1
    )
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, env={"NCCL_ALGO": "Tree"})
    found, texts = read(done.stdout)
    assert [(texts[n], found.sections[n].status) for n in (0, 1)] == [(["Ring"], 0), ([], 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nccl", "write nccl=VERSION,VERSION or env:NAME=VALUE,VALUE"),
        ("ucx=1,2", "write nccl=VERSION,VERSION"),
        ("nccl=2.30.7", "name 2 to 12 different values"),
        ("nccl=2.30.7,2.30.7", "name 2 to 12 different values"),
        ("nccl=2.30,2.31.1", "'2.30' is not a version of NCCL; write three numbers"),
        ("nccl=latest,2.31.1", "'latest' is not a version"),
        ("env:NCCL ALGO=a,b", "write nccl="),
        ("env:A=$(id),b", "values may contain"),
        ("env:A=" + ",".join(map(str, range(13))), "name 2 to 12"),
    ],
)
def test_wrong_sides(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_sides(text)
    assert says in str(error.value)


def test_wrong_numbers() -> None:
    sides = parse_sides("nccl=2.30.7,2.32.3")
    for libraries, blocks, says in (
        ("", 12, "--libraries: is missing"),
        ("/x", 9, "--blocks 9: an interval needs at least 10 blocks"),
    ):
        with pytest.raises(ConfigError) as error:
            comparison_script(sides, ["true"], libraries=libraries, blocks=blocks, seed=1)
        assert says in str(error.value)
