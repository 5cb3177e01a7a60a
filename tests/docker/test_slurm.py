"""A real Slurm with two nodes on this machine's loopback: `verify` starts ranks in an image, and jobs run.

The image's PMIx is another version than Slurm's. Jobs run a stand-in for nccl-tests with the distribution's Open MPI; nodes claim GPUs and cores that this machine lacks.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from docker import DockerClient

from imagebuild.bench.read import read_files
from tests.conftest import ROOT, data, ran
from tests.docker.conftest import TARGET, Built, Imagebuild, build_of, copy_of_project, edited_matrix, install, until
from tests.unit.jobs.job_fakes import REFERENCE, text

CASES = data("cases/docker/slurm")

pytestmark = pytest.mark.docker

NODES = ("n1", "n2")
DATA = ROOT / "tests/data/slurm"
# Both slurmd run on this machine and would share PMIx's folder, so each node gets its own.
SLURMD = 'mount -t tmpfs -o mode=755 imagebuild-test "$1/pmix" && exec slurmd -D -N "$2"'


@dataclass(frozen=True)
class Slurm:
    """A running Slurm cluster."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        # srun passes its environment to the ranks, and PMIx needs HOME.
        path, own = os.environ["PATH"] + ":/usr/sbin:/sbin", str(self.folder / "tmp")
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path, "HOME": own, "TMPDIR": own}

    def unpack(self, client: DockerClient, image: str) -> str:
        """Unpack an image; return the program that runs a command in the unpacked image."""
        rootfs = self.folder / "rootfs"
        shutil.rmtree(rootfs, ignore_errors=True)
        rootfs.mkdir()
        made = client.containers.create(image)
        try:
            with subprocess.Popen(["tar", "-x", "-C", rootfs], stdin=subprocess.PIPE) as tar:
                assert tar.stdin
                tar.stdin.writelines(made.export())  # type: ignore[arg-type]  # the type stubs say str instead of bytes
            assert tar.returncode == 0
        finally:
            made.remove()
        (rootfs / self.folder.relative_to("/")).mkdir(parents=True, exist_ok=True)
        (self.folder / "environment").write_text("\n".join(client.images.get(image).attrs["Config"]["Env"]) + "\n")
        return str(shutil.copy(DATA / "enter", self.folder))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """Run munged, slurmctld and two slurmd. The nodes declare GPUs and cores that this machine may not have."""
    if os.geteuid():
        pytest.skip("Slurm's daemons, and installing them, need root")
    # Slurm's plug-in opens libpmix.so, which only the development package has.
    libraries = [] if list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")) else ["libpmix-dev"]
    install({"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}, *libraries)
    with ExitStack() as stack:
        # Not in pytest's folder, because other users cannot enter it.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="imagebuild-test-")))
        folder.chmod(0o755)
        slurm = Slurm(folder)
        _configure(folder)
        log = stack.enter_context((folder / "log").open("a"))

        def start(*argv: str) -> None:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(argv, env=slurm.environ, cwd="/", **options)
            stack.callback(end, process)

        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        start("munged", "--foreground", *(f"--{name}={folder}/munge/{name}" for name in files))
        assert until((folder / "munge" / "socket").exists)
        start("slurmctld", "-D")
        for node in NODES:
            start("unshare", "--mount", "sh", "-c", SLURMD, "slurmd", str(folder), node)
        sinfo = ("sinfo", "--noheader", "--Node", "--format=%T")
        idle = until(lambda: ran(*sinfo, env=slurm.environ).stdout.split() == ["idle"] * len(NODES))
        assert idle, (folder / "log").read_text()[-5000:]
        yield slurm


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    if not until(lambda: process.poll() is not None, 15):
        process.kill()


def _configure(folder: Path) -> None:
    for name in ("munge", "pmix", "state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(mode=0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    key = folder / "munge" / "key-file"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in ("controller", *NODES)]
        ports = [server.getsockname()[1] for server in servers]
    host = socket.gethostname().split(".")[0]
    text = (DATA / "slurm.conf").read_text().format(host=host, folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(text)
    for i in range(8):
        (folder / f"gpu{i}").touch()
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-7]\n")
    (folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={folder}/pmix\n")


# Checks of images

RANKS = ("pmix/slurm", "ucx-distro/mpi-slurm", "openmpi-distro/sum-slurm")
"""Checks that start ranks: the ranks find Slurm's PMIx server, form one MPI world, and compute a sum."""


def test_verify_runs_ranks_through_srun(
    cluster: Slurm, devel: Built, client: DockerClient, imagebuild: Imagebuild
) -> None:
    runner = f"exec:srun {cluster.unpack(client, devel.tag)}"
    variables = {name: cluster.environ[name] for name in ("SLURM_CONF", "TMPDIR")}
    chosen = [f"--only={check}" for check in (*RANKS, "pmix/loads", "ucx-distro/two-nodes")]
    for more, outcome in (
        ("", "passed"),
        # Without these variables, PMIx does not find Slurm's server, so each rank is a singleton.
        (" env --unset=PMIX_NAMESPACE --unset=PMIX_RANK", "failed"),
    ):
        words = (devel.result.target, "--runner", runner + more, *chosen)
        result = imagebuild.verify(*words, expect=int(outcome == "failed"), **variables)
        found = {f"{check.component}/{check.check}": check.outcome for check in result.checks}
        # This runner cannot read the built image in the engine's store.
        others = {"image/same-files": "skipped", "pmix/loads": "passed", "ucx-distro/two-nodes": "skipped"}
        assert found == dict.fromkeys(RANKS, outcome) | others


@pytest.fixture(scope="module")
def torch(
    client: DockerClient, host: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Built:
    """Build quickstart with PyTorch. Debian's needs no GPU and is small, so it replaces the component's wheel."""
    if not request.config.getoption("--proof"):
        pytest.skip("only in `make torch-proof`")
    project = copy_of_project(tmp_path_factory.mktemp("torch"))
    file = project / "dockerfiles/components/torch/component.yaml"
    component = yaml.safe_load(file.read_text())
    del component["python"]
    changes = {"requires": ["mpi"], "packages": {"runtime": ["python3-torch"]}, "license-files": []}
    file.write_text(yaml.safe_dump({**component, **changes, "env": {"USE_LIBUV": "0"}}))  # Debian's has no libuv
    with edited_matrix(project) as matrix:
        matrix["images"]["quickstart"]["components"].append("torch")
        matrix["images"]["quickstart"]["size-limit-mb"]["runtime"] = 1500
    return build_of(project, TARGET, client, host)


def test_pytorch_adds_up_through_gloo(
    cluster: Slurm, torch: Built, client: DockerClient, environ: dict[str, str]
) -> None:
    """mpirun starts the ranks in one container and in two, srun on two nodes; with a wrong number of ranks, srun's fail."""
    imagebuild = Imagebuild(torch.folder.parent.parent, environ)
    words = (torch.result.target, "--only=torch/gloo*")
    runner = f"exec:srun {cluster.unpack(client, torch.tag)}"
    variables = {name: cluster.environ[name] for name in ("SLURM_CONF", "TMPDIR")}
    by_mpirun = imagebuild.verify(*words)
    by_srun = imagebuild.verify(*words, "--runner", runner, expect=0, **variables)
    found = [{c.check: c.outcome for c in each.checks if c.component == "torch"} for each in (by_mpirun, by_srun)]
    assert found == [
        {"gloo": "passed", "gloo-nodes": "passed", "gloo-slurm": "skipped"},
        {"gloo": "passed", "gloo-nodes": "skipped", "gloo-slurm": "passed"},
    ]
    wrong = imagebuild.verify(*words, "--runner", f"{runner} env SLURM_NTASKS=1", expect=1, **variables)
    assert {c.check: c.outcome for c in wrong.checks}["gloo-slurm"] == "failed"


# Jobs

SCRIPTS = ("a100-64.slurm", "b200-64-enroot-sharp.slurm", "gb200-nvl72-enroot.slurm")
"""Golden batch scripts: without a container, with a container, and for a rack."""


def sbatch(cluster: Slurm, folder: Path, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**cluster.environ, **env}
    return ran("sbatch", *words, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("name", SCRIPTS)
def test_slurm_takes_the_script(cluster: Slurm, tmp_path: Path, name: str) -> None:
    """Slurm accepts the script for two nodes, and refuses it with an unknown option or with too many nodes."""
    made = text(re.sub(r"--nodes \d+", "--nodes 2", REFERENCE[name]))
    if "--segment" not in ran("sbatch", "--help").stdout:  # before 24.05
        made = re.sub("#SBATCH --segment=.*\n", "", made)
    script = tmp_path / "job.sh"
    script.write_text(made)
    done = sbatch(cluster, tmp_path, "--test-only", script)
    assert done.returncode == 0, done.stdout
    assert re.search(r"Job \d+ to start at", done.stdout), done.stdout
    for spoiled in (made.replace("--mem=0", "--memory=0"), made.replace("--nodes=2", "--nodes=5")):
        script.write_text(spoiled)
        assert sbatch(cluster, tmp_path, "--test-only", script).returncode


class Ended(NamedTuple):
    """The status, the output and the logs of a job that has ended."""

    status: int
    output: str
    log: str


@pytest.fixture(scope="module")
def programs(cluster: Slurm) -> Path:
    """Compile the stand-in for nccl-tests with the distribution's Open MPI; return its path."""
    folder = cluster.folder / "programs"
    folder.mkdir()
    install({}, "openmpi-bin", "libopenmpi-dev", "gcc", "libc6-dev")
    ran("mpicc", ROOT / "tests/docker/nccl_standin.c", "-o", folder / "all_reduce_perf", check=True)
    return folder


def run(cluster: Slurm, programs: Path, folder: Path, behaviour: str, *options: str, imagebuild: bool = True) -> Ended:
    """Run a job with two nodes and four ranks per node to its end. `behaviour` is `VERSION FAULT GB/S`."""
    (programs / "behaviour").write_text(behaviour)
    path, script = folder / "bin", folder / "job.sh"
    path.mkdir()
    if imagebuild:
        (path / "imagebuild").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m imagebuild "$@"\n')
        (path / "imagebuild").chmod(0o755)
    line = f"slurm --profile a100-pcie --fabric ethernet --nodes 2 --container none --nccl 2.28.3 --param programs={programs}"
    made = text(shlex.join([*shlex.split(line), "--param", "interface=lo", "--param", "name=it", *options]))
    # A job of one minute has 30 s for measuring; shorten them to 10 s.
    script.write_text(made.replace("\ndeadline=30\n", "\ndeadline=10\n"))
    # The nodes share a machine and its name, so Open MPI would use shared memory between them. Its TCP crashed in one of
    # 16 runs, perhaps because two ranks connected to each other at once; with linear collectives they do not.
    env = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo", "OMPI_MCA_coll": "^tuned"}
    env |= {"PATH": f"{path}:{programs}:{cluster.environ['PATH']}", "IMAGEBUILD_PROFILES": str(ROOT / "profiles")}
    submitted = sbatch(cluster, folder, "--parsable", script, **env)
    assert not submitted.returncode, submitted.stdout
    show = ["scontrol", "show", "job", submitted.stdout.strip()]

    def facts() -> dict[str, str]:
        return dict(re.findall(r"(JobState|ExitCode)=(\S+)", ran(*show, env=cluster.environ).stdout))

    # Not `sbatch --wait`, which polls after 2, 10 and 42 seconds.
    assert until(lambda: facts()["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), 1200)
    output, log = ("".join(file.read_text() for file in folder.glob(glob)) for glob in ("*.out", "it-*/*.log"))
    return Ended(int(facts()["ExitCode"].partition(":")[0]), output, log)


@pytest.mark.parametrize("version", ["2.13", "2.19"])
def test_a_job_runs_to_its_verdict(cluster: Slurm, programs: Path, tmp_path: Path, version: str) -> None:
    ended = run(cluster, programs, tmp_path, f"{version} none 9")
    assert ended.status == 0, ended.output
    hosts = re.findall(r"# +Rank +(\d) .* on +(n\d) device", ended.log)
    assert hosts == [(str(i), f"n{i // 4 + 1}") for i in range(8)]
    assert ("=== imagebuild: json of all_reduce" in ended.output) == (version == "2.19")
    assert "hunter2" not in ended.output
    assert "all_reduce, 8 ranks, 2 nodes" in ended.output
    assert ended.output.rstrip().endswith("imagebuild: passed; speed was not judged")


APPTAINER = """\
#!/bin/bash
# A stand-in for `apptainer exec OPTION... IMAGE COMMAND...`: the image is a file with the variables of the image.
while [[ $1 != *.sif ]]; do shift; done
. "$1"
exec "${@:2}"
"""


def test_a_job_compares_two_values(cluster: Slurm, programs: Path, tmp_path: Path) -> None:
    options = ("--gpus", "1", "--blocks", "10", "--compare", "env:NCCL_ALGO=Ring,Tree", "--allow-loss", "1")
    ended = run(cluster, programs, tmp_path, "2.19 none 9", *options)
    assert ended.status == 1, ended.output
    assert re.search("slower: .*-[23].*; up to 1 % slower is allowed", ended.output), ended.output
    (pair,) = read_files(list(tmp_path.glob("it-*/compare.log"))).paired
    assert (pair.blocks, pair.problems, pair.faults) == (10, (), ())
    assert all(-4 < item.percent < -2 for item in pair.differences)


def test_each_side_starts_in_its_image(cluster: Slurm, programs: Path, tmp_path: Path) -> None:
    (programs / "apptainer").write_text(APPTAINER)
    (programs / "apptainer").chmod(0o755)
    for name, setting in {"a": "echo in a", "b": "echo in b; exit 7"}.items():
        (programs / f"{name}.sif").write_text(setting)
    images = f"image={programs}/a.sif,{programs}/b.sif"
    ended = run(cluster, programs, tmp_path, "2.19 none 9", "--container", "apptainer", "--compare", images)
    assert "run 1," in ended.output, ended.output
    (log,) = tmp_path.glob("it-*/compare.log")
    first, second = log.read_text().split("# imagebuild-compare begin ")[1:]
    assert [first.count(f"in {name}\n") for name in "ab"] == [8, 0]
    assert "in a\n" not in second
    assert "in b\n" in second, (
        "not 8 times: when the first rank fails, Slurm ends the others, perhaps before they print"
    )
    assert "end 0" in first
    assert f"run 1, image={programs}/b.sif, all_reduce: ended with status 7" in ended.output
    assert ended.status


@pytest.mark.parametrize(("behaviour", "imagebuild", "option", "problem"), CASES["a-job-fails-without-a-result"])
def test_a_job_fails_without_a_result(
    cluster: Slurm, programs: Path, tmp_path: Path, behaviour: str, imagebuild: bool, option: str, problem: str
) -> None:
    ended = run(cluster, programs, tmp_path, behaviour, "--param", option, imagebuild=imagebuild)
    assert ended.status
    assert problem in ended.output
    assert ended.output.rstrip().endswith("imagebuild: FAILED")
    assert imagebuild or "speed was not judged here; to judge it: imagebuild report" in ended.output
