"""`plan --from`: what a change makes BuildKit execute."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from imagebuild.build import Cost, compare_states, read_state
from imagebuild.core import ConfigError
from imagebuild.project import ProjectPaths, files_at_revision, parse_changes
from tests.conftest import ROOT, Files
from tests.unit.conftest import Call, Runner

COMMIT = "c" * 40
OURS = ProjectPaths(ROOT / "matrix.yaml", ROOT / "dockerfiles", ROOT / "imagebuild.lock")


def stages(cost: Cost) -> set[str]:
    return {step.stage for step in cost.steps}


@pytest.mark.parametrize(
    ("setting", "executed"),
    [
        ("nccl=9", {"nccl-wheel", "ucc", "openmpi-git", "nccl-tests", "image"}),
        (f"ucc=9@{COMMIT}", {"ucc-source", "ucc", "openmpi-git", "nccl-tests", "image"}),
        (f"openmpi=9@{COMMIT}", {"openmpi-git-source", "openmpi-git", "nccl-tests", "image"}),
        (f"perftest=9@{COMMIT}", {"perftest-source", "perftest", "image"}),
        (f"gdrcopy=9@{COMMIT}", {"gdrcopy-source", "gdrcopy", "ucx", "ucc", "openmpi-git", "nccl-tests", "image"}),
        ("pmix=9", {"image"}),
        ("cuda=13.5", set()),
    ],
)
def test_a_bump_of_open_executes_what_uses_it(setting: str, executed: set[str]) -> None:
    before, after = (read_state(OURS, parse_changes(settings), ["open"]) for settings in ((), (setting,)))
    cost = compare_states(before, after, ("before", "after"))
    assert stages(cost) == executed
    assert set(cost.targets) == {target.id for target in after.targets}
    assert all(set(names) == executed for names in cost.targets.values())
    assert cost.run <= cost.run_of == compare_states(None, after, ("nothing", "after")).run


@pytest.fixture
def call(tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The project is built as it is in the folder `before`, then it is changed."""
    monkeypatch.chdir(tiny.root)
    Files(tiny.root / "before")
    return command


def predicted(call: Call, *arguments: str, before: str = "before") -> Cost:
    status, out, error = call("plan", "--from", before, "--json", "-", *arguments)
    assert status == 0, error
    return Cost.model_validate_json(out)


def test_from_nothing_and_from_itself(call: Call) -> None:
    everything = predicted(call, before="nothing")
    assert (everything.run, everything.run_of) == (3, 3)
    assert set(everything.targets.values()) == {("library", "tool", "image")}
    itself = predicted(call)
    assert (itself.run, itself.run_of, itself.steps) == (0, 3, ())
    assert set(itself.targets.values()) == {()}


def test_a_cuda_that_is_added_costs_its_own_steps_only(call: Call, tiny: Files) -> None:
    tiny.replace("matrix.yaml", '"13.0"]', '"13.0", "13.1"]')
    # Nothing here depends on it, and labels are no steps.
    assert predicted(call).steps == ()
    tiny.component("library", (tiny.root / "dockerfiles/components/library/component.yaml").read_text() + "key: [cuda]\n",
                   build="FROM {{ base }} AS library\nRUN echo {{ version }} {{ key.cuda }} > /out\n")  # fmt: skip
    shutil.copytree(tiny.root, tiny.root / "before", dirs_exist_ok=True, ignore=shutil.ignore_patterns("before"))
    tiny.replace("matrix.yaml", '"13.1"]', '"13.1", "13.2"]')
    cost = predicted(call)
    assert {t: names for t, names in cost.targets.items() if names} == {
        f"tiny-cuda13.2-debian13-{variant}": ("library", "image") for variant in ("runtime", "devel")
    }


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("dockerfiles/components/library/build.j2", "FROM", "# why\nFROM"),
        ("dockerfiles/components/library/build.j2", "RUN", "# and how\nRUN"),
        ("dockerfiles/components/tool/component.yaml", "uses the library", "used the library"),
        ("imagebuild.lock", "a" * 64, "d" * 64),  # the image that a bootstrapped base replaces
    ],
)
def test_what_costs_nothing(call: Call, tiny: Files, file: str, old: str, new: str) -> None:
    tiny.replace(file, old, new)
    assert predicted(call).steps == ()


def test_a_base_that_changes_executes_all_that_starts_from_it(call: Call, tiny: Files) -> None:
    tiny.replace("imagebuild.lock", "a" * 64, "d" * 64)
    assert stages(predicted(call, "--base", "registry")) == {"library", "tool", "image"}  # the source is on scratch
    tiny.replace("matrix.yaml", "release: trixie", "release: forky")
    assert stages(predicted(call)) == {"library", "tool", "image"}


def test_a_folder_with_a_copy(call: Call, tiny: Files) -> None:
    tiny.replace("matrix.yaml", 'library: "1.2"', 'library: "1.3"')
    arguments = ("plan", "tiny-cuda13.0*runtime", "--from", "before", "--platform", "linux/amd64")
    status, out, error = call(*arguments)
    assert status == 0, error
    assert out.splitlines() == [
        "stage    component  RUN steps  other steps  targets",
        "library  library    1          0            1",
        "image               0          1            1",
        "",
        "target                          stages executed",
        "tiny-cuda13.0-debian13-runtime  library, image",
        "",
        "from before to the working tree: 1 of 3 RUN steps are executed; one that targets or platforms share counts once",
    ]
    markdown = call(*arguments, "--markdown")[1].splitlines()
    assert markdown[0].startswith("**from before to the working tree**: 1 of 3")
    assert "| library | library | 1 | 0 | 1 |" in markdown
    assert "| tiny-cuda13.0-debian13-runtime | library, image |" in markdown
    assert "from . to the working tree --set library=2: 1 of 3" in call("plan", "--from", ".", "--set", "library=2")[1]
    assert "to the working tree --without tool: 0 of" in call("plan", "--from", ".", "--without", "tool")[1]


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return subprocess.run(["git", "-C", folder, *who, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture
def repository(tiny: Files) -> Files:
    git(tiny.root, "init", "--quiet")
    git(tiny.root, "add", ".")
    git(tiny.root, "commit", "--quiet", "--message", "first")
    git(tiny.root, "tag", "v1")
    return tiny


@pytest.mark.programs
def test_a_revision(repository: Files, call: Call) -> None:
    assert predicted(call, before="v1").steps == ()
    repository.replace("matrix.yaml", 'library: "1.2"', 'library: "1.3"')
    cost = predicted(call, before="v1")
    assert (cost.before, cost.after, stages(cost)) == ("v1", "the working tree", {"library", "image"})
    # Between two revisions the working tree does not count.
    assert predicted(call, "--to", "HEAD", before="v1").steps == ()
    git(repository.root, "commit", "--quiet", "--all", "--message", "second")
    assert predicted(call, "--to", "HEAD", before="HEAD~1").steps == cost.steps


@pytest.mark.programs
def test_mistakes_of_a_revision_are_shown_as_its_own(repository: Files, call: Call) -> None:
    repository.write("matrix.yaml", "repositry: x\n")
    git(repository.root, "commit", "--quiet", "--all", "--message", "wrong")
    repository.write("matrix.yaml", git(repository.root, "show", "v1:matrix.yaml"))
    status, _, error = call("plan", "--from", "HEAD")
    assert (status, "HEAD:matrix.yaml:1: repositry: unknown key" in error) == (2, True), error


@pytest.mark.programs
@pytest.mark.parametrize("name", ["v2", "--all", "v1:matrix.yaml"])
def test_an_unknown_revision_is_one_line(repository: Files, call: Call, name: str) -> None:
    status, _, error = call("plan", f"--from={name}")
    assert (status, error.count("\n")) == (2, 1)
    assert f"{name}: neither a folder with matrix.yaml nor a revision of {repository.root}" in error


@pytest.mark.programs
def test_a_matrix_outside_a_repository_or_that_a_revision_lacks(repository: Files, call: Call, tmp_path: Path) -> None:
    (repository.root / "other.yaml").write_text((repository.root / "matrix.yaml").read_text())
    assert "v1: has no other.yaml" in call("plan", "--matrix", "other.yaml", "--from", "v1")[2]
    lock = tmp_path.parent / "other.lock"
    lock.write_text("wheels: {}\n")
    assert call("plan", "--from", "v1", "--to", "v1", "--lock", str(lock))[0] == 0  # it is that of both states
    (repository.root / ".git").rename(repository.root / "gone")
    assert "is in no git repository; name a folder instead" in call("plan", "--from", "v1")[2]


def test_git_is_asked_for_what_there_is(tmp_path: Path) -> None:
    places = ProjectPaths(tmp_path / "matrix.yaml", tmp_path / "dockerfiles", tmp_path / "imagebuild.lock")
    run = Runner({})
    with pytest.raises(ConfigError, match="in no git repository"), files_at_revision("main", places, run):
        pass
    assert run.calls == [f"git -C {tmp_path} rev-parse --show-toplevel"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--to", "x"], 2, "need --from"),
        (["--markdown"], 2, "need --from"),
        (["--from", ".", "--json", "-", "--markdown"], 2, "exclude each other"),
        (["--from", ".", "--why"], 2, "not for --github or --why"),
        (["--from", ".", "--base", "mine"], 2, "use bootstrap or registry"),
        (["--from", ".", "--to", "nothing"], 2, "only --from can be nothing"),
        (["--from", "./dockerfiles"], 2, "has no matrix.yaml"),
        (["--from", ".", "--platform", "linux/arm64"], 2, "is not for linux/arm64"),
        (["--from", ".", "none"], 3, "no target fits none"),
    ],
)
def test_exit_codes(call: Call, arguments: list[str], status: int, message: str) -> None:
    got, _, error = call("plan", *arguments)
    assert (got, message in error) == (status, True), error
