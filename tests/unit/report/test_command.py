"""`imagebuild report` from files to files: what is read, exit codes, and what is written."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.conftest import ROOT
from tests.report_samples import BAD, HOSTILE, nccl_log, verification
from tests.unit.conftest import Call


@pytest.fixture
def call(tmp_path: Path, command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    return partial(command, "report")


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


PROFILE = ("--profile", "h100", "--profiles", ROOT / "profiles")


def test_good_data_and_speed(call: Call) -> None:
    write("a.log", nccl_log(480))
    status, out, _ = call("a.log", *PROFILE)
    assert (status, out.splitlines()[-1]) == (0, "All is well (2 passed, 0 failed, 0 skipped; unread lines: 0)")


@pytest.mark.parametrize(
    ("log", "word"),
    [
        (nccl_log(480, wrong=3), "wrong-data"),
        (nccl_log(240), "failed"),
        (nccl_log(950), "measurement-error"),
        (nccl_log(480).split("# Out of")[0], "truncated"),
    ],
)
def test_what_is_not_well_is_1(call: Call, log: str, word: str) -> None:
    write("a.log", log)
    status, out, _ = call("a.log", *PROFILE)
    assert status == 1
    assert f": {word}: " in out


def test_nothing_read_is_5_and_all_files_are_written(call: Call) -> None:
    write("a.log", "Segmentation fault\n" + HOSTILE)
    status, out, _ = call("a.log", "--json", "o.json", "--junit", "o.xml", "--html", "o.html")
    assert status == 5
    assert "a.log" in out
    assert "Segmentation fault" in Path("o.html").read_text()
    assert ET.parse("o.xml").getroot().attrib["failures"] == "1"
    written = json.loads(Path("o.json").read_text())
    assert (written["nothing_in"], written["about"]["verdict"]) == (["a.log"], "nothing-read")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent.log",), "absent.log: cannot be read"),
        (("a.log", "--profile", "h10", "--profiles", ROOT / "profiles"), "h100"),
        (("a.log", "--baseline", "absent.json"), "absent.json: cannot be read"),
        (("a.log", "--baseline", ROOT / "LICENSE"), "LICENSE: contains no result; name a file"),
        (("a.log", *PROFILE, "--algorithm", "rings"), "rings"),
        (("a.log", "--json", "a.log/o.json"), "cannot be written"),
    ],
)
def test_wrong_input_is_2(call: Call, arguments: tuple[object, ...], message: str) -> None:
    write("a.log", nccl_log(480))
    status, _, err = call(*arguments)
    assert status == 2
    assert message in err


def test_without_plotly_nothing_is_written(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    write("a.log", nccl_log(480))
    status, _, err = call("a.log", "--html", "o.html", "--json", "o.json")
    assert status == 2
    assert "pip install plotly" in err
    assert not Path("o.json").exists()


def test_a_report_can_be_read_again(call: Call) -> None:
    write("logs/a.log", nccl_log(480))
    write("logs/b.log", nccl_log(240))
    first = call("logs", *PROFILE, "--json", "one.json")
    again = call("one.json", "--json", "two.json")
    assert (first[0], first[1]) == (again[0], again[1])
    one, two = (json.loads(Path(name).read_text()) for name in ("one.json", "two.json"))
    assert one.pop("about")["profile"] == two.pop("about")["profile"] == "h100"
    assert one == two


def test_reports_and_logs_together(call: Call) -> None:
    write("a.log", nccl_log(480))
    call("a.log", "--json", "one.json")
    write("b.log", nccl_log(361, collective="all_gather", factor=0.875))
    call("one.json", "b.log", "--json", "two.json")
    runs = json.loads(Path("two.json").read_text())["runs"]
    assert [run["collective"] for run in runs] == ["all_gather", "all_reduce"]


def test_baseline_flags_what_became_slower(call: Call) -> None:
    write("a.log", nccl_log(480))
    call("a.log", "--json", "old.json")
    write("a.log", nccl_log(400))
    status, out, _ = call("a.log", "--baseline", "old.json")
    assert status == 1
    assert "regression" in out
    write("a.log", nccl_log(479))
    assert call("a.log", "--baseline", "old.json")[0] == 0


def test_results_of_verify(call: Call) -> None:
    write("v.json", verification().model_dump_json())
    status, out, _ = call("v.json", "--junit", "o.xml", "--html", "o.html")
    assert status == 1
    assert "image checks: 2 passed, 1 failed, 1 skipped" in out
    assert "✗ nccl versions: failed: header 2.30, library 2.29" in out
    assert "&lt;script&gt;" in Path("o.html").read_text()


def test_what_a_check_measured_is_shown_once(call: Call) -> None:
    """The evidence folder holds the log that the results in verify.json were read from."""
    write("v/nccl-tests.all_reduce.log", nccl_log(480))
    call("v", "--json", "results.json")
    results = json.loads(Path("results.json").read_text())
    kept = {name: results[name] for name in ("runs", "tests", "tables", "ucx", "diagnostics", "sources")}
    checked = json.loads(verification().model_dump_json())
    checked["checks"][0] |= {"log": "nccl-tests.all_reduce.log", "results": kept}
    write("v/verify.json", json.dumps(checked))
    call("v", "--json", "o.json", "--html", "o.html")
    assert len(json.loads(Path("o.json").read_text())["runs"]) == 1
    assert "# Collective test starting" in Path("o.html").read_text()


def test_speed_that_verify_judged_is_judged_once_and_anew_with_a_profile(call: Call) -> None:
    write("a.log", nccl_log(240))
    call("a.log", *PROFILE, "--json", "one.json")
    one = json.loads(Path("one.json").read_text())
    checked = json.loads(verification().model_dump_json())
    kept = {name: one[name] for name in ("runs", "tests", "tables", "ucx", "diagnostics", "sources")}
    checked["checks"] = [
        {"component": "nccl-tests", "check": "collective", "outcome": "passed", "results": kept},
        {"component": "nccl-tests", "check": "collective-speed", "outcome": "failed", "judgements": one["judgements"]},
    ]
    write("v.json", json.dumps(checked))
    status, out, _ = call("v.json")
    assert (status, out.count("✗")) == (1, 1)
    assert "2 passed, 1 failed" in out
    assert call("v.json", "--profile", "a100-sxm", "--profiles", ROOT / "profiles")[0] == 0


def test_a_result_of_verify_that_is_broken_is_5(call: Call) -> None:
    write("v.json", '{"image": "x", "platform": "linux/amd64", "checks": 7}')
    status, _, err = call("v.json")
    assert (status, "v.json: " in err) == (5, True)


def test_hidden_files_of_folders_are_left_out(call: Call) -> None:
    write("logs/a.log", nccl_log(480))
    write("logs/.git/x.log", nccl_log(480, wrong=1))
    assert call("logs")[0] == 0


def test_an_empty_folder_has_no_result(call: Call) -> None:
    Path("logs").mkdir()
    assert call("logs")[0] == 5


def test_markdown_instead_of_the_table(call: Call) -> None:
    write("a.log", nccl_log(480))
    status, out, _ = call("a.log", "--markdown")
    assert status == 0
    assert out.startswith("## ✅ All is well\n")


def test_the_report_of_everything_reads_itself(call: Call) -> None:
    write("all.json", BAD.model_dump_json())
    status, _, _ = call("all.json", "--json", "again.json")
    again = json.loads(Path("again.json").read_text())
    assert status == 1
    assert again["judgements"] == json.loads(BAD.model_dump_json())["judgements"]
