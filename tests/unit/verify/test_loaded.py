"""The libraries in processes: small libraries with the texts of the real ones are planted, loaded and found.

With IMAGEBUILD_WHEELS, the name of a folder in which each wheel of `loaded.yaml` is installed in its own folder, the
libraries of the real wheels are used."""

import hashlib
import os
import shutil
import subprocess
import sys
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.verify.loaded import look, read_loaded, read_trace
from imagebuild.verify.runner import shell_script
from tests.conftest import data

CASES = data("cases/verify/loaded")

TABLE = yaml.safe_load(Path("tests/data/loaded.yaml").read_text(encoding="utf-8"))
REAL = os.environ.get("IMAGEBUILD_WHEELS")
VICTIM: str = CASES["victim"]
SMALL = next((path for path in Path("/usr/lib").glob("*-linux-gnu/libutil.so.1")), None)
pytestmark = [pytest.mark.programs, pytest.mark.skipif(SMALL is None, reason="needs a small library of glibc")]


BUILD_ID = b"\4\0\0\0\x14\0\0\0\3\0\0\0GNU\0"
"""The beginning of the note with the build id in an ELF file: sizes, type 3 and owner."""


def library(texts: str) -> bytes:
    """Return a small library that contains texts. `broken` lacks a library that it needs."""
    assert SMALL
    content = SMALL.read_bytes()
    if texts.startswith("NCCL"):
        content = content.replace(b"libutil.so.1", b"libnccl.so.2")
    if texts.startswith("broken"):
        content = content.replace(b"libc.so.6", b"libX.so.6")
    separated = texts.replace("NCCL version ", "NCCL_version_").replace("NVSHMEM ", "NVSHMEM_").split(" ")
    parts = (part.replace("NCCL_version_", "NCCL version ").replace("NVSHMEM_", "NVSHMEM ") for part in separated)
    return content + b"\0" + b"".join(part.encode() + b"\0" for part in parts)


def content_of(text: str) -> Path | bytes:
    """Return the library of a wheel, or a small library with texts."""
    if text in TABLE["libraries"]:
        row = TABLE["libraries"][text]
        return Path(REAL, text, row["file"]) if REAL else library(row["texts"])
    return library(text)


def put(path: Path, content: Path | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if isinstance(content, Path):
        shutil.copy(content, path)
    else:
        path.write_bytes(content)


def install(name: str, site: Path) -> None:
    """Install a wheel over the wheels that are there, as pip does."""
    row = TABLE["libraries"][name]
    if REAL:
        subprocess.run(["cp", "-rf", "--remove-destination", f"{Path(REAL, name)}/.", site], check=True)
        return
    content = library(row["texts"])
    put(site / row["file"], content)
    code = urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    record = site / (row["wheel"].replace("-", "_").replace(" ", "-") + ".dist-info") / "RECORD"
    put(record, f"{row['file']},sha256={code},{len(content)}\n".encode())


@pytest.mark.parametrize("case", [*TABLE["clean"], *TABLE["faulty"]], ids=lambda case: case["name"])
def test_planted_faults_are_found_and_clean_environments_have_none(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    for name in case.get("wheels", ()):
        install(name, site)
    for path, text in case.get("add", {}).items():
        put(site / path.removeprefix("site/") if path.startswith("site/") else tmp_path / path, content_of(text))
    places = {"root": tmp_path, "site": site}
    for name, value in case.get("env", {}).items():
        monkeypatch.setenv(name, value.format(**places))
    names = [name.format(**places) for name in case["load"]]
    runner = "exec:env"
    if mount := [path.format(**places) for path in case.get("mount", ())]:
        if os.geteuid() or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
            pytest.skip("needs root to mount")
        runner = f"exec:unshare -m sh -c 'mount --bind {mount[0]} {mount[1]} && exec \"$@\"' sh"
    words = [sys.executable, "-c", VICTIM]
    if "replace" in case:
        with subprocess.Popen([*words, "60", *names], stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            put(Path(names[0]), content_of(case["replace"]))
            result = look(runner, (), (process.pid,))
            process.kill()
    else:
        result = look(runner, [*words, "0", *names], ())
    found = {fault.kind for process in result.processes for fault in process.faults if not fault.note}
    assert found == {*case.get("faults", ())}, result.model_dump_json(indent=1)
    assert bool(result.processes) == bool(names)


def test_the_status_of_the_command_is_kept_and_its_output_shown(capfd: pytest.CaptureFixture[str]) -> None:
    result = look("exec:env", ["sh", "-c", "echo hello; exit 3"], ())
    assert (result.status, result.processes) == (3, ())
    assert "hello" in capfd.readouterr().err


def test_a_library_may_have_no_build_id(tmp_path: Path) -> None:
    content = library("NCCL version 2.28.9+cuda13.0")
    assert content.count(BUILD_ID) == 1
    put(tmp_path / "libnccl.so.2", content.replace(BUILD_ID, BUILD_ID.replace(b"\3", b"\x7f")))
    result = look("exec:env", [sys.executable, "-c", VICTIM, "0", f"{tmp_path}/libnccl.so.2"], ())
    assert [(lib.version, lib.build_id) for found in result.processes for lib in found.libraries] == [("2.28.9", None)]


@pytest.mark.parametrize("path", ["", "o"])
def test_a_library_may_be_named_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    place = tmp_path / "a & b"
    put(place / "libnccl.so.2", library("NCCL version 2.28.9+cuda13.0"))
    put(place / "o" / "libnccl.so.2", library("NCCL version 2.27.3+cuda12.9"))
    monkeypatch.chdir(place)
    monkeypatch.setenv("LD_LIBRARY_PATH", path)
    names = ["libnccl.so.2"] if path else ["./libnccl.so.2", "./o/libnccl.so.2"]
    result = look("exec:env", [sys.executable, "-c", VICTIM, "0", *names], ())
    found = {lib.version for process in result.processes for lib in process.libraries}
    assert found == ({"2.27.3"} if path else {"2.28.9", "2.27.3"})


@pytest.mark.parametrize("name", CASES["names"])
@pytest.mark.parametrize("runs", [False, True])
def test_a_folder_can_have_any_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, *, runs: bool
) -> None:
    """Tabs and line breaks are written as the kernel writes line breaks in maps."""
    site = tmp_path / name / "lib/python3.11/site-packages"
    install("nccl13", site)
    file = site / TABLE["libraries"]["nccl13"]["file"]
    words = [sys.executable, "-c", VICTIM, "0" if runs else "60", str(file)]
    if runs:
        result = look("exec:env", words, ())
    else:
        with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            result = look("exec:env", (), (process.pid,))
            process.kill()
    [library] = [lib for found in result.processes for lib in found.libraries]
    assert library.path == str(file).replace("\n", "\\012").replace("\t", "\\011")
    assert library.origin.startswith("wheel nvidia-nccl-cu13 ")
    assert [fault for found in result.processes for fault in found.faults if not fault.note] == []
    assert capfd.readouterr().err in ("", "loaded\n")


@pytest.mark.parametrize("case", CASES["changes"], ids=lambda case: case["name"])
def test_what_happens_to_a_running_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], case: dict[str, str]
) -> None:
    """Files are deleted, threads and processes end, and others may not read them."""
    file = tmp_path / "a" / case.get("file", "libnccl.so.2")
    put(file, library("NCCL version 2.28.9+cuda13.0"))
    code = VICTIM.replace("print(", f"{case.get('before', '')}print(")
    words = [sys.executable, "-c", code, case.get("seconds", "60"), str(file)]
    runner = f"exec:{case.get('runner', 'env')}"
    if "setpriv" in runner and os.geteuid():
        pytest.skip("needs root to become another user")
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        if "command" in case:
            subprocess.run(["sh", "-c", case["command"]], cwd=tmp_path, check=True)
        if case.get("seconds") == "0":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        try:
            if says := case.get("error"):
                with pytest.raises(CommandError, match=says):
                    look(runner, (), (process.pid,))
            else:
                result = look(runner, (), (process.pid,))
                [lib] = [lib for found in result.processes for lib in found.libraries]
                assert (lib.version, lib.origin) == (case.get("version"), case["origin"])
                kinds = {fault.kind for found in result.processes for fault in found.faults if not fault.note}
                assert kinds == {*case.get("faults", ())}
        finally:
            process.kill()
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
def test_files_of_a_container_are_not_those_of_this_machine(tmp_path: Path) -> None:
    """Links in a container lead to its own files, also from a launcher outside."""
    inside = tmp_path / "inside"
    put(tmp_path / "libnccl.so.2", library("NCCL version 2.99.9+cuda13.0"))
    put(inside / "libnccl.so.2", library("NCCL version 2.28.9+cuda13.0"))
    (inside / "lib").symlink_to(tmp_path)
    victim = f"exec {sys.executable} -c '{VICTIM}' 60 {tmp_path}/lib/libnccl.so.2"
    script = f"mount --make-rprivate / && mount --bind {inside} {tmp_path} && {victim}"
    with subprocess.Popen(["unshare", "-m", "sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout
        if not process.stdout.readline():
            pytest.skip("mount namespaces are not allowed here")
        result = look("exec:env", (), (process.pid,))
        process.kill()
    assert {lib.version for found in result.processes for lib in found.libraries} == {"2.28.9"}


def test_children_of_a_launcher_are_looked_into(tmp_path: Path) -> None:
    put(tmp_path / "libnccl.so.2", library("NCCL version 2.28.9+cuda13.0"))
    put(tmp_path / "old" / "libnccl.so.2", library("NCCL version 2.27.3+cuda12.9"))
    ranks = [f"{sys.executable} -c '{VICTIM}' 0 {tmp_path}/{name}libnccl.so.2" for name in ("", "old/")]
    result = look("exec:env", ["sh", "-c", " & ".join(ranks) + "; wait"], ())
    assert {lib.version for process in result.processes for lib in process.libraries} == {"2.28.9", "2.27.3"}


def test_an_image_names_the_component_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "nccl" / "libnccl.so.2", library("NCCL version 2.28.9+cuda13.0"))
    put(tmp_path / "nccl-old" / "libnccl-net.so", library("ncclNetPlugin_v10"))
    put(tmp_path / "conf", f"# cuda\n/usr/local/cuda/lib\n# nccl-git\n{tmp_path}/nccl\n".encode())
    script = shell_script("loaded").replace("$root$(resolve /etc/ld.so.conf.d/imagebuild.conf)", f"{tmp_path}/conf")
    monkeypatch.setattr("imagebuild.verify.loaded.shell_script", lambda _: script)
    files = [f"{tmp_path}/nccl/libnccl.so.2", f"{tmp_path}/nccl-old/libnccl-net.so"]
    (process,) = look("exec:env", [sys.executable, "-c", VICTIM, "0", *files], ()).processes
    assert [lib.origin for lib in process.libraries] == ["component nccl-git of the image", "no package"]
    names = {fault.text.partition(":")[0] for fault in process.faults if fault.kind == "advisory"}
    assert "nccl-2.29.2-p2p-collective-crash" in names
    assert not any("arm64" in name for name in names)


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="needs dpkg")
def test_names_of_files_in_a_container_are_no_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "--showformat=x|;1e touch planted #"
    path = tmp_path / "info" / evil / "libnccl.so.2"
    put(path, library("NCCL version 2.28.9+cuda13.0"))
    put(tmp_path / "dpkg" / "status", b"Package: good\nStatus: install ok installed\nVersion: 1-2\nArchitecture: all\n")
    for name in (evil, "good"):
        put(tmp_path / "dpkg" / "info" / f"{name}.list", f"{path}\n".encode())
    for name in ("dpkg/info/fifo.list", "dpkg/info/good.md5sums", "conf"):
        os.mkfifo(tmp_path / name)
    script = shell_script("loaded")
    for place, planted in {"/var/lib/dpkg": "dpkg", "/etc/ld.so.conf.d/imagebuild.conf": "conf"}.items():
        assert f"$root$(resolve {place})" in script
        script = script.replace(f"$root$(resolve {place})", f"{tmp_path}/{planted}")
    monkeypatch.setattr("imagebuild.verify.loaded.shell_script", lambda _: script)
    monkeypatch.chdir(tmp_path)
    (process,) = look("exec:env", [sys.executable, "-c", VICTIM, "0", str(path)], ()).processes
    assert [lib.origin for lib in process.libraries] == ["package good 1-2"]
    assert not (tmp_path / "planted").exists()


def test_ranks_that_a_launcher_starts_on_several_hosts(tmp_path: Path) -> None:
    """The launcher mixes the output of its ranks, of which the second of each host is not looked into."""
    put(tmp_path / "libnccl.so.2", library("NCCL version 2.28.9+cuda13.0"))
    put(tmp_path / "old" / "libnccl.so.2", library("NCCL version 2.27.3+cuda12.9"))
    put(tmp_path / "bin" / "uname", b'#!/bin/sh\n[ "$1" = -n ] && echo $NODE || /bin/uname "$@"\n')
    put(tmp_path / "mpirun", b"""#!/bin/bash
for rank in 0 1 2 3; do
  NODE=n$((rank / 2)) OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$((rank % 2)) OMPI_COMM_WORLD_LOCAL_SIZE=2 "$@" &
done
wait
""")  # fmt: skip
    for file in ("bin/uname", "mpirun"):
        (tmp_path / file).chmod(0o755)
    lib = f"import ctypes, os; ctypes.CDLL('{tmp_path}/' + ('old/' if os.environ['NODE'] == 'n1' else '') + 'libnccl.so.2')"
    runner = f"exec:env PATH={tmp_path}/bin:/usr/bin:/bin {tmp_path}/mpirun"
    result = look(runner, [sys.executable, "-c", lib], ())
    found = {(each.host, lib.version) for each in result.processes for lib in each.libraries}
    assert found == {("n0", "2.28.9"), ("n1", "2.27.3")}
    assert all("across" in {fault.kind for fault in each.faults} for each in result.processes)
    assert " on n1)" in " ".join(fault.text for fault in result.processes[0].faults)


def test_only_the_last_program_of_a_process_counts() -> None:
    one = ["file=liba.so [0];  needed by sh [0]", "find library=liba.so [0]; searching", " search cache=/etc/ld.so.cache",
           "  trying file=/lib/liba.so", "file=liba.so [0];  generating link map", "transferring control: sh"]  # fmt: skip
    two = [line.replace("liba", "libb").replace("sh [", "python [").replace(": sh", ": python") for line in one]
    assert read_trace(one + two, {}).paths == {"/lib/libb.so": "the loader's cache"}
    assert read_trace(one, {}).program == "sh"


def test_a_wrong_runner_and_incomplete_output_are_errors() -> None:
    with pytest.raises(ConfigError, match="unknown runner"):
        look("docker", ["true"], ())
    with pytest.raises(CommandError, match="no complete result"):
        read_loaded(["imagebuild-loaded:a:1\tstatus\t0"])
    with pytest.raises(
        CommandError, match="--pid 2147483646: cannot be read; it has ended, or belongs to another user"
    ):
        look("exec:env", (), (os.getpid(), 2147483646))


@pytest.mark.skipif(not REAL, reason="measures the real wheels")
def test_it_takes_at_most_two_seconds_more_than_the_command() -> None:
    name = str(Path(str(REAL), "nccl12", TABLE["libraries"]["nccl12"]["file"]))
    words = [sys.executable, "-c", VICTIM, "0", name]
    before = os.times()
    look("exec:env", words, ())
    after = os.times()
    # The time of the processors, as other tests may run at the same time.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2
