"""The script of a paired comparison."""

import re
import subprocess
from pathlib import Path

import pytest

from imagebuild.bench.alternation import Alternation, ComparisonReader
from imagebuild.bench.read import read_files
from imagebuild.core.errors import ConfigError
from imagebuild.jobs.compare import parse_sides
from imagebuild.jobs.manifest import comparison_script
from tests.conftest import data, ran
from tests.unit.bench.nccl_tables import Table
from tests.unit.jobs.job_fakes import MPIRUN, outer_script, text, write_programs

CASES = data("cases/jobs/compare")

pytestmark = pytest.mark.programs


def read(output: str) -> tuple[Alternation, list[list[str]]]:
    """Return the comparison in the output of a script, and the lines that each run printed."""
    reader = ComparisonReader()
    for number, line in enumerate(output.splitlines(), 1):
        reader.read(line, number)
    (found,) = reader.found
    runs = re.findall(r"compare begin \d+\n(.*?)\n*# imagebuild-compare end", output, re.DOTALL)
    return found, [run.splitlines() for run in runs]


SIDES = parse_sides("nccl=2.30.7,2.32.3")


def with_libraries(folder: Path, inner: str = "") -> Path:
    """Make a library of each side in a folder, and return the folder."""
    for version in ("2.30.7", "2.32.3"):
        library = folder / f"nccl-{version}/{inner}libnccl.so.2"
        library.parent.mkdir(parents=True)
        library.touch()
    return folder


def test_runs_alternate_and_get_their_settings(tmp_path: Path) -> None:
    with_libraries(tmp_path, "nvidia/nccl/lib/")
    command = ("sh", "-c", 'echo "$LD_LIBRARY_PATH $1"; exit ${2:-0}', "x", "a b")
    text = comparison_script(SIDES, command, libraries=str(tmp_path), blocks=12, seed=3)
    found, texts = read(ran("bash", "-c", text, check=True, env={"LD_LIBRARY_PATH": "/x"}).stdout)
    order, sections = found.order, found.sections
    assert (found.sides, found.blocks) == (SIDES, 12)
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
    assert comparison_script(SIDES, command, libraries=str(tmp_path), blocks=12, seed=3) == text


def test_an_absent_library_stops_before_the_first_run(tmp_path: Path) -> None:
    done = ran("bash", "-c", comparison_script(SIDES, ["true"], libraries=str(tmp_path), blocks=12, seed=1))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"run `pip install --no-deps --target {tmp_path}/nccl-2.30.7 nvidia-nccl-cu13==2.30.7`" in done.stderr


def test_the_folder_of_libraries_may_be_named_from_the_current_folder(tmp_path: Path) -> None:
    """Programs may change the folder, so they get the whole path. Ranks of a job start in another folder."""
    with_libraries(tmp_path / "-libs")
    command = ["bash", "-c", "cd / && ls ${LD_LIBRARY_PATH%%:*}"]
    script = comparison_script(SIDES, command, libraries="-libs", blocks=10, seed=1)
    _, texts = read(ran("bash", "-c", script, cwd=tmp_path).stdout)
    assert {*map(tuple, texts)} == {("libnccl.so.2",)}
    with pytest.raises(ConfigError, match="--libraries libs: ranks start in other folders; write the whole path"):
        text("mpijob --profile h100 --fabric ib --nodes 1 --compare nccl=2.30.7,2.32.3 --libraries libs")


def test_a_program_that_does_not_exist_is_tried_once() -> None:
    sides = parse_sides("env:A=1,2")
    done = ran("bash", "-c", comparison_script(sides, ["no-such-program"], libraries="", blocks=12, seed=1))
    assert (done.returncode, done.stdout.count("compare begin")) == (127, 1)


def test_a_variable_may_be_unset(tmp_path: Path) -> None:
    sides, command = parse_sides("env:NCCL_ALGO=Ring,"), ["printenv", "NCCL_ALGO"]
    text = comparison_script(sides, command, libraries="", blocks=12, seed=1)
    found, texts = read(ran("bash", "-c", text, check=True, env={"NCCL_ALGO": "Tree"}).stdout)
    assert [(texts[n], found.sections[n].status) for n in (0, 1)] == [(["Ring"], 0), ([], 1)]


@pytest.mark.parametrize(("text", "says"), CASES["wrong-sides"])
def test_wrong_sides(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_sides(text)
    assert says in str(error.value)


@pytest.mark.parametrize(("libraries", "blocks", "says"), CASES["wrong-numbers"])
def test_wrong_numbers(libraries: str, blocks: int, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        comparison_script(SIDES, ["true"], libraries=libraries, blocks=blocks, seed=1)
    assert says in str(error.value)


@pytest.mark.parametrize(("fault", "problem"), CASES["a-job-that-compares"])
def test_a_job_that_compares(fault: str, problem: str, tmp_path: Path) -> None:
    """The script of a launcher, with a stand-in for mpirun and for the benchmark."""
    libraries = with_libraries(tmp_path / "libs")
    for version, rate in ("2.30.7", 350.0), ("2.32.3", 340.0):
        is_odd = version == "2.32.3"
        loaded = "2.30.7" if is_odd and fault == "2.30.7" else version
        ranks = 7 if is_odd and fault == "7 ranks" else 8
        table = Table(sizes=(1 << 30,), ranks=ranks, speed={1 << 30: rate}.__getitem__).text()
        output = f"NCCL version {loaded}+cuda13.0\n{table}".replace("nccl-library=23007", "")
        (libraries / f"nccl-{version}/output").write_text(output)
    if fault == "absent":
        (libraries / "nccl-2.32.3/libnccl.so.2").unlink()
    programs = write_programs(tmp_path, {"mpirun": MPIRUN, "ssh": "", "sshd": "", "all_reduce_perf": CASES["program"]})
    line = f"mpijob --profile h100 --fabric ib --nodes 1 --param programs={programs}"
    made = text(f"{line} --compare nccl=2.30.7,2.32.3 --libraries {libraries}")
    env = {"PATH": f"{programs}:/usr/bin:/bin", "OMPI_COMM_WORLD_RANK": "0"}
    done = ran("/bin/bash", "-c", outer_script(made), env=env, stderr=subprocess.STDOUT, cwd=programs)
    assert (done.returncode, problem in done.stdout) == (bool(problem), True), done.stdout
    found, texts = read(done.stdout)
    assert (found.blocks, len(texts)) == ((0, 2) if problem else (12, 26))
    if not problem:
        (tmp_path / "a.log").write_text(done.stdout)
        (pair,) = read_files([tmp_path / "a.log"]).paired
        assert (pair.faults, pair.problems, [item.verdict for item in pair.differences]) == ((), (), ["slower"])


def test_images_are_put_into_the_command() -> None:
    sides = parse_sides("image=a.io/x/nccl:1,a.io/x/nccl@sha256:00ff")
    command = ["printf", "%s|", "--image={image}", "a b", "{image}"]
    script = comparison_script(sides, command, libraries="", blocks=10, seed=1)
    found, texts = read(ran("bash", "-c", script, check=True).stdout)
    for number, section in found.sections.items():
        image = sides[section.side].removeprefix("image=")
        assert texts[number] == [f"--image={image}|a b|{image}|"]
