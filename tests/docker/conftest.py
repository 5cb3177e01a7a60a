"""Fixtures for the tests with a real engine. They do not use mocks, and they remove all that a test starts."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import yaml
from docker import DockerClient
from docker.errors import APIError, NotFound
from docker.models.containers import Container
from xdist.scheduler import LoadFileScheduling

from imagebuild.bench.verification import VerifyResult
from imagebuild.build import private
from imagebuild.build.base import bootstrap
from imagebuild.build.private import engine_processes, start_engine, stop_engine
from imagebuild.core import debian
from imagebuild.core.errors import CommandError
from imagebuild.core.files import cache_folder
from imagebuild.core.run import native_platform, run_program, which
from imagebuild.oci.engine import LABEL, Endpoint, EnginePaths, connect_engine, find_engine
from imagebuild.project.records import BuildResult
from tests.conftest import ROOT, Files
from tests.faulty import Faulty, in_front_of
from tests.upstream import registry as docker_registry

if TYPE_CHECKING:
    from pytest_docker.plugin import Services as ComposeServices

    from tests.upstream.standin import Upstream


MARK = uuid4().hex[:8]
REPOSITORY = f"imagebuild-test-{MARK}"
"""The repository of all images that this test process builds. It is unique, so that no other image is changed."""
TARGET, TINY_TARGET = "quickstart-cuda13.5-debian13-runtime", "tiny-cuda13.0-debian13-runtime"
OURS = {
    "DOCKER_HOST", "FORCE_COLOR", "IMAGEBUILD_CONFIG", "IMAGEBUILD_PROJECT", "IMAGEBUILD_STATE", "NO_COLOR",
}  # fmt: skip
"""Environment variables that would change the tested behaviour, and are therefore not inherited."""


@dataclass(frozen=True)
class Done:
    """The result of a command that has ended."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Imagebuild:
    """The command `imagebuild`, called in a folder with an environment."""

    folder: Path
    environ: Mapping[str, str]
    limit: float = 1200
    """Maximum duration of a command, in seconds."""

    def start(self, *args: str | Path, **environ: str) -> subprocess.Popen[str]:
        """Start a command without waiting for its end, so that a test can interrupt it."""
        return subprocess.Popen(
            [sys.executable, "-m", "imagebuild", *map(str, args)], cwd=self.folder, env={**self.environ, **environ},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # Background processes of a shell ignore Ctrl-C, and their children inherit this.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
        )  # fmt: skip

    def __call__(self, *args: str | Path, expect: int = 0, **environ: str) -> Done:
        done = finish(self.start(*args, **environ), self.limit)
        assert done.status == expect, f"exit status {done.status}\n{done.out}\n{done.err}"
        assert "Traceback" not in done.err
        return done

    def verify(self, *args: str | Path, expect: int = 0, **environ: str) -> VerifyResult:
        """Run `imagebuild verify`; return its result."""
        self("verify", *args, "--json", self.folder / "verify.json", expect=expect, **environ)
        return VerifyResult.model_validate_json((self.folder / "verify.json").read_text())


def finish(process: subprocess.Popen[str], seconds: float = 300) -> Done:
    """Wait for the end of a command. Fail the test if the command does not end within `seconds`."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"did not end within {seconds:.0f} s: {process.args!r}\n{process.communicate()}")
    return Done(process.returncode, out, err)


def until(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Wait until the condition is true; return whether this happened within `seconds`. Busy machines need long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def processes(*, argv: str = "", environ: str = "") -> dict[int, list[str]]:
    """Map pids to arguments, for the processes whose arguments and environment contain the given texts."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
            if any(argv in word for word in words) and environ.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = words
    return found


def sleeping(seconds: str) -> bool:
    """Return whether a process runs `sleep SECONDS`, also in a container or a build step.

    The engine's own list of processes needs `ps` on its host.
    """
    return any(Path(words[0]).name == "sleep" for words in processes(argv=seconds).values())


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def half_written(folder: Path) -> list[str]:
    """Return the temporary files that a build must remove before it ends."""
    found = (p for p in folder.rglob("*") if p.name.startswith(".") or p.name == "metadata.json")
    return [str(p) for p in found if p.name != ".lock"]  # the lock of the folder stays


TOGETHER = {
    "standin": ("test_hpcx", "test_hpcx_broken"),
    "quickstart": (
        "test_quickstart", "test_verify", "test_attest", "test_job_pods", "test_scan_diff", "test_inspect", "test_nodes",
        "test_slurm",
    ),
}  # fmt: skip
"""Test modules that run in the same process, because they share NVIDIA's stand-in or quickstart's images."""
FIRST = (
    *TOGETHER["standin"], *TOGETHER["quickstart"], "test_workflows", "test_publish", "test_impact", "test_broken",
    "test_mirrors",
)  # fmt: skip
"""Test modules in the order in which they begin. Long modules are first, so that the processes end at similar times."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


class Spread(LoadFileScheduling):  # type: ignore[misc] # has no types
    """The schedule of test processes: all tests of a module run in one process, because they share built images.

    The groups of pytest-xdist 3.8 have no effect with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return next((group for group, modules in TOGETHER.items() if Path(file).stem in modules), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spread:
    return Spread(config, log)


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Hold a lock named `what`, so that only one test process on this machine does it at a time."""
    with (Path(tempfile.gettempdir()) / f"imagebuild-test-{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session", autouse=True)
def host() -> Iterator[str]:
    """Return the address of the engine that imagebuild finds."""
    with pytest.MonkeyPatch.context() as patched:
        found = find_engine(os.environ).host
        patched.setenv("DOCKER_HOST", found)
        yield found


@pytest.fixture(scope="session")
def client(host: str) -> Iterator[DockerClient]:
    connected = connect_engine(Endpoint(host, "DOCKER_HOST"))
    yield connected
    # Not `images.list()`, which inspects each image and fails if another client has removed one meanwhile.
    for image in connected.api.images():
        # Images that lost their name to a newer build have only the label. Removal by digest is not forced, because
        # other clients may use an equal image.
        unnamed = (image["Labels"] or {}).get("org.opencontainers.image.description") == MARK
        for name in (*(image["RepoTags"] or ()), *(image["RepoDigests"] or ()), *([image["Id"]] if unnamed else ())):
            if unnamed or REPOSITORY in name:
                with suppress(APIError):
                    connected.images.remove(name, force="@" not in name)
    connected.close()


@contextmanager
def watched(client: DockerClient, host: str) -> Iterator[dict[str, str]]:
    """Yield an environment for commands. Afterwards, fail if the commands left processes, containers or files."""
    mark = uuid4().hex
    # Not in pytest's folder, because apt's user cannot enter it.
    with tempfile.TemporaryDirectory(prefix="imagebuild-test-") as folder:
        Path(folder).chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if name not in OURS}
        try:
            yield {**inherited, "DOCKER_HOST": host, "PYTHONPATH": str(ROOT), "TMPDIR": folder, "IMAGEBUILD_TEST": mark}
            until(lambda: not processes(environ=mark) and not containers(client))  # engines remove them with a delay
            assert not [*processes(environ=mark).values(), *containers(client), *Path(folder).iterdir()]
        finally:
            kill(processes(environ=mark))


def containers(client: DockerClient) -> list[str]:
    """Return the names of containers that imagebuild started from images of this test process."""
    found = client.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True)
    return [str(c.name) for c in found if REPOSITORY in c.attrs["Config"]["Image"]]


def unused_networks(client: DockerClient) -> set[str]:
    """Return the names of imagebuild's networks that no container uses. Networks of other clients are rarely unused."""
    unused = set()
    for network in client.api.networks(filters={"label": LABEL}):
        with suppress(NotFound):  # another client has just removed it
            if not client.api.inspect_network(network["Id"])["Containers"]:
                unused.add(str(network["Name"]))
    return unused


@pytest.fixture
def environ(client: DockerClient, host: str) -> Iterator[dict[str, str]]:
    with watched(client, host) as values:
        yield values


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of this project with another repository for its images."""
    return copy_of_project(tmp_path_factory.mktemp("checkout"))


def copy_of_project(folder: Path) -> Path:
    shutil.copytree(ROOT / "dockerfiles", folder / "dockerfiles")
    shutil.copy(ROOT / "imagebuild.lock", folder)
    shutil.copy(ROOT / "matrix.yaml", folder)
    with edited_matrix(folder) as matrix:
        matrix["repository"] = REPOSITORY
    return folder


@contextmanager
def edited_matrix(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a project's matrix, and write it back with the changes."""
    matrix = yaml.safe_load((folder / "matrix.yaml").read_text())
    yield matrix
    (folder / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False))


def own_cache(folder: Path) -> dict[str, str]:
    """Return environment variables for a new cache in this folder. It has only the base images, which build slowly."""
    cache = folder / "cache" / "imagebuild"
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "base").exists():
        (cache / "base").symlink_to(cache_folder())
    return {"XDG_CACHE_HOME": str(cache.parent)}


@pytest.fixture
def imagebuild(checkout: Path, environ: dict[str, str]) -> Imagebuild:
    return Imagebuild(checkout, environ)


@dataclass(frozen=True)
class Built:
    """A built target of this project."""

    folder: Path

    @property
    def result(self) -> BuildResult:
        return BuildResult.model_validate_json((self.folder / "result.json").read_text())

    @property
    def tag(self) -> str:
        return self.result.tags[0]


def build_of(checkout: Path, target: str, client: DockerClient, host: str) -> Built:
    with watched(client, host) as environ:
        Imagebuild(checkout, environ)("build", target, "--platform", "local", "--load")
    return Built(checkout / "build" / target)


@pytest.fixture(scope="session")
def devel(checkout: Path, client: DockerClient, host: str) -> Built:
    """Build the devel image, in which tests compile programs for the quickstart image."""
    return build_of(checkout, TARGET.replace("runtime", "devel"), client, host)


@pytest.fixture(scope="session")
def quickstart(checkout: Path, client: DockerClient, host: str) -> Built:
    """Build the image that `make image` builds."""
    return build_of(checkout, TARGET, client, host)


COMPONENT = """\
title: {name}
description: for a test
homepage: https://example.org
license: MIT
"""
STAGE = """\
FROM {{ base }} AS {{ name }}
RUN mkdir -p /out/runtime && \\
    echo "{{ version }} $(cat /proc/sys/kernel/random/uuid)" > /out/runtime/{{ name }} && cp -r /out/runtime /out/devel
"""


@dataclass
class Tiny(Files):
    """A project whose stages build quickly and without a network, and are never cached: each test has new versions.

    `library` is one stage for all targets, `tool` is one stage per CUDA version, `plugin` is only in devel images.
    Their output contains a UUID, so that a second execution is visible.
    """

    root: Path
    environ: Mapping[str, str]
    nonce: str = field(default_factory=lambda: uuid4().hex[:12])

    def __post_init__(self) -> None:
        super().__init__(self.root)
        matrix = (ROOT / "tests/data/tiny-docker.yaml").read_text()
        for word, value in {"REPOSITORY": REPOSITORY, "MARK": MARK, "NONCE": self.nonce}.items():
            matrix = matrix.replace(word, value)
        self.write("matrix.yaml", matrix)
        self.add("library", self.new)
        self.add("tool", "key: [cuda]\nrequires: [library]\nbuild-requires: [library]\n", with_="{{ key.cuda }}")
        self.add("plugin", "variants: [devel]\nbuild-requires: [library]\n", with_="plugin")

    @property
    def new(self) -> str:
        """Return lines for a component.yaml that make the packages step of all images unique to this project."""
        return f'packages: {{after-install: ": {self.nonce}"}}\n'

    def add(self, name: str, more: str = "", with_: str = "") -> None:
        """Add a component. If `with_` is set, its step also depends on that word and on the output of `library`."""
        stage = STAGE.replace("RUN", f"RUN --mount=type=bind,from=library,target=/{with_} \\\n   ") if with_ else STAGE
        self.component(name, COMPONENT.format(name=name) + more, build=stage)

    def step(self, command: str) -> None:
        """Let `library` run this command. The step is never cached."""
        stage = f"FROM {{{{ base }}}} AS library\nRUN {command} # {self.nonce}\n"
        self.write("dockerfiles/components/library/build.j2", stage)

    @property
    def forever(self) -> str:
        """Return a very long time to sleep, in seconds, that no other process uses."""
        return f"1000{int(self.nonce, 16)}"

    @property
    def imagebuild(self) -> Imagebuild:
        return Imagebuild(self.root, self.environ)

    def result(self, target: str = TINY_TARGET) -> BuildResult:
        return BuildResult.model_validate_json((self.root / "build" / target / "result.json").read_text())

    def build(self, *args: str | Path, expect: int = 0, **environ: str) -> Done:
        """Run `imagebuild build` for this machine's platform. Assert that a failed build keeps earlier results."""
        before = self._results()
        done = self.imagebuild("build", "--platform", "local", *args, expect=expect, **environ)
        assert not half_written(self.root / "build")
        assert not expect or self._results() == before
        return done

    def _results(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.root.glob("build/*/result.json")}


@pytest.fixture
def tiny(tmp_path: Path, environ: dict[str, str]) -> Iterator[Tiny]:
    project = Tiny(tmp_path, environ)
    yield project
    kill(processes(argv=project.forever))


@dataclass(frozen=True)
class SecondEngine:
    """A private engine whose disk a test may fill, and that a test may stop."""

    environ: dict[str, str]
    host: str

    def stop(self) -> None:
        stop_engine(self.environ)


@pytest.fixture
def second_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondEngine]:
    """Start an engine with a disk of 400 MB. Only one runs at a time, because each chooses unused network addresses."""
    if os.geteuid():
        pytest.skip("a second engine needs root")
    state = tmp_path_factory.mktemp("engine")
    environ = {**os.environ, "IMAGEBUILD_STATE": str(state)}
    paths = EnginePaths.of(environ)
    with alone("engine"):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m,mode=755", "imagebuild-test", state], check=True)
        try:
            start_engine(environ)
            yield SecondEngine(environ, paths.host)
        finally:
            stop_engine(environ, purge=True)
            subprocess.run(["umount", state], check=True)
    assert not engine_processes(paths)
    assert not [path for path in (paths.run, Path("/sys/class/net") / paths.bridge) if path.exists()]


def install(programs: Mapping[str, str], *packages: str) -> None:
    """Install packages, and the packages of missing programs. `programs` maps each program to its package."""
    if missing := [*(package for program, package in programs.items() if not which(program)), *packages]:
        if os.geteuid():
            pytest.skip(f"installing {' '.join(missing)} needs root")
        private.install(missing, run_program)


def need(program: str) -> None:
    """Install a program, or skip the test if the distribution's archive does not have the program."""
    try:
        install({program: program})
    except CommandError as error:
        pytest.skip(f"the distribution's archive has no {program}: {error}")


@pytest.fixture(scope="session")
def docker_compose_file() -> Path:
    return Path(__file__).with_name("docker-compose.yml")


@pytest.fixture(scope="session")
def docker_compose_project_name() -> str:
    return REPOSITORY


def compose_command(file: Path, **variables: str) -> str:
    """Write the variables of the compose file; return the command that reads them."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        # Ubuntu's package docker-compose is the old program, not the plug-in.
        install({}, "docker-compose-v2" if debian.os_release().get("ID") == "ubuntu" else "docker-compose")
    file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    return f'docker compose --env-file "{file}"'


@pytest.fixture(scope="session")
def docker_compose_command(client: DockerClient, tmp_path_factory: pytest.TempPathFactory) -> str:
    made = bootstrap([native_platform()], cache_folder(), release="trixie", log=lambda _line: None)
    return compose_command(tmp_path_factory.mktemp("compose") / "variables", BASE=made, REPOSITORY=REPOSITORY)


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    return ["build --quiet", "up --detach --no-build"]


@pytest.fixture(scope="session")
def docker_cleanup() -> list[str]:
    return ["down --volumes --timeout 1"]


@dataclass(frozen=True)
class Services:
    """The services of the compose file, shared by all tests of this process."""

    proxy: Faulty
    storage: Container
    """The container with the registry's files below /data."""

    @property
    def registry(self) -> str:
        """`host:port` of the registry."""
        return self.proxy.upstream

    def emptied(self) -> Services:
        """Remove the files and rules of earlier tests. The registry does not cache files in memory."""
        self.proxy.clear()
        # Delete in the background, because deleting thousands of files may take seconds.
        aside = "mkdir -p /data/docker && mv /data/docker /data/old-$$ && (rm -rf /data/old-* > /dev/null 2>&1 &)"
        status, output = self.storage.exec_run(["sh", "-c", aside])
        assert status == 0, output
        return self


@pytest.fixture(scope="session")
def services(
    docker_ip: str, docker_services: ComposeServices, docker_compose_project_name: str, client: DockerClient
) -> Iterator[Services]:
    registry = f"{docker_ip}:{docker_services.port_for('registry', 5000)}"
    docker_services.wait_until_responsive(lambda: docker_registry.answers(registry), timeout=60, pause=0.1)
    with in_front_of(registry) as proxy:
        yield Services(proxy, client.containers.get(f"{docker_compose_project_name}-registry-1"))


@pytest.fixture
def registry(services: Services) -> str:
    """Return the address of an empty docker-registry of the distribution, which permits deletion."""
    return services.emptied().registry


@pytest.fixture
def faulty(registry: str, services: Services) -> Faulty:
    """Return a proxy for the registry at `faulty.address`. `faulty.rule(…)` adds faults."""
    return services.proxy


@contextmanager
def own_registry(folder: Path, *, deletes: bool = True) -> Iterator[str]:
    """Run a second registry, or a registry with other settings than the compose file's."""
    install({"docker-registry": "docker-registry"})
    try:
        with docker_registry.running(folder / "data", deletes=deletes) as address:
            yield address
    finally:
        shutil.rmtree(folder / "data", ignore_errors=True)


@pytest.fixture(scope="session")
def upstream(host: str, request: pytest.FixtureRequest) -> Iterator[Upstream]:
    """Serve the stand-in for NVIDIA's servers, without faults."""
    from tests.upstream import bases  # noqa: PLC0415 - most tests do not need it
    from tests.upstream.standin import PROGRAMS, Upstream  # noqa: PLC0415

    install(PROGRAMS)
    chosen, whole = map(request.config.getoption, ("--hpcx", "--whole-hpcx"))
    made = Upstream.make(bases.of_targets(chosen), sources=whole)
    with made.serve():
        yield made


@pytest.fixture(scope="session")
def locked(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory, client: DockerClient, host: str) -> Path:
    """Return a project that uses the stand-in, with a complete lock for the tested targets."""
    from tests.docker import standin  # noqa: PLC0415 - most tests do not need it

    folder = standin.project(tmp_path_factory.mktemp("hpcx"), upstream)
    with watched(client, host) as environ:
        run = Imagebuild(folder, {**environ, "IMAGEBUILD_CONFIG": str(folder / "config.yaml")})
        standin.lock(run, f"{upstream.cuda.targets}-*")
    return folder
