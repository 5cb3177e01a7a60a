"""`imagebuild each`: a command for every pushed image."""

import json
import sys
from pathlib import Path

import pytest

from tests.unit.conftest import Call

pytestmark = pytest.mark.programs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of two builds that were pushed, for one and two platforms, and of one that was not."""
    for name, digests, repository in (("0/a", "a", "r.test/x"), ("0/loaded", "d", None), ("1/b", "bc", "r.test/x")):
        (tmp_path / name).mkdir(parents=True)
        manifests = dict(zip(("linux/amd64", "linux/arm64"), (f"sha256:{d * 64}" for d in digests), strict=False))
        content = {"target": name[2:], "digest": None, "tags": [], "platforms": [*manifests], "size_bytes": None,
                   "seconds": 1, "steps": [], "manifests": manifests, "repository": repository}  # fmt: skip
        (tmp_path / name / "result.json").write_text(json.dumps(content))
    return tmp_path


def test_a_program_is_started_for_every_platform(folder: Path, command: Call) -> None:
    script = f"import sys; open('{folder}/log', 'a').write(' '.join(sys.argv[1:]) + '\\n'); sys.exit('c' * 64 in sys.argv[1])"
    words = ("{image}", "{target}/{arch}", "{folder}/o.json", "{other}")
    status, _, err = command("each", folder, "--", sys.executable, "-c", script, *words)
    assert (folder / "log").read_text().splitlines() == [
        f"r.test/x@sha256:{d * 64} {target}/{arch} {folder}/{n}/{target}/o.json {{other}}"
        for d, target, arch, n in (("a", "a", "amd64", 0), ("b", "b", "amd64", 1), ("c", "b", "arm64", 1))
    ]
    assert (status, "b linux/arm64: exit status 1\n2 of 3 succeeded" in err) == (1, True)


def test_the_worst_exit_status_counts(folder: Path, command: Call) -> None:
    script = "raise SystemExit({'linux/amd64': 4, 'linux/arm64': 1}['{platform}'] * ('{target}' == 'b'))"
    assert command("each", folder, "--", sys.executable, "-c", script)[0] == 4
    kill = "import os; os.kill(os.getpid(), 15)"
    assert command("each", folder, "--platform", "linux/arm64", "--", sys.executable, "-c", kill)[0] == 143
    status, _, err = command("each", folder, "--", "/gone")
    assert (status, "cannot be run" in err) == (4, True)
    status, _, err = command("each", folder / "gone", "--platform", "linux/arm64", "--", "x")
    assert (status, "`build --push` leaves a result.json" in err) == (3, True)
    (folder / "0/a/result.json").write_text("{}")
    status, _, err = command("each", folder, "--", "x")
    assert (status, "was it written by another version" in err) == (5, True)
