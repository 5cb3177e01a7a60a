import pytest

from imagebuild.project.plan import make_plan
from imagebuild.render.renderer import Renderer
from tests.conftest import LOCK, ROOT, Files, data

ARCHIVE = (ROOT / "tests/data/archive-component.yaml").read_text()


@pytest.mark.parametrize("known", [True, False])
def test_the_environment_of_an_image_is_what_its_archive_says(tiny: Files, known: bool) -> None:
    tiny.component("library", ARCHIVE, build="{{ archive(name, archives) }}\nFROM scratch AS library\n")
    entry = {"sha256": "a" * 64, "facts": data("archive-facts")}
    addresses = [f"https://example.org/stack-1.2-{cpu}.tbz" for cpu in ("x86_64", "aarch64")]
    tiny.lock({**LOCK, "archives": dict.fromkeys(addresses if known else (), entry)})
    project = tiny.load()
    text, *_, devel = (Renderer(project).dockerfile(target).text for target in make_plan(project).targets)
    assert ("CPATH" in devel, "CPATH" in text) == (known, False)
    assert 'MPI_HOME="/opt/stack/mpi"' in text
    assert ('NEW="/opt/stack/new"' in text) == known
    assert ('LD_LIBRARY_PATH="/opt/stack/net/lib:/opt/stack/mpi/lib"' in text) == known
    assert ('imagebuild.net="spcx"' in text) == known
    assert ("\n/opt/stack/net/lib\n" in text) == known, "of ld.so.conf"
