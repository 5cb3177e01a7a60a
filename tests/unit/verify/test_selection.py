import pytest

from imagebuild.core import ConfigError, NothingSelected
from imagebuild.project import Project
from imagebuild.verify import select_checks
from tests.conftest import LIBRARY, TOOL, Files

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


def choose(project: Project, *patterns: str) -> list[str]:
    """Names of the checks that are chosen for an image with the library alone."""
    image_checks = {"no-keys": "No layer holds a private key"}
    return [entry.name for entry in select_checks(project, image_checks, ["library"], patterns)]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ((), ["image/no-keys", "library/version", "library/runs"]),
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
