"""A project with the changes of the command line, and the changes that options make."""

from imagebuild.project.plan import make_plan
from imagebuild.project.project import Project, parse_changes
from tests.conftest import LIBRARY, Files


def test_changes_of_the_command_line(tiny: Files) -> None:
    tiny.component("extra", LIBRARY + "version-axis: os\n")
    settings = ["cuda=13.1", "library=9", f"tool=4@{'c' * 40}"]
    made = make_plan(tiny.load().changed(parse_changes(settings, repository="r.test/x")))
    assert {t.axes["cuda"] for t in made.targets} == {"13.1"}
    assert made.targets[0].components == {"library": "9", "tool": "4"}
    assert {name.partition(":")[0] for t in made.targets for name in (t.name, *t.tags)} == {"r.test/x/tiny"}
    made = make_plan(tiny.load().changed(parse_changes([], with_=["extra"], without=["tool"])))
    assert list(made.targets[0].components) == ["extra", "library"]
    assert made.targets[0].name == "example/tiny:cuda12.9-debian13-runtime"


def test_the_component_that_fulfils_a_requirement(tiny: Files) -> None:
    tiny.component("other", LIBRARY + "provides: [library]\n")
    project = tiny.load()
    assert project.provider("library", ["other", "library"]) == "library"
    assert project.provider("library", ["other"]) == "other"
    assert project.provider("library", []) == "library", "components have their own name, present or not"
    assert project.provider("library", ["library"], {"library": "other"}) == "other", "an image may prefer one"
    assert project.provider("nothing", ["library"]) is None


def test_the_command_that_pins_what_changes_need() -> None:
    changes = parse_changes(["tool=4", "cuda=13.1"], with_=["extra"], repository="r.test/x")
    assert changes.lock_command("tiny") == "imagebuild lock tiny --set tool=4 --set cuda=13.1 --with extra"


def test_a_pin_may_name_the_component_that_it_applies_to(project: Project) -> None:
    facts = {"cuda": "13.0", "gpu": "90", "os": "debian13", "variant": "runtime"}
    assert project.version("nccl-git", facts) == "2.30.7"
    assert project.version("nccl-wheel", facts) == project.version("nccl", facts) == "2.32.3"
