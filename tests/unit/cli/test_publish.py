"""The commands `imagebuild publish` and `each`: what they print, and their exit status."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from imagebuild.cli import publish
from imagebuild.publish import signatures
from imagebuild.render.templates import Templates
from tests.conftest import data
from tests.publish_fakes import COMMIT, HOST, NEW, Site
from tests.registry_fake import index, put_image
from tests.unit.conftest import Call

TAG = f"{HOST}/acme/tiny:cuda13.0-tool3.4-{COMMIT[:7]}"


def test_what_is_printed(site: Site, command: Call) -> None:
    site.ready(NEW)
    arguments = ("publish", "--results", site.evidence)
    site.fake.calls.clear()
    status, out, _ = command(*arguments, "--dry-run")
    assert (status, f"- possible {NEW}" in out, site.fake.calls) == (0, True, [])
    assert "    attachments  4 provenance, 4 verification" in out
    before = index(site.fake, "acme/tiny", [put_image(site.fake, "acme/tiny")], tag="latest")
    status, out, _ = command(*arguments, "--json", "out.json")
    (target,) = json.loads(Path("out.json").read_text())["targets"]
    assert (status, f"✓ published {NEW} {target['digest']}\n    new tag  {TAG}\n" in out) == (0, True)
    assert f"moved tag  {HOST}/acme/tiny:latest: {before} → {target['digest']}" in out
    site.ready(NEW, dockerfile="0" * 64)
    status, out, _ = command(*arguments)
    assert (status, f"✗ refused {NEW}" in out, "linux/amd64: provenance: " in out) == (1, True, True)


@pytest.mark.programs
def test_a_job_signs_what_its_own_run_built(
    site: Site, command: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other jobs of a run can leave results for it; with a key, somebody else may publish later."""
    (tmp_path / "cosign").symlink_to("/bin/true")
    workflow = "acme/images/.github/workflows/build.yml@refs/heads/main"
    for name, value in {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "GITHUB_SERVER_URL": "https://git.test", "GITHUB_REPOSITORY": "acme/images", "GITHUB_RUN_ID": "7",
        "GITHUB_RUN_ATTEMPT": "2", "GITHUB_WORKFLOW_REF": workflow,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    run, own = "https://git.test/acme/images/actions/runs", f"https://git.test/{workflow}"
    stated: dict[str, Any] = {"source": "https://git.test/acme/images", "workflow": own, "run": f"{run}/7/attempts/1"}
    arguments = ("publish", "--results", str(site.evidence), "--sign", "--dry-run")
    for other in ({"run": f"{run}/6/attempts/1"}, {"workflow": f"{own}2"}, {"source": ""}):
        site.ready(NEW, **stated | other)
        status, out, _ = command(*arguments)
        ((name, value),) = other.items()
        reason = f"provenance: {name} of the build is {value or 'unknown'}, but {name} of this job"
        assert (status, reason in out) == (1, True)
    site.ready(NEW, **stated)
    status, out, _ = command(*arguments)
    assert status == 0, out
    site.ready(NEW, **stated, revision="f" * 40)
    status, out, _ = command(*arguments)
    assert (status, "built from commit ffffffffffff, but this checkout is of commit 0123456789ab" in out) == (1, True)


def test_a_job_that_signs_renders_nothing(
    site: Site, command: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hashes, arguments = tmp_path / "rendered.json", ("publish", "--results", str(site.evidence), "--dry-run")
    assert command("ci-matrix", NEW, "--rendered", hashes)[0] == 0
    site.ready(NEW)
    monkeypatch.setattr(Templates, "render", lambda *_, **__: pytest.fail("a template was rendered"))
    status, out, _ = command(*arguments, "--rendered", hashes)
    assert (status, f"possible {NEW}" in out) == (0, True), out
    for text, expected, said in (
        (re.sub(r'":\["[0-9a-f]{64}', '":["' + "0" * 64, hashes.read_text()), 1, "another Dockerfile"),
        ('{"targets": {}}', 2, "which was not planned"),
        ("{}", 5, "targets: is missing"),
    ):
        hashes.write_text(text)
        status, out, err = command(*arguments, "--rendered", hashes)
        assert (status, said in out + err) == (expected, True), out + err


OPTIONS = data("publish/refused")["options"]


@pytest.mark.parametrize(("options", "said"), OPTIONS.items())
def test_wrong_options(
    site: Site, command: Call, monkeypatch: pytest.MonkeyPatch, options: str, said: tuple[int, str]
) -> None:
    site.ready(NEW)
    monkeypatch.setattr(signatures, "which", lambda _: None)
    status, _, err = command("publish", "--results", site.evidence, *options.split())
    assert (status, said[1] in err) == (said[0], True), err


# A command for each image that was pushed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of two builds that were pushed, for one and two platforms, and of one that was not."""
    for name, digests, repository in (("0/a", "a", "r.test/x"), ("0/loaded", "d", None), ("1/b", "bc", "r.test/x")):
        (tmp_path / name).mkdir(parents=True)
        manifests = dict(zip(("linux/amd64", "linux/arm64"), (f"sha256:{d * 64}" for d in digests), strict=False))
        content = {"target": name[2:], "digest": f"sha256:{digests[0] * 64}", "tags": [], "platforms": [*manifests], "size_bytes": None,
                   "seconds": 1, "steps": [], "manifests": manifests, "repository": repository}  # fmt: skip
        (tmp_path / name / "result.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.programs
def test_a_program_is_started_for_every_platform(folder: Path, command: Call) -> None:
    script = f"""import os, sys
open('{folder}/log', 'a').write(' '.join(sys.argv[1:]) + '\\n')
sys.exit('c' * 64 in sys.argv[1] or os.environ["IMAGEBUILD_IMAGE"] != sys.argv[1])"""
    words = ("{image}", "{target}/{arch}", "{folder}/o.json", "{other}", "--", "x")
    status, _, err = command("each", folder, "--", sys.executable, "-c", script, *words)
    assert (folder / "log").read_text().splitlines() == [
        f"r.test/x@sha256:{d * 64} {target}/{arch} {folder}/{n}/{target}/o.json {{other}} -- x"
        for d, target, arch, n in (("a", "a", "amd64", 0), ("b", "b", "amd64", 1), ("c", "b", "arm64", 1))
    ]
    assert (status, "b linux/arm64: exit status 1\n2 of 3 succeeded" in err) == (1, True)


EDITED = {name: row for name, row in data("publish/edited").items() if row["edit"] == "result"}


@pytest.mark.parametrize("row", EDITED.values(), ids=EDITED)
def test_no_value_of_a_result_becomes_an_option(
    site: Site, command: Call, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    started: list[str] = []

    def run(words: list[str], *_: object) -> int:
        started.extend(words)
        return 0

    monkeypatch.setattr(publish, "run_in_foreground", run)
    site.arrange_edited(row, lambda _: site.fake)
    monkeypatch.chdir(site.evidence)
    Path("-x").mkdir()
    next(Path().rglob("result.json")).rename("-x/result.json")
    words = ("{image}", "{index}", "{target}", "{platform}", "{arch}", "{folder}")
    status, _, err = command("each", ".", "--", *words)
    assert not [word for word in started if not re.match(r"[a-z0-9/][^\n ]*\Z", word)]
    assert (status, bool(started)) in {(0, True), (5, False)}, err


@pytest.mark.programs
def test_the_worst_exit_status_counts(folder: Path, command: Call) -> None:
    script = "raise SystemExit({'linux/amd64': 4, 'linux/arm64': 1}['{platform}'] * ('{target}' == 'b'))"
    assert command("each", folder, "--", sys.executable, "-c", script)[0] == 4
    kill = "import os; os.kill(os.getpid(), 15)"
    assert command("each", folder, "--platform", "linux/arm64", "--", sys.executable, "-c", kill)[0] == 143
    status, _, err = command("each", folder, "--", "/gone")
    assert (status, "cannot be run" in err) == (4, True)
    status, _, err = command("each", folder / "gone", "--platform", "linux/arm64", "--", "x")
    assert (status, "run `imagebuild build --push` first" in err) == (3, True)
    (folder / "0/a/result.json").write_text("{}")
    status, _, err = command("each", folder, "--", "x")
    assert (status, "use the version of imagebuild that wrote it" in err) == (5, True)
