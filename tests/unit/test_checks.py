import pytest

from imagebuild import checks
from imagebuild.config import Project
from imagebuild.errors import ConfigError
from imagebuild.models import Check
from tests.conftest import LIBRARY, Files

CHECKS = """\
checks:
  - {name: version, description: d, run: library --version, expect: "^library {version}$"}
  - {name: devices, description: d, run: list, needs: [gpu, rdma]}
  - {name: compiles, description: d, when: {variant: devel}, run: cc}
  - {name: long, description: d}
"""


@pytest.fixture
def project(tiny: Files) -> Project:
    tiny.component("library", LIBRARY + CHECKS)
    tiny.write("dockerfiles/components/library/checks/long.sh", "echo long\n")
    return tiny.load()


def outcomes(project: Project, axes: dict[str, str], answers: dict[str, tuple[int, str]]) -> dict[str, tuple[str, str]]:
    planned = checks.planned(project, {"library": "1.2"}, axes, have=())
    results = checks.run(planned, lambda script, check: answers[check.name])
    return {r.check: (r.outcome, r.reason) for r in results}


def test_a_check_that_cannot_run_is_skipped_with_its_reason(project: Project) -> None:
    assert outcomes(project, {"variant": "runtime"}, {"version": (0, "library 1.2\n"), "long": (3, "")}) == {
        "version": ("passed", ""),
        "devices": ("skipped", "no gpu and no rdma here"),
        "compiles": ("skipped", "only for variant devel"),
        "long": ("failed", "exit status 3"),
    }


@pytest.mark.parametrize(
    ("status", "output", "reason"),
    [
        (0, "warning\nlibrary 1.2\n", ""),
        (0, "library 1x2\n", "the output has no"),
        (0, "library 1.20\n", "the output has no"),
        (1, "library 1.2\n", "exit status 1"),
        (124, "", "did not end within 60 s"),
    ],
)
def test_judge(status: int, output: str, reason: str) -> None:
    check = Check(name="version", description="d", run="x", expect="^library {version}$")
    assert reason in checks.judge(check, "1.2", status, output)
    assert bool(checks.judge(check, "1.2", status, output)) is bool(reason)


def test_labels_name_components_and_axes() -> None:
    labels = {"imagebuild.component.nccl": "2", "imagebuild.axis.cuda": "13.0", "other": "x"}
    assert checks.components_of(labels) == {"nccl": "2"}
    assert checks.axes_of(labels) == {"cuda": "13.0"}


def test_an_unknown_component_and_a_missing_script_are_errors(project: Project, tiny: Files) -> None:
    with pytest.raises(ConfigError, match="no such component is known"):
        checks.planned(project, {"gone": "1"}, {}, have=())
    (tiny.root / "dockerfiles/components/library/checks/long.sh").unlink()
    with pytest.raises(ConfigError, match=r"checks.long: .*long\.sh"):
        checks.planned(project, {"library": "1.2"}, {}, have=())
