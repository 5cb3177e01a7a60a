"""The commands `imagebuild lock` and `imagebuild bump`, with servers on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from imagebuild.core.errors import Absent
from imagebuild.lock import resolve
from imagebuild.project.lockfile import BaseImage, Source
from tests.conftest import LIBRARY, ROOT, Files, git
from tests.unit.conftest import SHA256, Call, at, head, publish
from tests.upstream.keys import CUDA, DOCA, Keys
from tests.upstream.server import Server

pytestmark = pytest.mark.programs


@pytest.fixture
def files(tiny: Files, downloads: Server, project_git: Path) -> Files:
    """The tiny project with an archive, a signed repository and a git source. Its base image is already locked."""
    (downloads.root / "host" / "b.tar").write_bytes(b"b" * (8 << 20))
    tiny.component(
        "library",
        LIBRARY
        + f"archive: {at(downloads, 'host/a.tar')}\npackages: {{runtime: [tool, 'nccl={{version}}-1+cuda12.9']}}\n"
        f"repository: {{name: repo, url: '{at(downloads, 'repo/')}', key: '{at(downloads, 'repo/key.asc')}'}}\n",
    )
    tiny.component("tool", f"{LIBRARY}requires: [library]\narchive: {at(downloads, 'host/b.tar')}\n")
    tiny.component(
        "git-tool", f"{LIBRARY}git: {project_git.as_uri()}\ntag: v{{version}}\n", build="FROM scratch AS git-tool\n"
    )
    tiny.replace("matrix.yaml", 'library: "1.2"', 'library: "2.9.9" # the library\n  git-tool: "3.4" # and this')
    tiny.replace("matrix.yaml", "[tool, library]", "[tool, library, git-tool]")
    tiny.lock({"images": {"debian:13-slim": {"digest": f"sha256:{'a' * 64}"}}})
    for name in ("library", "tool"):
        tiny.write(f"dockerfiles/components/{name}/build.j2", f"FROM scratch AS {name}\n")
    return tiny


Imagebuild = Callable[..., str]


@pytest.fixture
def imagebuild(files: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Imagebuild:
    """Return a function that runs `imagebuild …` in the project's folder and returns its output."""

    def call(*words: str, expect: int = 0) -> str:
        status, out, err = command(*words)
        assert status == expect, out + err
        return out + err

    monkeypatch.chdir(files.root)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(files.root))
    return call


def locked(files: Files) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((files.root / "imagebuild.lock").read_text())
    return found


def test_lock_from_nothing_check_and_changes(
    imagebuild: Imagebuild, files: Files, downloads: Server, project_git: Path, keys: Keys
) -> None:
    assert "imagebuild.lock: all 5 sources are pinned" in imagebuild("lock")
    lock = locked(files)
    tag = f"{project_git.as_uri()} v3.4"
    assert lock["archives"][at(downloads, "host/a.tar")] == SHA256
    assert lock["git"] == {tag: head(project_git, "v3.4")}
    assert lock["repositories"][at(downloads, "repo/")] == {
        "fingerprint": keys.fingerprint(CUDA),
        "packages": {"nccl=2.9.9-1+cuda12.9": "2.9.9-1+cuda12.9", "tool": "1:1.0"},
        "candidates": {"nccl": ["2.9.9-1+cuda12.9", "2.32.3-1+cuda12.9"], "tool": ["1:1.0~rc1", "1:1.0"]},
    }
    downloads.requests.clear()
    assert "all 5 sources are pinned" in imagebuild("lock")
    assert downloads.requests == []
    assert imagebuild("lock", "--check", "--offline") == "as locked: 5\nthe servers of the sources were not asked\n"

    text = (files.root / "imagebuild.lock").read_text()
    git(project_git, "tag", "-f", "v3.4", "v3.5")
    publish(downloads.root, keys, by=DOCA)
    (downloads.root / "host" / "a.tar").unlink()
    out = imagebuild("lock", "--check", expect=1)
    assert re.search(rf"gone +archive {at(downloads, 'host/a.tar')}", out)
    assert f"upstream now has {head(project_git, 'v3.5')[:12]}, but the lock has {lock['git'][tag][:12]}" in out
    assert f"imagebuild.lock trusts {keys.fingerprint(CUDA)}" in out
    assert {request.method for request in downloads.requests if request.path.endswith(".tar")} == {"HEAD"}
    assert (files.root / "imagebuild.lock").read_text() == text

    imagebuild("lock", "--update", "git-tool")
    assert locked(files)["git"] == {tag: head(project_git, "v3.5")}
    assert {**locked(files), "git": lock["git"]} == lock
    imagebuild("lock", "--update", at(downloads, "repo/"))
    assert locked(files)["repositories"][at(downloads, "repo/")]["fingerprint"] == keys.fingerprint(DOCA)
    assert "no source belongs to" in imagebuild("lock", "--update", "git-tol", expect=2)


def test_a_failure_costs_what_failed_and_nothing_else(imagebuild: Imagebuild, downloads: Server, files: Files) -> None:
    imagebuild("lock")
    before = locked(files)
    component = "dockerfiles/components/tool/component.yaml"
    files.replace(component, at(downloads, "host/b.tar"), f"{at(downloads, 'host/{cuda}.tar')}\nkey: [cuda]")
    files.replace("matrix.yaml", 'git-tool: "3.4"', 'git-tool: "3.5"')
    downloads.requests.clear()
    # One target: its sources only, each asked for and shown once; nothing is written of what failed.
    out = imagebuild("lock", "tiny-cuda12.9-debian13-runtime", expect=4)
    assert f"archive {at(downloads, 'host/12.9.tar')}: the server does not have the file (404)" in out
    assert [request.path for request in downloads.requests] == ["/host/12.9.tar"]
    shown = [line.split()[1:] for line in out.splitlines() if re.match(r" +[0-9]+\.[0-9] ", line)]
    assert sorted(line[0] for line in shown) == ["archive", "git"]
    assert {**locked(files), "git": before["git"]} == before
    assert "not used" in imagebuild("lock", "--check", "--offline", expect=1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_resumes(
    imagebuild: Imagebuild, files: Files, downloads: Server, how: signal.Signals
) -> None:
    downloads.cut.clear()
    downloads.truncated.append("/host/b.tar")
    (temporary := files.root / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "imagebuild", "lock"], env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not all(locked(files).get(kind) for kind in ("archives", "git", "repositories")):
        assert time.monotonic() < deadline, "was not written on the way"
        time.sleep(0.05)
    process.send_signal(how)
    _, err = process.communicate(timeout=120)
    assert process.returncode == (130 if how == signal.SIGINT else 143), err
    assert "Traceback" not in err
    downloads.cut.set()
    assert at(downloads, "host/b.tar") not in locked(files)["archives"]
    assert list(temporary.iterdir()) == []
    downloads.truncated.clear()
    downloads.requests.clear()
    assert "all 5 sources are pinned" in imagebuild("lock")
    assert [r.path for r in downloads.requests] == ["/host/b.tar"]


def test_bump_proposes_and_writes(imagebuild: Imagebuild, files: Files) -> None:
    before = (files.root / "matrix.yaml").read_text()
    out = imagebuild("bump")
    changed = {line for line in out.splitlines() if line[:1] in "+-" and line[1:3] not in {"--", "++"}}
    assert changed == {
        '-  git-tool: "3.4" # and this', '+  git-tool: "3.10" # and this',
        '-  library: "2.9.9" # the library', '+  library: "2.32.3" # the library',
    }  # fmt: skip
    assert "tool  3.4      no server lists its versions" in out
    assert (files.root / "matrix.yaml").read_text() == before
    assert "+  library: " not in imagebuild("bump", "git-tool")
    assert "matrix.yaml: written; `imagebuild lock` pins the new versions" in imagebuild("bump", "--write")
    after = before.replace('git-tool: "3.4"', 'git-tool: "3.10"').replace('"2.9.9"', '"2.32.3"')
    assert (files.root / "matrix.yaml").read_text() == after
    assert "no newer version" in imagebuild("bump")


# Checks before anything is locked


def test_servers_are_asked_before_anything_is_locked(call: Call, tiny: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(source: Source, *_: object) -> str:
        if isinstance(source, BaseImage):
            raise Absent("the registry does not have the image")
        return "there"

    monkeypatch.setattr(resolve, "network_upstream", lambda _: Mock(stopped=False))
    monkeypatch.setattr(resolve, "probe", probe)
    tiny.lock({})
    before = (tiny.root / "imagebuild.lock").read_bytes()
    target = "tiny-cuda13.0-debian13-runtime"
    status, printed, _ = call("lock", "--check", target, "--json", "servers.json")
    report = json.loads(Path("servers.json").read_text())
    assert (status, report["targets"]) == (1, [target])
    assert [(row["state"], row["found"]) for row in report["sources"]] == [
        ("gone", "the registry does not have the image; not in the lock"),
        ("not locked", "there; not in the lock"),
    ]
    assert ("gone: 1; " in printed, f"`imagebuild lock {target}`" in " ".join(printed.split())) == (True, True)
    assert (tiny.root / "imagebuild.lock").read_bytes() == before


def test_without_a_project_the_shipped_lock_is_only_read(
    command: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, printed, note = command("lock", "quickstart", "--check", "--offline")
    assert (status, printed.splitlines()[-1]) == (0, "the servers of the sources were not asked")
    assert "these are the images that come with imagebuild" in note
    assert command("lock", "quickstart", "--show", "nccl-wheel")[0] == 0
    status, _, complaint = command("lock")
    assert (status, "make a project with `imagebuild init`" in complaint) == (2, True)
