import pytest

from imagebuild import lock, plan
from imagebuild.config import Project
from imagebuild.errors import ConfigError
from imagebuild.models import Arch, Plan
from tests.conftest import LIBRARY, Files

WHEELS = LIBRARY + 'wheels: ["some-wheel=={version}.*"]\n'
FACTS = """\
wheels: ["w=={extra}"]
facts:
  - when: {version: ">=2"}
    values: {extra: "{version}.9"}
  - values: {extra: old}
"""


def index(asked: tuple[str, ...], arch: Arch) -> dict[str, tuple[str, str]]:
    """Stands in for pip."""
    return {a.partition("==")[0]: ("1.2.3", ("a" if arch == "amd64" else "b") * 64) for a in asked}


def test_the_lock_has_every_wheel_of_every_target(project: Project, full_plan: Plan) -> None:
    versions = plan.versions_with(project, plan.Changes())
    for component, version in lock.wanted(project, full_plan.targets, versions):
        wheels = project.lock.wheels[component][version]
        names = {w.name for w in wheels}
        asked = {r.partition("==")[0] for r in lock.requirements(project, component, version)}
        assert names == asked, f"{component} {version}"


def test_what_is_there_stays_and_what_lacks_is_added(tiny: Files) -> None:
    tiny.component("library", WHEELS)
    project = tiny.load()
    made = lock.resolve(project, {("library", "1.2")}, resolver=index)
    (wheel,) = made.wheels["library"]["1.2"]
    assert (wheel.version, wheel.sha256["arm64"]) == ("1.2.3", "b" * 64)
    lock.write(tiny.root / "imagebuild.lock", made)

    def refuse(asked: tuple[str, ...], arch: Arch) -> dict[str, tuple[str, str]]:
        pytest.fail("asked again for what is locked")

    assert lock.resolve(tiny.load(), {("library", "1.2")}, resolver=refuse) == made


def test_an_architecture_without_the_wheel_is_an_error(tiny: Files) -> None:
    tiny.component("library", WHEELS)
    with pytest.raises(ConfigError, match=r"some-wheel is 1.2.3 for amd64 but None for arm64"):
        lock.resolve(
            tiny.load(),
            {("library", "1.2")},
            resolver=lambda asked, arch: index(asked, arch) if arch == "amd64" else {},
        )


@pytest.mark.parametrize(("version", "requirement"), [("2.5", "w==2.5.9"), ("1.0", "w==old")])
def test_facts_fill_requirements(tiny: Files, version: str, requirement: str) -> None:
    tiny.component("library", LIBRARY + FACTS)
    assert lock.requirements(tiny.load(), "library", version) == (requirement,)


def test_a_requirement_with_an_unknown_fact(tiny: Files) -> None:
    tiny.component("library", LIBRARY + 'wheels: ["w=={gone}"]\n')
    with pytest.raises(ConfigError, match="no value for {gone}"):
        lock.requirements(tiny.load(), "library", "1")
