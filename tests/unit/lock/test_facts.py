"""What archives and images say about themselves. The trees here are made up; those of the world are in tests/upstream."""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.core import CommandError, ConfigError, ImagebuildError, ResultError, run_program
from imagebuild.lock import image_facts, lock_from_table, tree_facts, unpack
from imagebuild.project import (
    Archive,
    ArchiveTree,
    BaseImage,
    Changes,
    GitRef,
    LockedArchive,
    LockedImage,
    LockedRepository,
    PackageSource,
    Project,
    Table,
    Target,
    TreeFacts,
    Unpacked,
    check_resolved,
    key_of,
    make_plan,
    versions_with,
)
from imagebuild.render import Renderer
from tests.upstream import bases, hpcx

pytestmark = pytest.mark.programs
CUDA = bases.Cuda("13.4.2", "ubuntu24.04", "13.4", "2.30.7-1+cuda13.3")
WANTED = ArchiveTree(prefix="/opt/stack", script=". ./init.sh; stack_load")
INIT = """
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
stack_load() {
  export STACK_DIR=$here STACK_EMPTY= STACK_TESTS=$here/mpi/tests STACK_CHOICE=a/b
  export OLD_PATH=$PATH PATH=$here/ucx/bin:$PATH
  export LD_LIBRARY_PATH=$here/net/lib:$here/ucx/lib:$here/sharp/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}:
  echo "a script may print what it likes"
}
"""


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A tree of a few files, unpacked."""
    folder = tmp_path / "stack-v1"
    texts = {
        "init.sh": INIT,
        "VERSION": "Stack v1\nucx-152bf42db308b4cb42739fd706ce9f8b8e87246b  1.18.0 (152bf42)\nOFED: some\n",
        "LICENSE.txt": "yes",
        "ucx/bin/ucx_info": "",
        "ucx/lib/pkgconfig/ucx.pc": "prefix=/build-result/src/hpcx-v1-gcc\nVersion: 9\n",
        "ucc/lib/pkgconfig/ucc.pc": "prefix=/somewhere\nVersion: 1.4.0\n",
        "sharp/lib/libnccl-net.so": "",
        "sharp/lib/libnccl-net-ibext.so": "",
        "net/lib/libnccl-net.so": "",
        "sources/openmpi4-gitclone.tar.gz": "",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_tree_says_what_it_is(top: Path) -> None:
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
    ("init", "problem"),
    [
        (None, "init.sh"),
        ("stack_load() { exit 3; }", "failed"),
        ("stack_load() { export STACK_DIR=1; }", "sets neither"),
        ("stack_load() { :; }; unset PATH; while :; do :; done", "did not answer within|failed"),
        ("stack_load() { head -c 3000000 /dev/zero > big; }", "failed"),
    ],
    ids=["absent", "fails", "empty", "endless", "fills the disk"],
)
def test_a_script_that_is_of_no_use_stops(
    top: Path, init: str | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagebuild.lock.facts.SCRIPT_TIMEOUT_S", 2)
    (top / "init.sh").unlink()
    if init:
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
    with tarfile.open(tmp_path / "stack.tbz", "w:bz2") as archive:
        archive.add(top, "stack-v1")
        archive.add(top / "VERSION", "../above")
        archive.add(top / "VERSION", "stack-v1/away/through-a-link")
    (tmp_path / "out").mkdir()
    found = unpack(tmp_path / "stack.tbz", tmp_path / "out")
    assert not (found / "away").is_symlink()
    assert not (tmp_path / "above").exists()
    assert (found / "away/through-a-link").is_file()
    (top / "away").unlink()
    shutil.rmtree(found / "away")
    assert tree_facts(run_program, found, WANTED) == tree_facts(run_program, top, WANTED)
    assert (found / "ucx/lib/libucp.a").read_text() == ""


def test_a_tree_that_lacks_what_an_image_needs_stops(top: Path) -> None:
    wanted = WANTED.model_copy(update={"needs": ("ucx/bin", "sources/openmpi*", "ucc/lib/libucc.so*", "hcoll")})
    with pytest.raises(
        ResultError, match=r"expected ucc/lib/libucc.so\*, hcoll .* found net, sharp, sources, ucc, ucx"
    ):
        tree_facts(run_program, top, wanted)


def test_half_an_archive_is_none(top: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "stack.tbz", "w:bz2") as archive:
        archive.add(top, "stack-v1")
    whole = (tmp_path / "stack.tbz").read_bytes()
    (tmp_path / "stack.tbz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "out").mkdir()
    with pytest.raises(ResultError, match="cannot be unpacked"):
        unpack(tmp_path / "stack.tbz", tmp_path / "out")


def test_an_image_says_what_it_is() -> None:
    config = {
        "config": {
            "Env": [
                "PATH=/usr/local/cuda/bin:/usr/bin",
                "NV_LIBNCCL_PACKAGE_NAME=libnccl2",
                "NV_LIBNCCL_PACKAGE=libnccl2=2.30.7-1+cuda13.3",
                "NV_LIBCUBLAS_PACKAGE_NAME=libcublas-13-3",
            ]
        },
        "history": [
            {
                "created_by": "RUN /bin/sh -c apt-mark hold ${NV_LIBCUBLAS_PACKAGE_NAME} ${NV_LIBNCCL_PACKAGE_NAME} # buildkit"
            },
            {"empty_layer": True},
        ],
    }
    facts = image_facts(config)
    assert (facts.nccl, facts.held) == ("2.30.7-1+cuda13.3", ("libcublas-13-3", "libnccl2"))
    assert facts.environment["PATH"] == "/usr/local/cuda/bin:/usr/bin"
    assert image_facts({"config": None}).held == ()
    with pytest.raises(ResultError, match="cannot be read"):
        image_facts({"config": {"Env": [1]}})


def test_commands_of_scripts_are_not_shown_whole(top: Path) -> None:
    (top / "init.sh").write_text("stack_load() { echo 'no such folder' >&2; return 1; }")
    with pytest.raises(CommandError) as error:
        tree_facts(run_program, top, WANTED)
    assert str(error.value).count("\n") == 0
    assert "no such folder" in str(error.value)


UNPACKED = Unpacked(
    prefix="/opt/stack",
    script=WANTED.script,
    replaced={"mpi": ("mpi4", "mpi5")},
    removed=("sources", "net/debug*"),
    left_out=("OLD_*", "PMIX_*"),
)


@pytest.mark.parametrize(
    ("values", "absent", "wanted", "note"),
    [
        ({"STACK_DIR": "/opt/stack"}, (), {"STACK_DIR": "/opt/stack"}, ""),
        (
            {"MPI_HOME": "/opt/stack/mpi5"},
            (),
            {"MPI_HOME": "/opt/stack/mpi"},
            "/opt/stack/mpi5 is /opt/stack/mpi in images",
        ),
        ({"TESTS": "/opt/stack/mpi4/tests"}, (), {}, "TESTS: /opt/stack/mpi4/tests is not in the image"),
        (
            {"OLD_PATH": "/usr/bin", "PMIX_INSTALL_PREFIX": "/opt/stack/mpi4"},
            (),
            {},
            "OLD_PATH, PMIX_INSTALL_PREFIX: no image has these",
        ),
        ({"EMPTY": "", "OPTION": "a/b", "ELSEWHERE": "/usr/lib"}, (), {"OPTION": "a/b", "ELSEWHERE": "/usr/lib"}, ""),
        ({"KIT": "/opt/stack/kit"}, ("kit",), {}, "KIT: /opt/stack/kit is not in the image"),
        (
            {
                "PATH": "/opt/stack/mpi5/bin:/opt/stack/mpi4/bin:/opt/stack/sources/x:/opt/stack/net/debug-1/bin:/opt/stack/ucx"
            },
            (),
            {"PATH": "/opt/stack/mpi/bin:/opt/stack/ucx"},
            "PATH: /opt/stack/net/debug-1/bin is not in the image",
        ),
    ],
    ids=["own", "other MPI", "tests of MPI", "never", "as it is", "absent", "list"],
)
def test_what_an_image_takes_of_the_environment(
    values: dict[str, str], absent: tuple[str, ...], wanted: dict[str, str], note: str
) -> None:
    taken, notes = UNPACKED.environment({"amd64": TreeFacts(environment=values, absent=absent)})
    assert taken == wanted
    assert (note in notes) if note else not notes


def test_an_image_for_two_architectures_takes_what_both_have() -> None:
    def facts(**values: str) -> TreeFacts:
        return TreeFacts(environment=values)

    taken, notes = UNPACKED.environment(
        {
            "amd64": facts(PATH="/opt/stack/kit/bin:/opt/stack/ucx/bin", KIT="/opt/stack/kit", SAME="1"),
            "arm64": facts(PATH="/opt/stack/ucx/bin", SAME="1"),
        }
    )
    assert taken == {"PATH": "/opt/stack/ucx/bin", "SAME": "1"}
    assert notes == (
        "PATH: /opt/stack/kit/bin is in the archive of one architecture only",
        "KIT: only the archive for amd64 has it",
    )
    with pytest.raises(
        ConfigError, match="NET: expected one value for all architectures, but it is a for amd64, b for arm64"
    ):
        UNPACKED.environment({"amd64": facts(NET="a"), "arm64": facts(NET="b")})


@pytest.fixture
def locked_hpcx(project: Project, tmp_path: Path) -> tuple[Project, Target]:
    """Facts are those of the stand-in of tests/upstream, which was made from others' evidence; other pins are made up."""
    unpacked = project.components["hpcx"].model.unpacked
    assert unpacked
    (target,) = (t for t in make_plan(project).targets if t.id == "hpcx-cuda13.4.2-ubuntu24.04-devel")
    entries: Table = {}
    for source in Renderer(project, versions_with(project, Changes())).recipe(target).sources():
        match source:
            case Archive(url=url):
                which = hpcx.Distribution("ubuntu24.04", 13, url.rpartition("-")[2].removesuffix(".tbz"), hpcx.NEWEST)
                top = hpcx.unpack(hpcx.files(hpcx.release(hpcx.NEWEST), which), tmp_path / which.name)
                facts = tree_facts(run_program, top, unpacked)
                entries[key_of(source)] = LockedArchive(sha256="a" * 64, facts=facts)
            case BaseImage():
                configured = {
                    "config": {"Env": [f"{name}={value}" for name, value in CUDA.environment("devel").items()]}
                }
                known = image_facts(configured) if source.facts else None
                of_platforms = dict.fromkeys(target.platforms, known) if known else None
                entries[key_of(source)] = LockedImage(digest=f"sha256:{'b' * 64}", facts=of_platforms)
            case PackageSource(packages=packages):
                before = entries.get(key_of(source))
                versions = before.packages if isinstance(before, LockedRepository) else {}
                versions = {**versions, **{p: p.partition("=")[2] or "1.0" for p in packages}}
                entries[key_of(source)] = LockedRepository(fingerprint="F" * 40, packages=versions)
            case GitRef(commit=None):
                entries[key_of(source)] = "c" * 40
    return replace(project, lock=lock_from_table(entries)), target


def with_env(project: Project, **env: str) -> Renderer:
    """A renderer of the project, whose image `hpcx` sets these variables."""
    matrix = project.matrix.model
    hpcx = matrix.images["hpcx"].model_copy(update={"env": env})
    model = matrix.model_copy(update={"images": {**matrix.images, "hpcx": hpcx}})
    changed = replace(project, matrix=replace(project.matrix, model=model))
    return Renderer(changed, versions_with(changed, Changes()))


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"OPAL_PREFIX": "/usr"}, "matrix.yaml:[0-9]+: expected '/opt/hpcx/ompi', which hpcx needs, found '/usr'"),
        ({"LD_LIBRARY_PATH": "/opt/hpcx/ompi/lib"}, r"LD_LIBRARY_PATH: expected \*plugin\*/lib, ucx/lib, ompi/lib of /opt/hpcx once and in this order"),
        ({"LD_LIBRARY_PATH": "/opt/mine/lib", "PATH": "/opt/mine/bin"}, ""),
    ],
    ids=["prefix", "order", "own folders"],
)  # fmt: skip
def test_what_is_ours_of_the_environment_stays(
    locked_hpcx: tuple[Project, Target], env: dict[str, str], problem: str
) -> None:
    renderer = with_env(locked_hpcx[0], **env)
    if problem:
        with pytest.raises(ConfigError, match=problem):
            renderer.dockerfile(locked_hpcx[1])
    else:
        assert 'ENV PATH="/opt/mine/bin:/opt/nccl-tests' in renderer.dockerfile(locked_hpcx[1]).text


def test_each_architecture_has_sources_of_its_own(locked_hpcx: tuple[Project, Target]) -> None:
    recipe = with_env(locked_hpcx[0]).recipe(locked_hpcx[1])
    names = {"linux/amd64": "x86_64", "linux/arm64": "aarch64|sbsa"}
    for platform, name in names.items():
        part = recipe.for_platform(platform)  # type: ignore[arg-type]
        own = {s.url for s in part.sources() if isinstance(s, Archive | PackageSource)}
        assert {url.split("/")[2] for url in own} == {
            "content.mellanox.com", "linux.mellanox.com", "developer.download.nvidia.com"
        }  # fmt: skip
        assert all(re.search(name, url) for url in own)
    lines = list(recipe.adaptions())
    assert "nvidia/cuda:13.4.2-devel-ubuntu24.04: has NCCL 2.30.7-1+cuda13.3, images 2.32.3" in lines
    assert "hpcx: /opt/hpcx/ompi5 is /opt/hpcx/ompi in images" in lines
    assert len(lines) == len(set(lines)) < 25


def test_the_dockerfile_of_hpcx_for_what_was_shown_of_it(
    locked_hpcx: tuple[Project, Target], golden: Callable[[str, str], None]
) -> None:
    made, target = locked_hpcx
    recipe = Renderer(made, versions_with(made, Changes())).recipe(target)
    check_resolved(made.lock, recipe.sources())
    text = Renderer(made, versions_with(made, Changes())).dockerfile(target).text
    assert "unresolved" not in text
    golden(f"tests/golden/{target.id}.Dockerfile", text)
