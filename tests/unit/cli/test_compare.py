"""The commands `imagebuild compare` and `bisect`, with a program whose speed and faults belong to the library that it loads."""

import json
import random
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.unit.bench.nccl_tables import Table
from tests.unit.conftest import Call

pytestmark = pytest.mark.programs

PROGRAM = """\
#!/bin/bash
echo "a:1:1 [0] NCCL INFO NCCL_ALGO set by environment to $NCCL_ALGO"
echo "NCCL version 2.30.7+cuda13.0"
cat "{folder}/$NCCL_ALGO$((RANDOM % 3))"
"""


def _constant(rate: float) -> Callable[[int], float]:
    return lambda _: rate


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program whose algorithm Tree is 3 % slower than Ring. Its speed varies."""
    for name, rate in ("Ring", 350.0), ("Tree", 339.5):
        for number in range(3):
            speed = _constant(rate + number / 10)
            table = Table(sizes=(1 << 30,), ranks=4, seed=number, speed=speed)
            (tmp_path / f"{name}{number}").write_text(table.text())
    path = tmp_path / "all_reduce_perf"
    path.write_text(PROGRAM.replace("{folder}", str(tmp_path)))
    path.chmod(0o755)
    return path


def test_a_slower_side_is_named_and_the_log_can_be_read_again(command: Call, program: Path, tmp_path: Path) -> None:
    log, found, junit = tmp_path / "compare.log", tmp_path / "report.json", tmp_path / "junit.xml"
    status, out, err = command("compare", "env:NCCL_ALGO=Ring,Tree", "-o", log, "--", program)
    assert status == 1, err
    assert "1073741824 bytes: env:NCCL_ALGO=Tree: slower" in out.replace("\n", " ")
    status, _, _ = command("report", log, "--json", found, "--junit", junit, "--allow", "unvalidated")
    assert status == 1
    (difference,) = json.loads(found.read_text())["paired"][0]["differences"]
    assert -3.5 < difference["low"] < difference["high"] < -2.5
    assert "env:NCCL_ALGO=Tree" in junit.read_text()
    assert command("report", log, "--allow-loss", "5", "--allow", "unvalidated")[0] == 0
    assert command("report", found, "--allow-loss", "5", "--allow", "unvalidated")[0] == 0


def test_ssh_gets_the_script_as_one_word(command: Call, program: Path, tmp_path: Path) -> None:
    """ssh joins its arguments with blanks and gives them to a shell, so the script must be quoted."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    log = tmp_path / "compare.log"
    status, _, err = command(
        "compare", "env:NCCL_ALGO=Ring,Tree", "--runner", f"exec:{ssh} node", "-o", log, "--", program
    )
    assert status == 1, err
    text = log.read_text()
    assert text.startswith("# imagebuild-compare sides "), "the shell of ssh runs nothing but bash"
    assert text.count("imagebuild-compare end 0") == 26


VERSIONS = (
    "2.27.7",
    "2.28.3",
    "2.28.7",
    "2.28.9",
    "2.29.2",
    "2.29.3",
    "2.29.7",
    "2.30.3",
    "2.30.4",
    "2.30.7",
    "2.31.2",
    "2.32.3",
)
NCCL = ("bisect", "nccl", "--good", VERSIONS[0], "--bad", VERSIONS[-1], "--offline")  # fmt: skip
BISECTED = """\
#!/bin/bash
folder=${LD_LIBRARY_PATH%%:*}
echo >> "$folder/runs"
if [ -e "$folder/hangs" ]; then sleep 60; fi
cat "$folder/table$((RANDOM % 5))"
if [ -e "$folder/fails" ]; then exit 1; fi
"""


def _code(version: str) -> int:
    first, second, third = map(int, version.split("."))
    return first * 10000 + second * 100 + third


def plant(libraries: Path, version: str, rate: float = 350, noise: float = 0.1, loaded: str = "") -> Path:
    """Write a library that reaches a bus bandwidth. Return its folder."""
    folder = libraries / f"nccl-{version}/nvidia/nccl/lib"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "libnccl.so.2").touch()
    draw = random.Random(_code(version))
    for number in range(5):
        table = Table(sizes=(8, 1 << 30), step=1 << 27, ranks=4, speed=_constant(rate + draw.gauss(0, noise)))
        library = f"nccl-library={_code(loaded or version)}"
        (folder / f"table{number}").write_text(table.text().replace("nccl-library=23007", library))
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a program, and with equal libraries of all versions in `libs`."""
    for version in VERSIONS:
        plant(tmp_path / "libs", version)
    (tmp_path / "perf").write_text(BISECTED)
    (tmp_path / "perf").chmod(0o755)
    return tmp_path


def call(command: Call, place: Path, *words: str) -> tuple[int, str, str]:
    return command(*(words or NCCL), "--libraries", place / "libs", "-o", place / "b.log", "--", place / "perf")


def runs_of(place: Path) -> int:
    return sum(len(file.read_text()) for file in place.glob("libs/*/nvidia/nccl/lib/runs"))


def test_the_first_slower_version(command: Call, place: Path) -> None:
    first = 7
    for version in VERSIONS[first:]:
        plant(place / "libs", version, rate=336)
    status, out, err = call(command, place, *NCCL, "--json", str(place / "b.json"))
    assert status == 0, err
    assert f"# First bad version: nccl={VERSIONS[first]}, last good version: nccl={VERSIONS[first - 1]}\n" in out
    assert f"| nccl={VERSIONS[first]} | bad | -" in out
    assert re.search(r"\| 1073741824 \| (349|350)\.\d+ \| 33[56]\.", out), "the curve of the first bad version"
    found = json.loads((place / "b.json").read_text())
    assert {judged["state"] for judged in found["judged"]} == {"good", "bad"}
    log = (place / "b.log").read_text()
    assert "# place: host " in log
    assert out.strip() in log, "the log is enough for an issue"
    assert runs_of(place) == 33 + (len(found["judged"]) - 2) * 22, "each comparison ended at the first look"


@pytest.mark.parametrize(
    ("fault", "says"),
    [("hangs", "a run ended with exit status 124, after the time limit"), ("fails", "a run ended with exit status 1")],
)
def test_the_first_version_that_fails(command: Call, place: Path, fault: str, says: str) -> None:
    for version in VERSIONS[9:]:
        (place / f"libs/nccl-{version}/nvidia/nccl/lib/{fault}").touch()
    status, out, err = call(command, place, *NCCL, "--timeout", "1")
    assert status == 0, err
    assert "# First bad version: nccl=2.30.7, last good version: nccl=2.30.4\n" in out
    assert f"| nccl=2.30.7 | bad | {says} |" in out
    assert all(len((place / f"libs/nccl-{v}/nvidia/nccl/lib/runs").read_text()) == 1 for v in ("2.30.7", "2.32.3"))


def test_a_log_is_continued(command: Call, place: Path) -> None:
    plant(place / "libs", VERSIONS[-1], rate=336)
    words = ("bisect", f"nccl={VERSIONS[0]},{VERSIONS[1]},{VERSIONS[-1]}", "--offline")
    assert call(command, place, *words)[0] == 0
    whole, before = (place / "b.log").read_text(), runs_of(place)
    assert call(command, place, *words)[0] == 0
    assert ((place / "b.log").read_text(), runs_of(place)) == (whole, before), "nothing is measured twice"
    (place / "b.log").write_text(whole[: int(len(whole) * 0.8)])
    status, out, err = call(command, place, *words)
    assert (status, f"# First bad version: nccl={VERSIONS[-1]}, last" in out) == (0, True), err
    assert runs_of(place) - before < 22, "of 55 runs, those that were cut, and the warm-up"
    (place / "b.log").write_text(whole.replace('"nccl=2.27.7", ', '"nccl=2.27.7", "nccl=../../x", ', 1))
    status, _, err = call(command, place, *words)
    assert (status, "'../../x' is not a version of NCCL" in err) == (2, True), err
    (place / "b.log").write_text(whole)
    status, _, err = call(command, place, *words, "--seed", "2")
    assert (status, "is the log of another bisection, with another seed" in err) == (2, True), err


def test_a_version_that_cannot_be_tested(command: Call, place: Path) -> None:
    for version in VERSIONS[5:]:
        plant(place / "libs", version, rate=336)
    plant(place / "libs", VERSIONS[5], loaded="2.32.3")
    status, _, err = call(command, place)
    assert (status, "nccl=2.29.3: run 1 loaded NCCL 2.32.3, and 10 more runs" in err) == (4, True), err
    plant(place / "libs", VERSIONS[5], rate=336)
    status, out, err = call(command, place)
    assert (status, "# First bad version: nccl=2.29.3" in out) == (0, True), err


def test_values_and_wheels(command: Call, place: Path) -> None:
    """The versions may also be named, and be wheels that are unpacked only if they are needed."""
    versions = ("2.28.9", "2.29.7", "2.30.7", "2.31.2")
    for version in versions:
        folder = plant(place / "libs", version, rate=336 if version == "2.31.2" else 350)
        name = f"nvidia_nccl_cu13-{version}"
        with ZipFile(place / f"libs/{name}-py3-none-manylinux_2_18_x86_64.whl", "w") as wheel:
            for file in folder.iterdir():
                wheel.write(file, f"nvidia/nccl/lib/{file.name}")
            wheel.writestr(
                f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: {version}\n"
            )
            wheel.writestr(
                f"{name}.dist-info/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-manylinux_2_18_x86_64\n",
            )
            wheel.writestr(f"{name}.dist-info/RECORD", "")
        for file in folder.iterdir():
            file.unlink()
        for part in (folder, *list(folder.parents)[:3]):
            part.rmdir()
    status, out, err = call(command, place, "bisect", f"nccl={','.join(versions)}", "--offline")
    assert (status, "# First bad version: nccl=2.31.2, last good version: nccl=2.30.7" in out) == (0, True), err
    assert len(list((place / "libs").glob("nccl-2.29.7"))) == 1
    file = place / "libs/nvidia_nccl_cu13-2.29.7-py3-none-manylinux_2_18_x86_64.whl"
    assert f"nvidia-nccl-cu13==2.29.7 --hash=sha256:{sha256(file.read_bytes()).hexdigest()}\n" in out


def test_wrong_options(command: Call, place: Path, program: Path, tmp_path: Path) -> None:
    libraries = ("--libraries", place / "libs", "-o", tmp_path / "b.log", "--", program)
    failing = ("compare", "env:A=1,2", "-o", tmp_path / "new", "--", "no-such-program")
    assert [command(*failing)[0] for _ in range(2)] == [4, 4], "the log of nothing does not prevent a second try"
    for words, says in (
        (("compare", "env:A=1,2", "--", program), "-o: is missing; name the file for the log"),
        (("compare", "env:A=1,2", "-o", tmp_path / "x", "--runner", "docker", "--", program), "must be exec:PREFIX"),
        (("report", tmp_path / "Ring0", "--allow-loss", "2"), "--allow-loss: no file is the log of a comparison"),
        (("compare", "env:A=1,2", "-o", program, "--", program), "is not a new file, and a measurement replaces"),
        (("compare", "env:A=1,2", "-o", "-", "--", program), "-o -: is not a new file"),
        (("compare", "env:A=1,2", "-o", "/dev/null", "--", program), "-o /dev/null: is not a new file"),
        (("compare", "env:A=1,2", "-o", tmp_path, "--", program), "is a folder; name a file in it"),
        (("compare", "env:A=1,2", "--allow-loss", "nan", "-o", tmp_path / "x", "--", program), "not a finite number"),
        (("report", tmp_path / "Ring0", "--min-bw", "inf"), "'inf' is not a finite number; write a number such as 2.5"),
        (("report", tmp_path / "Ring0", "--min-bw", "1_0"), "'1_0' is not a finite number"),
        (("bisect", "nccl=2.28.9,2.30.7", "--loss", "NaN", *libraries), "'NaN' is not a finite number"),
        (("bisect", "nccl=2.28.9,2.30.7", "--loss", "-1", *libraries), "--loss"),
        (("hang", "--wait", "nan"), "'nan' is not a finite number"),
        ((*NCCL[:5], "2.33.0", "--offline", *libraries), "--bad 2.33.0: not among the versions in"),
        (
            ("bisect", "nccl", "--good", "2.32.3", "--bad", "2.27.7", "--offline", *libraries),
            "must be later than --good",
        ),
    ):
        status, _, err = command(*words)
        assert (status, says in err) == (2, True), err
    (place / "b.log").write_text("my notes\n")
    assert "exists, and is not the log of a bisection" in call(command, place)[2]
