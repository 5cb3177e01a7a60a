"""Facts about archives and images. The trees here are invented; test_worlds.py uses published ones."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest

from imagebuild.core.errors import CommandError, ConfigError, ImagebuildError, ResultError
from imagebuild.core.fields import Platform
from imagebuild.core.run import run_program
from imagebuild.lock import resolve
from imagebuild.lock.facts import image_facts, tree_facts, unpack
from imagebuild.lock.resolve import merged_sources
from imagebuild.project.lockfile import (
    Archive,
    BaseImage,
    Entry,
    GitRef,
    Key,
    LockedArchive,
    LockedImage,
    LockedRepository,
    PackageSource,
    Unpacked,
    WheelSet,
    check_pinned,
    key_of,
)
from imagebuild.project.plan import Target, make_plan
from imagebuild.project.project import Project
from imagebuild.project.select import select_one
from imagebuild.render.image import adaptations
from imagebuild.render.renderer import Renderer
from tests.conftest import ROOT, data
from tests.unit.conftest import Call
from tests.unit.lock.lock_fakes import A, B, Fake, lock_of
from tests.upstream import bases, hpcx

CASES = data("cases/lock/facts")

pytestmark = pytest.mark.programs
CUDA = bases.Cuda("13.4.2", "ubuntu24.04", "2.30.7-1+cuda13.3")
WANTED = Unpacked(prefix="/opt/stack", script=". ./init.sh; stack_load")


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """An unpacked archive of a few files."""
    return copytree(ROOT / "tests/data/stack", tmp_path / "stack-v1")


def test_a_tree_says_what_it_is(top: Path) -> None:
    (top / "words.txt").write_text("y" * 500_000 + "/y" * 250_000)  # a careless pattern needs hours for it
    facts = tree_facts(run_program, top, WANTED)
    assert facts.environment == {
        "LD_LIBRARY_PATH": "/opt/stack/net/lib:/opt/stack/ucx/lib:/opt/stack/sharp/lib",
        "OLD_PATH": "",
        "PATH": "/opt/stack/ucx/bin",
        "STACK_CHOICE": "a/b",
        "STACK_DIR": "/opt/stack",
        "STACK_EMPTY": "",
        "STACK_TESTS": "/opt/stack/mpi/tests",
    }
    assert facts.absent == ("mpi/tests",)
    assert facts.folders == ("net", "sharp", "sources", "ucc", "ucx")
    assert facts.versions == {"Stack": "1", "ucc": "1.4.0", "ucx": "1.18.0"}
    assert facts.sources == ("openmpi4-gitclone.tar.gz",)
    assert facts.licenses == ("LICENSE.txt",)
    assert facts.plugins == (("net/lib", "net"), ("sharp/lib", "ibext"))
    assert facts.built_in == ("/build-result/src/hpcx-v1-gcc",)


@pytest.mark.parametrize(
    ("init", "problem"), CASES["a-script-that-does-not-end-well-is-ended"], ids=["endless", "fills the disk"]
)
def test_a_script_that_does_not_end_well_is_ended(
    top: Path, init: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagebuild.lock.facts.SCRIPT_TIMEOUT_S", 2)
    monkeypatch.setattr("imagebuild.core.run.KILL_S", 1)
    (top / "init.sh").write_text(init)
    with pytest.raises(ImagebuildError, match=problem):
        tree_facts(run_program, top, WANTED)


def test_a_script_sees_nothing_of_ours(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    (top / "init.sh").write_text('stack_load() { export PATH=$PWD/bin SEEN="$(env)"; }')
    assert "secret" not in tree_facts(run_program, top, WANTED).environment["SEEN"]


def test_an_archive_is_unpacked_to_be_read(top: Path, tmp_path: Path) -> None:
    (top / "ucx/lib/libucp.a").write_text("long")
    (top / "away").symlink_to("/etc")
    (top / "late").symlink_to("x/../../away")  # leads out as soon as x is there
    (top / "x").symlink_to("..")
    with tarfile.open(tmp_path / "stack.tbz", "w:bz2") as archive:
        archive.add(top, "stack-v1")
        archive.add(top / "VERSION", "stack-v1/away/through-a-link")
    (tmp_path / "out").mkdir()
    found = unpack(tmp_path / "stack.tbz", tmp_path / "out")
    assert not any((found / name).is_symlink() for name in ("away", "late"))
    assert (found / "away/through-a-link").is_file()
    (top / "away").unlink()
    (top / "late").unlink()
    rmtree(found / "away")
    assert tree_facts(run_program, found, WANTED) == tree_facts(run_program, top, WANTED)
    assert (found / "ucx/lib/libucp.a").read_text() == ""


@pytest.fixture
def locked_hpcx(project: Project, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Project, Target]:
    """A target, and a lock that has its sources and no more.

    Facts are those of the stand-in of tests/upstream, which was made from others' evidence; other pins are made up.
    """
    unpacked = project.components["hpcx"].model.unpacked
    assert unpacked
    variant = getattr(request, "param", "devel")
    target = select_one(make_plan(project), f"hpcx-cuda13.4.2-ubuntu24.04-{variant}")
    recipe = Renderer(project).recipe(target)
    entries: dict[Key, Entry] = {}
    for source in merged_sources(owned.source for owned in recipe.sources):
        match source:
            case Archive(url=url):
                which = hpcx.Distribution("ubuntu24.04", 13, url.rpartition("-")[2].removesuffix(".tbz"), hpcx.NEWEST)
                top = hpcx.unpack(hpcx.files(hpcx.release(hpcx.NEWEST), which), tmp_path / which.name)
                facts = tree_facts(run_program, top, unpacked)
                entries[key_of(source)] = LockedArchive(sha256=A, facts=facts)
            case BaseImage(facts=wanted):
                env = [f"{name}={value}" for name, value in CUDA.environment("devel").items()]
                facts_of_all = dict.fromkeys(target.platforms, image_facts({"config": {"Env": env}}))
                entries[key_of(source)] = LockedImage(digest=f"sha256:{B}", facts=facts_of_all if wanted else None)
            case PackageSource(packages=packages):
                versions = {package: package.partition("=")[2] or "1.0" for package in packages}
                entries[key_of(source)] = LockedRepository(fingerprint="F" * 40, packages=versions)
            case GitRef():
                entries[key_of(source)] = "c" * 40
            case WheelSet():
                entries[key_of(source)] = ()
    return replace(project, lock=lock_of(entries)), target


def with_env(project: Project, **env: str) -> Renderer:
    """A renderer of the project, whose image `hpcx` sets these variables."""
    matrix = project.matrix.model
    hpcx = matrix.images["hpcx"].model_copy(update={"env": env})
    model = matrix.model_copy(update={"images": {**matrix.images, "hpcx": hpcx}})
    changed = replace(project, matrix=replace(project.matrix, model=model))
    return Renderer(changed)


def test_what_is_ours_of_the_environment_stays(locked_hpcx: tuple[Project, Target]) -> None:
    made, target = locked_hpcx
    with pytest.raises(
        ConfigError, match="matrix.yaml:[0-9]+: env.OPAL_PREFIX: is '/usr', but openmpi-hpcx needs '/opt/hpcx/ompi'"
    ):
        with_env(made, OPAL_PREFIX="/usr").dockerfile(target)
    renderer = with_env(made, LD_LIBRARY_PATH="/opt/mine/lib", PATH="/opt/mine/bin")
    assert 'ENV PATH="/opt/mine/bin:/opt/nccl-tests' in renderer.dockerfile(target).text


def test_no_variable_names_an_open_mpi_that_is_not_in_the_image(locked_hpcx: tuple[Project, Target]) -> None:
    made, target = locked_hpcx
    components = {name: v for name, v in target.components.items() if name not in ("openmpi-hpcx", "nccl-tests")}
    lines = Renderer(made).dockerfile(target.model_copy(update={"components": components})).text.splitlines()
    assert not [line for line in lines if re.search(r"[=:]\"?/opt/hpcx/ompi\b", line)]
    assert [line for line in lines if line.startswith("    HPCX_UCX_DIR=")]


def test_what_images_adapt_is_said_once(locked_hpcx: tuple[Project, Target]) -> None:
    lines = list(adaptations(with_env(locked_hpcx[0]).recipe(locked_hpcx[1])))
    assert "nvidia/cuda:13.4.2-devel-ubuntu24.04: contains NCCL 2.30.7-1+cuda13.3, images get 2.32.3" in lines
    assert "hpcx: /opt/hpcx/ompi5 is /opt/hpcx/ompi in images" in lines
    assert len(lines) == len(set(lines)) < 25


@pytest.mark.parametrize(("platform", "others"), [("linux/amd64", "aarch64|sbsa"), ("linux/arm64", "x86_64")])
def test_a_build_for_one_platform_needs_no_sources_of_the_other(
    locked_hpcx: tuple[Project, Target], platform: Platform, others: str
) -> None:
    made, target = locked_hpcx
    lock = lock_of({key: entry for key, entry in made.lock.entries() if not re.search(others, key[1])})
    renderer = with_env(replace(made, lock=lock))
    sources = tuple(owned.source for owned in renderer.recipe(target).sources_for([platform]))
    assert not [source for source in sources if re.search(others, key_of(source)[1])]
    check_pinned(lock, sources)
    text = renderer.dockerfile(target).text
    (missing,) = (line for line in text.splitlines() if "unresolved" in line)
    assert re.search(rf"ADD --checksum=sha256:unresolved .*({others})", missing)


@pytest.mark.parametrize("locked_hpcx", ["runtime"], indirect=True)
def test_a_runtime_image_asks_for_no_package_of_devel(locked_hpcx: tuple[Project, Target]) -> None:
    text = with_env(locked_hpcx[0]).dockerfile(locked_hpcx[1]).text
    stages, _, image = text.partition(" AS image\n")
    assert ("infiniband-diags=" in stages, "infiniband-diags" in image) == (True, False)


def test_the_dockerfile_of_hpcx_for_what_was_shown_of_it(
    locked_hpcx: tuple[Project, Target], golden: Callable[[str, str], None]
) -> None:
    made, target = locked_hpcx
    check_pinned(made.lock, (owned.source for owned in with_env(made).recipe(target).sources))
    text = with_env(made).dockerfile(target).text
    assert "unresolved" not in text
    golden(f"tests/golden/{target.id}.Dockerfile", text)


def test_an_unlocked_target_becomes_a_dockerfile_in_one_command(
    locked_hpcx: tuple[Project, Target], command: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In an empty folder. `render`, `build` and `verify` propose one command, which works as printed."""
    (here := tmp_path / "empty").mkdir()
    monkeypatch.chdir(here)
    (made, target), fake = locked_hpcx, Fake()
    monkeypatch.setattr(resolve, "network_upstream", lambda *_, **__: fake)
    for name in ("render", "build", "verify"):
        status, _, message = command(name, target.id)
        (proposed,) = re.findall("run `(.*?)`", message)
        assert (status, proposed) == (2, f"imagebuild lock {target.id}")
        status, printed, message = command(name, target.id, "--lock")
        assert (status, printed) == (4, "")
        assert "servers that did not answer: content.mellanox.com, developer.download.nvidia.com, " in message
    (report,) = here.glob("build/*")
    assert len(json.loads(report.read_text())["failures"]) >= 8
    monkeypatch.setattr(fake, "resolve", lambda source, *_: made.lock.entry(key_of(source)))
    status, text, _ = command("render", target.id, "--lock")
    assert (status, "unresolved" in text, text.startswith(f"# {target.id}\n")) == (0, False, True)
    assert command("render", target.id)[1] == text
    (here / "imagebuild.lock").unlink()
    assert command(*proposed.split()[1:])[0] == 0
    assert command("render", target.id)[1] == text
    status, printed, _ = command("plan", "hpcx")
    rows = {words[0]: " ".join(words[3:-1]) for line in printed.splitlines() if len(words := line.split()) > 6}
    assert rows[target.id] == "16 of 16"
    assert rows["hpcx-cuda13.2.1-ubuntu24.04-devel"] == "16 of 16, not read: 1"
    assert command("render", target.id, "--lock", "-o", "other/Dockerfile")[0] == 0
    assert [path.name for path in (here / "other").iterdir()] == ["Dockerfile"], "the lock in this folder has all pins"


def test_an_image_trusts_the_keys_of_all_its_repositories(locked_hpcx: tuple[Project, Target]) -> None:
    """The stage that makes the keyring is built on another release than the image, and has other repositories."""
    made, target = locked_hpcx
    entries = dict(made.lock.entries())
    for (kind, url), entry in made.lock.entries():
        if isinstance(entry, LockedRepository) and re.search("doca/.*ubuntu24.04", url):
            fingerprint = ("D" if "x86_64" in url else "E") * 40
            entries[kind, url] = entry.model_copy(update={"fingerprint": fingerprint})
    text = with_env(replace(made, lock=lock_of(entries))).dockerfile(target).text
    assert f"set -- {'F' * 40} {'D' * 40} {'E' * 40}\n" in text
    added = re.findall(r"AS (doca-ofed-key\S*)\nADD \S+/doca/3.5.0/(\S+)/doca_keyring.gpg /\n", text)
    assert added == [
        ("doca-ofed-key", "ubuntu22.04/x86_64"), ("doca-ofed-key-2", "ubuntu24.04/x86_64"),
        ("doca-ofed-key-3", "ubuntu24.04/arm64-sbsa"),
    ]  # fmt: skip
    assert all(f"--mount=type=bind,from={name},target=/run/key/{i} " in text for i, (name, _) in enumerate(added, 1))


def test_versions_that_differ_between_architectures(locked_hpcx: tuple[Project, Target]) -> None:
    """Each remedy in the message works."""
    made, target = locked_hpcx
    entries = dict(made.lock.entries())
    for (kind, url), entry in made.lock.entries():
        if isinstance(entry, LockedRepository) and "doca/" in url and "sbsa" in url:
            entries[kind, url] = entry.model_copy(update={"packages": {**entry.packages, "libibverbs1": "2.0"}})
    differing = replace(made, lock=lock_of(entries))
    with pytest.raises(
        ConfigError, match="libibverbs1 has the versions 1.0, 2.0 in .*; set `platforms` of the image to"
    ):
        with_env(differing).dockerfile(target)
    one = target.model_copy(update={"platforms": ("linux/amd64",)})
    assert "libibverbs1=1.0" in with_env(differing).dockerfile(one).text
    file = made.components["doca-ofed"]
    named = tuple(f"{name}=1.0" if name == "libibverbs1" else name for name in file.model.packages.runtime)
    packages = file.model.packages.model_copy(update={"runtime": named})
    other = replace(file, model=file.model.model_copy(update={"packages": packages}))
    asked = replace(differing, components={**differing.components, "doca-ofed": other})
    assert "libibverbs1=1.0" in with_env(asked).dockerfile(target).text


@pytest.mark.parametrize("members", CASES["tricks"].values(), ids=CASES["tricks"])
def test_an_archive_with_a_trick_is_refused(tmp_path: Path, members: list[dict[str, Any]]) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("stack/first"), io.BytesIO())
        for fields in members:
            member = tarfile.TarInfo(fields.get("name", "stack/a"))
            member.type = fields.get("type", "0").encode()
            member.linkname, member.size = fields.get("linkname", ""), fields.get("size", 0)
            long = {"comment": "x" * fields["comment"]} if "comment" in fields else {}
            member.pax_headers = fields.get("pax_headers", long)
            archive.addfile(member)
    with pytest.raises(ResultError, match="cannot be unpacked"):
        unpack(tmp_path / "a.tar", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "out"]


def test_a_script_reads_no_file_and_reaches_no_network(top: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    seen = f"$(cat {tmp_path}/secret /etc/passwd 2> /dev/null; ls /root /home /proc; exec 3<> /dev/tcp/127.0.0.1/22 && echo net)"
    (top / "init.sh").write_text(f'stack_load() {{ export PATH=$PWD/bin SEEN="{seen}"; }}')
    assert tree_facts(run_program, top, WANTED).environment["SEEN"] == ""


def test_a_script_that_cannot_be_isolated_runs_only_if_told(top: Path) -> None:
    """`unshare` is refused as a kernel without namespaces refuses it: the limit of namespaces is 0 in a nested one."""
    shell = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'

    def nested(*argv: str, **options: object) -> str:
        return run_program("unshare", "--user", "--map-root-user", "bash", "-c", shell, "bash", *argv, **options)  # type: ignore[arg-type]

    with pytest.raises(CommandError, match=r"does not allow imagebuild to isolate it .*No space.*--no-isolation"):
        tree_facts(nested, top, WANTED)
    assert os.geteuid() or tree_facts(run_program, top, WANTED, isolated=False).environment["STACK_DIR"] == "/opt/stack"
