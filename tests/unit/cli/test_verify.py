"""The command `imagebuild verify` without an engine: what is refused, what is listed, and a whole run on this machine."""

import json
import os
import pwd
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.profiles import find_profile, load_profiles
from imagebuild.bench.verification import Surroundings, VerifyResult
from imagebuild.cli.verify import name_known_faults
from imagebuild.project.plan import Plan, Target
from tests.conftest import LIBRARY, ROOT, TOOL, Files, data
from tests.report_samples import nccl_log
from tests.unit import image_files
from tests.unit.conftest import Call

CASES = data("cases/cli/verify")

ME = pwd.getpwuid(os.getuid()).pw_name
CHECKS: str = CASES["checks"]
OTHER = (
    ("skipped", f"needs the user nobody-like-this; commands run as {ME} here")
    if os.getuid()
    else ("failed", "the image has no user 'nobody-like-this'")
)
"""What is said of the last check, by whom root can become."""


@pytest.fixture
def call(tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    tiny.component("library", LIBRARY + CHECKS)
    monkeypatch.chdir(tiny.root)
    image_files.layout(tiny.root / "foreign", {}, Labels={"imagebuild.component.gone": "1"})
    return partial(command, "verify")


def test_a_component_that_is_not_known_here(call: Call) -> None:
    status, _, err = call("foreign", "--runner", "exec:env")
    assert (status, "gone: the image has this component, but the project does not" in err) == (2, True)
    status, out, err = call("foreign", "--only", "image/readable")
    assert (status, "1 passed, 0 failed" in out) == (0, True), err


@pytest.mark.parametrize(("arguments", "listed"), CASES["the-list-says-what-checks-need"])
def test_the_list_says_what_checks_need(call: Call, tiny: Files, arguments: tuple[str, ...], listed: list[str]) -> None:
    tiny.component("tool", TOOL + "checks: [{name: runs, description: d, run: x}]\n")
    status, out, _ = call("--list", *arguments)
    known = ("image/no-keys", "library/large", "gpus>=64", "tool/runs")
    assert (status, [words for words in known if words in out]) == (0, listed)
    assert "did you mean 'h100'?" in call("--list", *arguments, "--profile", "h10")[2]


@pytest.mark.programs
def test_a_run_on_this_machine(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "evidence"
    status, _, _ = call(
        "tiny-cuda13.0-debian13-runtime", "--runner", "exec:env", "--only", "library", "--output", str(folder),
        "--env", "EXTRA=given",
    )  # fmt: skip
    assert status == 1
    result = VerifyResult.model_validate_json((folder / "verify.json").read_text())
    assert result.options == ("--env EXTRA=(redacted)", "--only library")
    checks = {c.check: c for c in result.checks}
    assert {name: c.outcome for name, c in checks.items()} == {
        "version": "passed", "fails": "failed", "large": "skipped", "hangs": "failed", "other": OTHER[0],
        "same-files": "skipped",
    }  # fmt: skip
    assert "or a target that was built with --push or --output" in checks["same-files"].reason
    assert len(checks["version"].sha256) == 64
    assert checks["version"].output == "library 1.2\ngiven\n"
    assert checks["fails"].reason == "exit status 3: SECRET_TOKEN=(redacted)"
    assert "abcdef" not in checks["fails"].output
    assert checks["large"].reason.startswith(("no gpu here", "needs 64 GPUs"))
    assert (checks["hangs"].timeout, checks["hangs"].output) == (True, "begun\n")
    assert (checks["other"].outcome, checks["other"].reason) == OTHER
    assert (folder / "library.version.log").read_text() == "library 1.2\ngiven\n"
    assert result.surroundings
    assert result.surroundings.runner == "exec:env"
    assert result.surroundings.environment["HOME"]


@pytest.mark.parametrize(("facts", "profile", "platform", "named"), CASES["verify-names-known-faults"])
def test_verify_names_known_faults(
    facts: dict[str, str], profile: str, platform: str, named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of components of the target and of the node's drivers, on the GPUs and networks of the profile."""
    own: dict[str, Any] = {
        "axes": {},
        "platforms": ("linux/amd64", "linux/arm64"),
        "components": {"nccl-git": "2.29.2"},
    }
    plan = Plan(targets=(Target(id="a", image="a", name="a:a", tags=(), **own),), excluded=())
    surroundings = Surroundings(runner="x", facts=facts)
    result = VerifyResult(
        image="a:a", digest=None, target="a", platform=platform, checks=(), surroundings=surroundings
    )  # fmt: skip
    name_known_faults(result, plan, find_profile(load_profiles(ROOT / "profiles"), profile).model if profile else None)
    printed = capsys.readouterr().err.split("known fault of a: ")[1:]
    assert [" ".join(text.partition(": ")[0].split()) for text in printed] == named


BENCHMARK: str = CASES["benchmark"]
PROFILE = ("--profile", "h100", "--profiles", str(ROOT / "profiles"))


@pytest.mark.programs
@pytest.mark.parametrize(("busbw", "ranks", "options", "reason"), CASES["verify-and-report-of-its-folder-say-the-same"])
def test_verify_and_report_of_its_folder_say_the_same(
    command: Call, call: Call, tiny: Files, busbw: float, ranks: int, options: tuple[str, ...], reason: str
) -> None:
    """The folder says that the check turned NVLS off, and what the user said about the GPUs."""
    (tiny.root / "log").write_text(nccl_log(busbw, ranks=ranks))
    tiny.component("library", LIBRARY + BENCHMARK.replace("{root}", str(tiny.root)))
    arguments = ("--runner", "exec:env", "--only", "library/sum", "--output", "evidence", *PROFILE, *options)
    status, printed, _ = call(*arguments)
    result = VerifyResult.model_validate_json((tiny.root / "evidence/verify.json").read_text())
    speed = next(check for check in result.checks if check.check == "sum-speed")
    assert (status, speed.outcome) == ((1, "failed") if reason else (0, "passed"))
    # Without and with a profile, the report judges alike.
    for again in ((), (*PROFILE, *options)):
        code, told, _ = command("report", "evidence", *again, "--json", "report.json")
        claims = json.loads((tiny.root / "report.json").read_text())["judgements"]
        assert [claims[0][name]["state"] for name in ("data", "participation", "speed")] == [
            claim.state for claim in speed.judgements[0].claims
        ]
        assert (code, claims) == (status, [judgement.model_dump(mode="json") for judgement in speed.judgements])
        assert reason in printed
        assert reason.partition(": ")[2] in told


@pytest.mark.parametrize("option", [("--gpus", "4"), ("--domains", "2"), ("--allow", "partial")])
def test_options_about_speed_need_a_profile(call: Call, option: tuple[str, str]) -> None:
    status, _, err = call("--runner", "exec:env", *option)
    assert (status, f"{option[0]}: has no effect without a profile" in err) == (2, True)


@pytest.mark.programs
def test_a_layout_is_read_without_an_engine(call: Call, tiny: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    image_files.layout(tiny.root / "layout", {"a": b"x"}, Labels={"imagebuild.component.library": "1.2"})
    status, printed, err = call("oci:layout", "--only", "image/no-*", "--only", "library", "--json", "r.json")
    assert (status, "no check was started" in err, "6 passed, 0 failed, 5 skipped" in printed) == (4, True, True)
    checks = json.loads((tiny.root / "r.json").read_text())["checks"]
    assert {check["outcome"] for check in checks if check["component"] != "image"} == {"skipped"}


@pytest.mark.programs
def test_a_foreign_place_is_checked_by_name_and_what_is_all_skipped_is_no_pass(call: Call, tmp_path: Path) -> None:
    assert call("--runner", "exec:env", "--only", "library/version", "--json", str(tmp_path / "r.json"))[0] == 0
    proof, check = json.loads((tmp_path / "r.json").read_text())["checks"]
    assert "any version accepted" in check["reason"]
    assert (proof["check"], proof["outcome"]) == ("same-files", "skipped")
    status, out, err = call("--runner", "exec:env", "--only", "library/large")
    assert (status, "0 passed, 0 failed, 2 skipped" in out) == (3, True)
    assert "no check ran, all were skipped: " in err


HERE = {path.strip("/"): Path(path).read_bytes() for path in ("/usr/bin/env", "/usr/bin/id", "/usr/bin/tr")}
"""Files of this machine, which stand for those of the image that runs. The folder of the image's PATH is another one,
because all files of PATH are compared, and this machine has more."""
OTHER_FILES = {"usr/bin/env": b"an older one", "usr/share/only-in-the-image": b"x"}


@pytest.mark.programs
@pytest.mark.parametrize(
    ("files", "outcome", "reason"),
    [
        (HERE, "passed", ""),
        ({**HERE, "etc/hostname": b"another", "usr/share/libcuda.so.1": b"a driver"}, "passed", ""),
        (HERE | OTHER_FILES, "failed", "2 of 4 files differ, such as "),
        ({"etc/hostname": b"x"}, "skipped", "no files to compare"),
    ],
    ids=["the-same", "what-a-runtime-changes", "another-image", "nothing-to-tell-by"],
)
def test_a_place_is_proven_to_be_of_the_image(
    call: Call, tiny: Files, files: dict[str, bytes], outcome: str, reason: str
) -> None:
    image_files.layout(
        tiny.root / "layout", files, Env=["PATH=/nowhere"], Labels={"imagebuild.component.library": "1.2"}
    )
    arguments = ("layout", "--runner", "exec:env", "--only", "library/version", "--json", "r.json")
    status, _, _ = call(*arguments)
    result = VerifyResult.model_validate_json((tiny.root / "r.json").read_text())
    proof, check = result.checks
    assert (proof.component, proof.check, proof.outcome) == ("image", "same-files", outcome)
    assert reason in proof.reason
    assert (status, check.outcome) == ((1, "skipped") if outcome == "failed" else (0, "passed"))
    assert result.digest
    assert outcome != "failed" or result.digest in proof.reason


@pytest.mark.programs
def test_the_files_are_found_where_the_build_left_them(call: Call, tiny: Files) -> None:
    name = "tiny-cuda13.0-debian13-runtime"
    labels = {"imagebuild.component.library": "1.2", "imagebuild.component.tool": "3.4"}
    image_files.layout(tiny.root / "build" / name / "layout", HERE, Env=["PATH=/nowhere"], Labels=labels)
    status, _, _ = call(name, "--runner", "exec:env", "--only", "library/version", "--json", "r.json")
    result = VerifyResult.model_validate_json((tiny.root / "r.json").read_text())
    assert (status, result.checks[0].outcome, bool(result.digest)) == (0, "passed", True)


@pytest.mark.programs
def test_a_false_hash_program_is_noticed(call: Call, tiny: Files) -> None:
    image_files.layout(
        tiny.root / "layout", HERE, Env=["PATH=/nowhere"], Labels={"imagebuild.component.library": "1.2"}
    )
    false = tiny.root / "bin/sha256sum"
    false.parent.mkdir()
    false.write_text(f"#!/bin/sh\n/usr/bin/sha256sum /etc/hostname\necho '{'0' * 64}  -'\n")
    false.chmod(0o755)
    runner = f"exec:env PATH={false.parent}:/usr/bin:/bin"
    assert call("layout", "--runner", runner, "--only", "library/version", "--json", "r.json")[0] == 1
    proof = VerifyResult.model_validate_json((tiny.root / "r.json").read_text()).checks[0]
    assert (proof.outcome, "computes wrong hashes" in proof.reason) == ("failed", True)


def test_the_log_beside_a_build_follows_no_link(call: Call, tiny: Files) -> None:
    target = "tiny-cuda13.0-debian13-runtime"
    labels = {"imagebuild.target": target, "imagebuild.component.library": "1.2"}
    image_files.layout(tiny.root / "made", {"root/x": b"x"}, Labels=labels)
    tiny.write("own", "mine")
    (tiny.root / "build" / target).mkdir(parents=True)
    (tiny.root / "build" / target / "verify.log").symlink_to(tiny.root / "own")
    status, _, err = call("oci:made", "--only", "image/*")
    assert (status, "verify.log: is a link" in err) == (2, True), err
    assert (tiny.root / "own").read_text() == "mine"


@pytest.mark.programs
def test_reuse_needs_a_target_and_an_earlier_result(call: Call, tiny: Files) -> None:
    target = "tiny-cuda13.0-debian13-runtime"
    assert call("foreign", "--reuse")[::2] == (
        2,
        "error: --reuse: the build folder has results of targets only; leave the option out, or name a target\n",
    )
    assert call(target, "--reuse", "-o", "x")[0] == 2
    tiny.write(f"build/{target}/verify.log", "{}")
    run = (target, "--reuse", "--runner", "exec:env", "--only", "library/version")
    assert "verify.log: was not written by this version of imagebuild, so all checks run" in call(*run)[2]
