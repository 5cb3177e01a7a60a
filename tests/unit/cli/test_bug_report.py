"""The command `imagebuild bug-report`, and the first failures of somebody who builds an image: is the cause in the file?"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.cli import bug_report
from imagebuild.core import console
from imagebuild.oci import engine
from tests.conftest import LIBRARY, LOCK, Files
from tests.unit import image_files
from tests.unit.conftest import Call, at
from tests.upstream.server import Server

pytestmark = pytest.mark.programs
TARGET = "tiny-cuda13.0-debian13-runtime"
SECRET = "hunter2hunter2"
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END OPENSSH PRIVATE KEY-----\n"
STEP = f"[{TARGET.replace('.', '_')} linux/amd64 library 2/3] RUN ./configure"
OUTPUT = (
    f"configure: error: PMIx 5 is needed, found 4\ntoken={SECRET} Zmlyc3RidWlsZGVyc3NlY3JldA\n{KEY}" + "more\n" * 60
)
Report = Callable[[], dict[str, str]]


def unpacked(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        archive.extractall(file.parent / "sent")  # Debian 12's Python 3.11.2 has no `filter` yet
    top = file.parent / "sent" / "imagebuild-bug-report"
    return {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for programs that write to a FIFO."""
    monkeypatch.setattr("imagebuild.core.files.FIFO_S", 0.2)


@pytest.fixture
def report(call: Call, tmp_path: Path) -> Report:
    """Return a function that calls `imagebuild bug-report`, and returns the texts in its file."""

    def pack() -> dict[str, str]:
        (tmp_path / "imagebuild").mkdir(exist_ok=True)
        (tmp_path / "imagebuild/__main__.py").write_text("print('planted')")
        status, out, err = call("bug-report", "-o", tmp_path / "sent.tar.gz")
        assert status == 0, err
        shutil.rmtree(tmp_path / "sent", ignore_errors=True)
        texts = unpacked(tmp_path / "sent.tar.gz")
        assert {line.split()[0] for line in out.splitlines()[1:-1]} == texts.keys() - {"README"}
        assert not any(word in str(texts) for word in (SECRET, "planted"))
        return texts

    return pack


@pytest.fixture
def first_builder(tiny: Files, downloads: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A project with an archive, whose init script stops, and a builder that fails. The events of the builder were
    written by hand, in the format of buildx 0.13."""
    serve(downloads, "test -f licence || { echo 'no licence is accepted'; exit 7; }; export PATH=$PWD/bin")
    url = at(downloads, "host/x.tar")
    unpacked = "unpacked: {prefix: /opt/x, script: '. ./x-init.sh', needs: [lib/libx.so]}"
    tiny.component("library", f"{LIBRARY}archive: {url}\n{unpacked}\n", build="FROM scratch AS library\n")
    tiny.lock(LOCK)
    step = {"digest": "a", "name": STEP, "inputs": ["b"], "started": "2026-01-01T00:00:00Z"}
    ended = {**step, "completed": "2026-01-01T00:00:01Z", "error": "process did not complete: exit code: 77"}
    printed = {"vertex": "a", "data": base64.b64encode(OUTPUT.encode()).decode()}
    events = ({"vertexes": [step]}, {"logs": [printed]}, {"vertexes": [ended]})
    tiny.write("bin/events", "".join(f"{json.dumps(event)}\n" for event in events))
    node = r"\nNodes:\nName: mine0\nStatus: running\nPlatforms: linux/amd64, linux/arm64\n"
    probe = (
        "for word; do case $word in *,dest=*) mkdir -p ${word#*dest=}/clock ;; *.json) echo {} > $word ;; esac; done"
    )
    answers = f"bake) cat {tmp_path}/bin/events; exit 1 ;; inspect) printf '{node}' ;; build) {probe} ;; *) exit 1 ;;"
    tiny.write("bin/docker", f"#!/bin/sh\ncase $2 in {answers} esac\n")
    (tmp_path / "bin/docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("ACME_TOKEN", "Zmlyc3RidWlsZGVyc3NlY3JldA")
    console._secret_variables.cache_clear()  # another test may have read the variables
    monkeypatch.setattr(engine, "find_engine", lambda *_: engine.Endpoint("tcp://x", "private"))
    return downloads


def serve(server: Server, script: str) -> None:
    """Serve an archive with this init script."""
    files = {"x/x-init.sh": script.encode(), "x/lib/libx.so": image_files.elf(needed=["liby.so"], runpath="/opt/y")}
    (server.root / "host" / "x.tar").write_bytes(image_files.layer(files))


def test_the_cause_of_each_first_failure_is_in_the_file(
    first_builder: Server, call: Call, report: Report, tmp_path: Path
) -> None:
    status, _, err = call("lock", TARGET)
    assert (status, "build/lock-report.json says what servers answered" in err) == (4, True), err
    texts = report()
    told = json.loads(texts["folder/lock-report.json"])
    (archive,) = told["archives"].values()
    assert "echo 'no licence is accepted'\nno licence is accepted\n++ exit 7\n" in archive["output"]
    assert archive["texts"]["x-init.sh"].startswith("test -f licence")
    assert archive["libraries"]["lib/libx.so"] == {
        "machine": 62, "needed": ["liby.so"], "rpath": "", "runpath": "/opt/y", "soname": "",
    }  # fmt: skip
    assert [told["failures"][0][0], archive["members"][0]] == ["wrong", ["file", 0o644, 83, "x/x-init.sh", ""]]
    assert any(re.search(r"GET \S+/host/x.tar: 200", text) for text in told["asked"])
    assert "cannot be built yet" in texts[f"dockerfiles/{TARGET}"]
    assert f"archive {at(first_builder, 'host/x.tar')}" in texts["plan.txt"]

    serve(first_builder, "export PATH=$PWD/bin")
    assert call("lock", TARGET)[0] == 0
    status, _, err = call("build", TARGET, "--base", "registry", "--builder", "mine")
    log = f"build/{TARGET}/build.log"
    assert (status, err.endswith(f"\nthe whole log: {tmp_path}/{log}\n")) == (4, True), err
    assert "configure: error" not in err, "the terminal has only the end of the output"
    texts = report()
    assert "library | configure: error: PMIx 5 is needed, found 4" in texts[f"folder/{TARGET}/build.log"]
    assert {"Zmlyc3RidWlsZGVyc3NlY3JldA", "b3BlbnNzaC1rZXktdjEAAAAA"} & {*re.findall(r"\w+", str(texts))} == set()
    assert texts[f"folder/{TARGET}/Dockerfile"] == (tmp_path / "build" / TARGET / "Dockerfile").read_text()

    labels = {"imagebuild.target": TARGET, "imagebuild.component.library": "1.2"}
    image_files.layout(tmp_path / "made", {"root/.ssh/id_rsa": KEY.encode()}, Labels=labels)
    status, _, _ = call("verify", f"oci:{tmp_path}/made", "--only", "image/*")
    assert status == 1
    (tmp_path / "build" / "link.log").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "build" / "fifo.log")
    texts = report()
    failed = [c for c in json.loads(texts[f"folder/{TARGET}/verify.log"])["checks"] if c["outcome"] == "failed"]
    assert any("root/.ssh/id_rsa" in check["output"] for check in failed)
    assert {"folder/link.log", "folder/fifo.log"} & texts.keys() == set()


def test_without_a_build_or_a_project(command: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "matrix.yaml").write_text("images: [")
    monkeypatch.chdir(tmp_path)
    assert command("bug-report")[0] == 0
    texts = unpacked(tmp_path / "imagebuild-bug-report.tar.gz")
    assert "build has no logs or results" in texts["README"]
    assert "matrix.yaml:2: not YAML" in texts["plan.txt"]


def test_no_link_and_no_name_in_the_folder_leads_out_of_it(
    command: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, project = tmp_path / "own", tmp_path / "project"
    for folder in (own, project / "given"):
        folder.mkdir(parents=True)
    (own / "config.json").write_text(f'{{"password": "{SECRET}"}}')
    (own / "key").write_text(SECRET)
    (project / "matrix.yaml").symlink_to(own / "key")
    (project / "build").symlink_to(own)
    names = [f"{'../' * 9}{own.relative_to('/')}/key", "-x", "a b"]
    (project / "given" / "lock-report.json").write_text(json.dumps({"targets": names}, indent=1))
    monkeypatch.chdir(project)
    assert command("bug-report")[0] == 0
    texts = unpacked(project / "imagebuild-bug-report.tar.gz")
    assert "build is a link; to pack its files, name the folder to which it leads" in texts["README"]
    assert {"folder/config.json", "project/matrix.yaml"} & texts.keys() == set()
    assert command("bug-report", "given")[0] == 0
    assert ({*own.iterdir()}, (own / "key").read_text()) == ({own / "key", own / "config.json"}, SECRET)
    (project / "given" / "lock-report.json").unlink()
    os.mkfifo(project / "given" / "lock-report.json")
    for odd in (b"\xff.log", b"a\nb.log", b"\x1b[2m.log", b"token=%s.log" % SECRET.encode(), b"d/" * 30 + b"x.log"):
        path = Path(os.fsdecode(os.fsencode(project / "given") + b"/" + odd))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    monkeypatch.setattr(bug_report, "LARGEST", 10_000)
    cut = f"{KEY}password: {SECRET}\n" + "x" * (bug_report.LARGEST - 40) + "\n"
    (project / "given" / "cut.log").write_text(cut)
    assert command("bug-report", "given")[0] == 0
    texts = unpacked(project / "imagebuild-bug-report.tar.gz")
    packed = {name.removeprefix("folder/") for name in texts if name.startswith("folder/")}
    assert packed == {"_.log", "a_b.log", ".log", "token=(redacted)", "cut.log"}
    assert {SECRET[-6:], "b3BlbnNz"} & {*re.findall(r"\w{6,8}", str(texts))} == set()
