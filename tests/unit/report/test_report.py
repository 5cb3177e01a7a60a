"""`imagebuild report` from input files to output files, with exit codes."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from imagebuild.bench.models import Results
from tests.conftest import ROOT, data
from tests.report_samples import BAD, GOOD, HOSTILE, VERIFICATION, nccl_log
from tests.unit.bench.nccl_tables import Table
from tests.unit.conftest import Call


@pytest.fixture
def call(tmp_path: Path, command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    return partial(command, "report")


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(name).read_text())
    return content


PROFILE = ("--profile", "h100", "--profiles", ROOT / "profiles")


@pytest.mark.parametrize(("log", "options", "status", "words"), data("bench/cases")["report"])
def test_what_was_asked_for_must_be_seen_or_accepted(
    call: Call, log: dict[str, Any], options: str, status: int, words: str
) -> None:
    """`log` has the arguments of a generated log, and `replace`, pairs of a pattern and its replacement."""
    pairs, sizes = log.pop("replace", ()), log.pop("sizes", ())
    text = Table(sizes=(*sizes,)).text() if sizes else nccl_log(**log)
    for pattern, new in pairs:
        text = re.sub(pattern, new, text, count=1)
    write("a.log", text)
    profiles = PROFILE[2:] if "--profile " in options else ()
    found, out, _ = call(
        "a.log", *options.split(), *profiles, "--json", "o.json", "--junit", "o.xml", "--html", "o.html"
    )
    assert (found, words in out) == (status, True), out
    about, headline = read("o.json")["about"], out.splitlines()[-1].rpartition(" (")[0]
    verdicts = {"All is well": "ok", "Not a pass": "open"}
    assert about["verdict"] == verdicts.get(headline[:11].rstrip(":"), "failed" if status else "limited")
    assert f"</span>{headline}</h1>" in Path("o.html").read_text()
    assert call("o.json", "--markdown")[1].splitlines()[0].endswith(headline)
    assert (ET.parse("o.xml").getroot().attrib["failures"] == "0") == (status == 0)


def test_standard_input_and_gzip(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(nccl_log(480).encode())
    Path("a.log.gz").write_bytes(packed)
    assert call("a.log.gz")[0] == 0
    for damaged in (packed[: len(packed) // 2], packed[:-8] + bytes(8), packed[:-12], packed[:9]):
        Path("bad.log.gz").write_bytes(damaged)
        for arguments in (("bad.log.gz", "a.log.gz"), ("a.log.gz", "--baseline", "bad.log.gz")):
            status, out, err = call(*arguments, "--json", "o.json")
            assert (status, out, Path("o.json").exists()) == (5, "", False)
            assert "bad.log.gz: the compressed data in the file are cut or damaged: " in err
    for content in (packed, nccl_log(480).encode()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        status, out, _ = call("-", "--json", "-", "--html", "o.html")
        assert (status, [run["source"] for run in json.loads(out)["runs"]]) == (0, ["-"])
        assert "# Collective test starting" in Path("o.html").read_text()


def test_a_profile_judges_the_path_of_a_log_without_results(call: Call) -> None:
    write(
        "a.log", "".join(f"n1:1:{r} [{r}] NCCL INFO Channel 00/0 : {r}[{r}] -> {1 - r}[0] via SHM/x\n" for r in (0, 1))
    )
    for options, state in (((), "- shared memory: a.log: "), (PROFILE, "\u2717 a.log: shared memory: ")):
        status, out, _ = call("a.log", *options, "--json", "o.json")
        assert (status, any(line.startswith(state) for line in out.splitlines())) == (5, True), out
    assert "imagebuild job slurm --profile h100 " in read("o.json")["sources"][0]["hints"][0]["next"]
    assert any(line.startswith(state) for line in call("o.json")[1].splitlines())


def test_nothing_read_is_5_and_all_files_are_written(call: Call) -> None:
    write("a.log", "Segmentation fault\n" + HOSTILE)
    status, out, _ = call("a.log", "--json", "o.json", "--junit", "o.xml", "--html", "o.html")
    assert (status, "a.log" in out, "Segmentation fault" in Path("o.html").read_text()) == (5, True, True)
    assert ET.parse("o.xml").getroot().attrib["failures"] == "1"
    assert (read("o.json")["nothing_in"], read("o.json")["about"]["verdict"]) == (["a.log"], "nothing-read")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.log", "--profile", "h10", "--profiles", ROOT / "profiles"), "h100"),
        (("a.log", "--profiles", ROOT / "profiles"), "needs --profile; name a profile with --profile"),
        (("a.log", "--baseline", ROOT / "LICENSE"), "LICENSE: contains no result; name a file"),
        (("a.log", "--json", "./a.log"), "--json a.log: would replace a file that is read"),
        ((".", "--junit", "a.log"), "--junit a.log: would replace a file that is read"),
        (("bad\udcff.log",), "bad\ufffd.log: cannot be read: the file name is not UTF-8"),
    ],
)
def test_wrong_input_is_2(call: Call, arguments: tuple[object, ...], message: str) -> None:
    """tests/data/refused/report.yaml has more cases."""
    write("a.log", nccl_log(480))
    status, _, err = call(*arguments)
    assert status == 2
    assert message in err
    assert Path("a.log").read_text() == nccl_log(480)


@pytest.mark.parametrize(("option", "begins"), [("--json", "{"), ("--junit", "<?xml"), ("--html", "<!DOCTYPE html>")])
def test_a_form_on_the_standard_output_is_alone_there(call: Call, option: str, begins: str) -> None:
    write("a.log", nccl_log(480))
    status, out, _ = call("a.log", option, "-")
    assert (status, out.startswith(begins), "All is well" in out.rstrip().splitlines()[-1]) == (0, True, False)
    assert not Path("-").exists()


@pytest.mark.programs
def test_a_full_disk_behind_the_standard_output_is_one_line(call: Call) -> None:
    write("a.log", nccl_log(480))
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "imagebuild", "report", "a.log"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == "error: the standard output cannot be written: No space left on device\n"


def test_without_plotly_nothing_is_written(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    write("a.log", nccl_log(480))
    status, _, err = call("a.log", "--html", "o.html", "--json", "o.json")
    assert (status, "pip install 'imagebuild[report]'" in err, Path("o.json").exists()) == (2, True, False)


def test_reports_are_read_again_alone_and_with_logs(call: Call) -> None:
    write("logs/a.log", nccl_log(480))
    write("logs/b.log", nccl_log(240))
    first = call("logs", *PROFILE, "--json", "one.json")
    assert call("one.json", "--json", "two.json") == first
    earlier, later = read("one.json"), read("two.json")
    assert earlier.pop("about")["profile"] == later.pop("about")["profile"] == "h100"
    assert earlier == later
    write("c.log", nccl_log(361, collective="all_gather"))
    call("one.json", "c.log", "--json", "three.json")
    assert [run["collective"] for run in read("three.json")["runs"]] == ["all_gather", "all_reduce", "all_reduce"]
    # A report in a folder with logs is left out with a note. It can be overwritten.
    for _ in range(2):
        status, out, _ = call("logs", "--json", "logs/own.json")
        assert (status, len(read("logs/own.json")["runs"])) == (0, 2)
    assert "logs/own.json: a report beside logs may contain the same results; name the report to read it" in out
    assert len(read("logs/own.json")["sources"]) == 3


def test_each_kind_of_result_keeps_its_claims(call: Call) -> None:
    """A report that is read again, alone or with another report, keeps the claims."""
    write("all.json", BAD.model_dump_json())
    write("own.json", GOOD.model_dump_json())
    assert call("all.json", "own.json", "--json", "again.json")[0] == 1
    runs = len(BAD.runs)
    expected = (*BAD.judgements[:runs], *GOOD.judgements, *BAD.judgements[runs:])
    assert read("again.json")["judgements"] == [judgement.model_dump(mode="json") for judgement in expected]


def test_baseline_flags_what_became_slower(call: Call) -> None:
    write("a.log", nccl_log(480))
    call("a.log", "--json", "old.json")
    for speed, failed in ((400, True), (479, False)):
        write("a.log", nccl_log(speed))
        status, out, _ = call("a.log", "--baseline", "old.json")
        assert (status, "too slow" in out) == (int(failed), failed)


def test_results_of_verify(call: Call) -> None:
    write("v.json", VERIFICATION.model_dump_json())
    status, out, _ = call("v.json", "--html", "o.html")
    assert (status, "image checks: 2 passed, 1 failed, 1 skipped" in out) == (1, True)
    assert "✗ nccl versions: failed: header 2.30, library 2.29" in out
    assert "&lt;script&gt;" in Path("o.html").read_text()
    write("broken.json", '{"image": "x", "platform": "linux/amd64", "checks": 7}')
    status, _, err = call("broken.json")
    assert (status, "broken.json: " in err) == (5, True)


def test_results_of_verify_count_once_and_are_judged_again_with_a_profile(call: Call) -> None:
    """The evidence folder contains the log with the same results as verify.json."""
    write("v/all_reduce.log", nccl_log(240))
    call("v", *PROFILE, "--json", "one.json")
    results = {kind: value for kind, value in read("one.json").items() if kind in Results.model_fields}
    measured = {"check": "collective", "outcome": "passed", "results": results, "log": "all_reduce.log"}
    judged = {"check": "collective-speed", "outcome": "failed", "judgements": read("one.json")["judgements"]}
    checks = [check | {"component": "nccl-tests"} for check in (measured, judged)]
    write("v/verify.json", json.dumps(VERIFICATION.model_dump(mode="json") | {"checks": checks}))
    status, out, _ = call("v", "--json", "o.json", "--html", "o.html")
    assert (status, out.count("too slow: "), len(read("o.json")["runs"])) == (1, 1, 1)
    assert "3 passed, 1 failed" in out
    assert "# Collective test starting" in Path("o.html").read_text()
    status, out, _ = call("v", "--profile", "a100-sxm", "--profiles", ROOT / "profiles")
    assert (status, "the benchmark ran on" in out) == (1, True)


@pytest.mark.parametrize(("name", "text", "status"), data("bench/cases")["a-host-that-left-no-result-is-named"])
def test_a_host_that_left_no_result_is_named(call: Call, name: str, text: str, status: int) -> None:
    write("logs/n0", nccl_log(480))
    write("logs/job.log", nccl_log(480))
    write(f"logs/{name}", text)
    found, out, _ = call("logs")
    assert (found, f"logs/{name}" in out, f"logs/{name}: no-result" in out) == (status, True, bool(status)), out


def test_folders(call: Call) -> None:
    """Hidden files are left out; an empty folder has no result."""
    Path("empty").mkdir()
    assert call("empty")[0] == 5
    write("logs/a.log", nccl_log(480))
    write("logs/.git/x.log", nccl_log(480, wrong=1))
    status, out, _ = call("logs", "--markdown")
    assert status == 0
    assert out.startswith("## ☑️ Data right, participation not known, speed not judged\n")


def test_a_link_in_a_folder_of_logs_leads_to_no_other_file(call: Call) -> None:
    """A page contains the logs, so it would contain the file of the user to which a link leads."""
    write("logs/a.log", nccl_log(480))
    write("own.txt", "password: secret")
    Path("logs/same.log").symlink_to("a.log")
    assert call("logs", "--html", "page.html")[0] == 0
    Path("logs/x.log").symlink_to("../own.txt")
    status, _, err = call("logs", "--html", "other.html")
    assert (status, Path("other.html").exists()) == (2, False)
    assert "own.txt, which is outside logs; remove the link, or name that file" in err


def test_no_form_contains_the_secret_of_a_log(call: Call) -> None:
    secret = f"hf_{'q' * 34}"
    stated = {"outcome": "failed", "reason": f"HF_TOKEN={secret}", "output": f"HF_TOKEN={secret}", "results": None}
    check = VERIFICATION.checks[0].model_copy(update=stated | {"judgements": ()})
    result = VERIFICATION.model_copy(update={"checks": (check,)})
    write("logs/a.log", f"{nccl_log(480)}HF_TOKEN={secret}\n")
    write("logs/verify.json", result.model_dump_json())
    outputs = call("logs", "--html", "page.html", "--junit", "report.xml")[1:] + call("logs", "--markdown")[1:]
    texts = [*outputs, Path("page.html").read_text(), Path("report.xml").read_text()]
    assert [text.count(secret) for text in texts] == [0] * 6
    assert sum("(redacted)" in text for text in texts) >= 4
