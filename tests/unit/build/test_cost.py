"""What a change costs, computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imagebuild.build import Cost, PastTimes, ProjectState, compare_states, load_past_times, past_times_of
from imagebuild.core import ConfigError, Platform
from imagebuild.project import BuildResult, Project, make_plan, parse_changes, select_targets, versions_with
from imagebuild.project import Step as Done
from imagebuild.render import Renderer
from tests.conftest import Files


def side(project: Project, *settings: str, select: tuple[str, ...] = (), **more: Any) -> ProjectState:
    changes = parse_changes(settings)
    targets = select_targets(make_plan(project, changes), select)
    return ProjectState(project, Renderer(project, versions_with(project, changes)), targets, **more)


def cost(before: ProjectState | None, after: ProjectState, past: PastTimes | None = None) -> Cost:
    return compare_states(before, after, ("before", "after"), past)


def stages(made: Cost) -> set[str]:
    return {step.stage for step in made.steps}


def bumped(project: Project, component: str) -> Project:
    """The same project with a lock that knows another version of a component's wheels."""
    wheels = project.lock.wheels[component]
    ((version, old),) = wheels.items()
    assert isinstance(old, tuple)
    new = tuple(w.model_copy(update={"version": "9", "sha256": dict.fromkeys(w.sha256, "9" * 64)}) for w in old)
    lock = project.lock.model_copy(update={"wheels": {**project.lock.wheels, component: {version: old, "9": new}}})
    return Project(project.matrix, project.components, lock, project.root)


COMMIT = "c" * 40
COMPILED = ("ucx", "ucc", "openmpi-git", "gdrcopy", "perftest", "nvbandwidth", "nccl-tests")


def test_from_nothing_everything_is_executed(project: Project) -> None:
    made = cost(None, side(project, select=("open",)))
    assert made.total.run == made.total.run_of
    assert made.total.compile == 2 * len(COMPILED)  # for two platforms, whatever the number of targets
    assert {part.name for part in made.components if part.compile} == set(COMPILED)
    assert made.total.untimed == made.total.run + made.total.other == len(made.steps)


def test_from_itself_nothing_is_executed(project: Project) -> None:
    made = cost(side(project), side(project))
    assert not made.steps
    assert not made.components
    assert made.total.run_of > made.total.run == 0


@pytest.mark.parametrize(
    ("setting", "executed"),
    [
        ("nccl=9", {"nccl-wheel", "ucc", "nccl-tests", "image"}),
        (f"ucc=9@{COMMIT}", {"ucc-source", "ucc", "openmpi-git", "nccl-tests", "image"}),
        (f"openmpi=9@{COMMIT}", {"openmpi-git-source", "openmpi-git", "nccl-tests", "image"}),
        (f"perftest=9@{COMMIT}", {"perftest-source", "perftest", "image"}),
        (f"gdrcopy=9@{COMMIT}", {"gdrcopy-source", "gdrcopy", "ucx", "ucc", "openmpi-git", "nccl-tests", "image"}),
        ("pmix=9", {"image"}),
    ],
)
def test_a_bump_of_open_executes_what_uses_it(project: Project, setting: str, executed: set[str]) -> None:
    project = bumped(project, "nccl-wheel")
    made = cost(side(project), side(project, setting, select=("open",)))
    assert stages(made) == executed
    assert made.total.compile == sum(step.compiles for step in made.steps) == 2 * len(executed & set(COMPILED))
    assert {part.name for part in made.targets} == {s.id for s in side(project, setting, select=("open",)).targets}


def test_only_the_last_run_of_a_stage_that_compiles_counts(project: Project) -> None:
    made = cost(None, side(project, select=("open",), platforms=("linux/amd64",)))
    found = [(step.number, step.compiles) for step in made.steps if step.stage == "nvbandwidth"]
    assert found == [(1, False), (2, True)]


def test_a_cuda_that_is_added_costs_its_own_steps_only(tiny: Files) -> None:
    before = side(tiny.load())
    tiny.replace("matrix.yaml", '"13.0"]', '"13.0", "13.1"]')
    made = cost(before, side(tiny.load()))
    # Nothing here depends on it, and labels are no steps.
    assert not made.steps
    tiny.component("library", (tiny.root / "dockerfiles/components/library/component.yaml").read_text() + "key: [cuda]\n",
                   build="FROM {{ base }} AS library\nRUN echo {{ version }} {{ key.cuda }} > /out\n")  # fmt: skip
    with_key = tiny.load()
    tiny.replace("matrix.yaml", '"13.1"]', '"13.1", "13.2"]')
    made = cost(side(with_key), side(tiny.load()))
    assert {target for step in made.steps for target in step.targets} == {
        "tiny-cuda13.2-debian13-runtime", "tiny-cuda13.2-debian13-devel",
    }  # fmt: skip
    assert [(part.name, part.targets) for part in made.components] == [("library", 2), ("image", 2)]


@pytest.mark.parametrize("comment", ["# why\nFROM", "FROM"])
def test_a_comment_costs_nothing(tiny: Files, comment: str) -> None:
    before = side(tiny.load())
    tiny.replace("dockerfiles/components/library/build.j2", "FROM", comment)
    tiny.replace("dockerfiles/components/library/build.j2", "RUN", "# and how\nRUN")
    tiny.replace("dockerfiles/components/tool/component.yaml", "uses the library", "used the library")
    assert not cost(before, side(tiny.load())).steps


def test_the_image_that_a_bootstrapped_base_replaces_does_not_matter(tiny: Files) -> None:
    before = tiny.load()
    tiny.replace("imagebuild.lock", "a" * 64, "d" * 64)
    after = tiny.load()
    assert not cost(side(before), side(after)).steps
    registry = cost(side(before, base="registry"), side(after, base="registry"))
    assert {step.stage for step in registry.steps} == {"library", "tool", "image"}  # the source is on scratch
    tiny.replace("matrix.yaml", "release: trixie", "release: forky")
    assert stages(cost(side(before), side(tiny.load()))) == {"library", "tool", "image"}


def test_every_component_that_compiles_has_a_source(project: Project) -> None:
    """The mark is where a compiler runs on what upstream wrote."""
    compiling = {name for name, d in project.components.items() if d.model.compiles}
    assert compiling == {*COMPILED, "nccl-git", "nccl-rdma-sharp-plugin", "openmpi"}
    assert all(project.components[name].model.git for name in compiling - {"openmpi"})  # HPC-X has its source
    for name, document in project.components.items():
        offers = {
            n for n, d in project.components.items() if {n, *d.model.provides} & set(document.model.build_requires)
        }
        assert set(document.model.link_ignores) <= offers, name


def result(*steps: Done, platforms: tuple[Platform, ...] = ("linux/amd64",)) -> BuildResult:
    return BuildResult(
        target="t", digest=None, tags=(), platforms=platforms, size_bytes=None, seconds=1, steps=steps
    )  # fmt: skip


def done(name: str, seconds: float, *, cached: bool = False, error: str | None = None) -> Done:
    return Done(name=name, target="", stage="library", component="library", cached=cached, seconds=seconds, error=error)


def test_past_times_are_medians_of_the_same_place(tiny: Files) -> None:
    project = tiny.load()
    results = [result(done("[library 1/2] RUN echo 1", s)) for s in (1.0, 9.0, 2.0)]
    # Cached, failed, elsewhere in the stage, another command, another platform: not the same.
    results.append(result(done("[library 1/2] RUN x", 100, cached=True), done("[library 1/2] RUN x", 100, error="no")))
    results.append(result(done("[library 2/3] RUN x", 100), done("[library 1/2] COPY x", 100)))
    results.append(result(done("[t linux/arm64 library 1/2] RUN x", 100), platforms=("linux/amd64", "linux/arm64")))
    results.append(results[0])  # a step that targets share is in the result of each
    made = cost(None, side(project, "library=2"), past_times_of(results))
    (step,) = [s for s in made.steps if s.stage == "library"]
    assert step.seconds == 2.0
    assert made.total.seconds == 2.0
    assert made.total.untimed == len(made.steps) - 1


def test_a_base_from_a_registry_shifts_the_numbers(tiny: Files) -> None:
    past = past_times_of([result(done("[library 1/2] FROM docker.io/x", 0.1), done("[library 2/2] RUN x", 5.0))])
    (step,) = [s for s in cost(None, side(tiny.load()), past).steps if s.stage == "library"]
    assert step.seconds == 5.0


def test_cross_compiled_steps_are_those_of_the_image_they_are_for() -> None:
    past = past_times_of([result(done("[t linux/amd64->arm64 library 1/2] RUN x", 5.0))])
    assert list(past.times) == [("library", 1, 2, "RUN", "linux/arm64")]


def test_past_times_are_read_from_a_folder(tmp_path: Path) -> None:
    assert load_past_times(tmp_path) == PastTimes()
    (tmp_path / "t").mkdir()
    (tmp_path / "t/result.json").write_text(result(done("[library 1/2] RUN x", 5.0)).model_dump_json())
    assert load_past_times(tmp_path).times == {("library", 1, 2, "RUN", "linux/amd64"): [5.0]}
    (tmp_path / "t/result.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a result of a build"):
        load_past_times(tmp_path)
