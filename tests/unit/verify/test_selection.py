import pytest

from imagebuild.core import ConfigError, NothingSelected
from imagebuild.project import Project
from imagebuild.verify import ListedCheck, checks_of_components, chosen_checks, known_checks
from tests.conftest import LIBRARY, TOOL, Files

STATIC = {"no-keys": "No layer holds a private key"}
CHECKS = """\
checks:
  - {name: version, description: d, run: x}
  - {name: runs, description: d, run: x, needs: [gpus>=2]}
"""


@pytest.fixture
def project(tiny: Files) -> Project:
    tiny.component("library", LIBRARY + CHECKS)
    tiny.component("tool", TOOL + CHECKS, build="FROM {{ base }} AS tool\n")
    return tiny.load()


def names(listed: list[ListedCheck]) -> list[str]:
    return [entry.name for entry in listed]


def choose(project: Project, *patterns: str, components: tuple[str, ...] = ("library",)) -> list[str]:
    everything = known_checks(project, STATIC)
    offered = checks_of_components(everything, components)
    return names(chosen_checks(patterns, offered, everything))


def test_without_patterns_all_of_the_image(project: Project) -> None:
    assert choose(project) == ["image/no-keys", "library/version", "library/runs"]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (("library/version",), ["library/version"]),
        (("library",), ["library/version", "library/runs"]),
        (("*/runs", "image/no-keys"), ["image/no-keys", "library/runs"]),
        (("library/v*", "tool/*"), ["library/version"]),
    ],
)
def test_names_and_globs(project: Project, patterns: tuple[str, ...], found: list[str]) -> None:
    assert choose(project, *patterns) == found


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        ("library/verison", "did you mean 'library/version'"),
        ("libary", "did you mean 'library'"),
        ("libary/*", "did you mean 'library'"),
        ("image/no-kyes", "did you mean 'image/no-keys'"),
    ],
)
def test_a_name_that_is_not_known_anywhere(project: Project, pattern: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        choose(project, pattern)


def test_checks_of_other_images_select_nothing(project: Project) -> None:
    with pytest.raises(NothingSelected):
        choose(project, "tool/*")
    assert choose(project, "tool/runs", components=("library", "tool")) == ["tool/runs"]
