"""`imagebuild impact` predicts exactly the stages in which BuildKit then executes steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.build.impact import Impact
from imagebuild.core.files import file_sha256
from imagebuild.project.records import BuildResult, Step
from tests.conftest import ROOT
from tests.docker.conftest import COMPONENT, Imagebuild, Tiny, watched
from tests.docker.site import served

pytestmark = pytest.mark.docker

BOTH = ("--platform", "linux/amd64", "--platform", "linux/arm64")
LOCAL = ("--platform", "local")
TOOL = "dockerfiles/components/tool/build.j2"


def executed(root: Path) -> list[Step]:
    """Return the steps that the last build ran. A step of several targets is listed once."""
    results = [BuildResult.model_validate_json(f.read_text()) for f in root.glob("build/*/result.json")]
    steps = {(step.name, step.seconds): step for result in results for step in result.steps}
    return [step for step in steps.values() if not (step.cached or step.error or "] FROM " in step.name)]


def assert_same(predicted: Impact, ran: list[Step]) -> None:
    assert {(s.component, s.stage) for s in predicted.stages} == {(step.component, step.stage) for step in ran}


def predict(imagebuild: Imagebuild, *args: str | Path) -> Impact:
    return Impact.model_validate_json(imagebuild("impact", "--json", "-", *args).out)


def copied(project: Path, folder: Path) -> Path:
    """Copy the current files of a project to a folder."""
    shutil.copytree(project / "dockerfiles", folder / "dockerfiles")
    for name in ("matrix.yaml", "imagebuild.lock"):
        shutil.copy(project / name, folder)
    return folder


def build(tiny: Tiny, *platforms: str) -> list[Step]:
    shutil.rmtree(tiny.root / "build", ignore_errors=True)
    tiny.imagebuild("build", *platforms)
    return executed(tiny.root)


def edit(name: str, old: str, new: str) -> Callable[[Tiny], None]:
    """Return a function that replaces a text in a file. NONCE in the texts is replaced by the project's nonce."""
    return lambda tiny: tiny.replace(name, old.replace("NONCE", tiny.nonce), new.replace("NONCE", tiny.nonce))


def what_runs_nothing(tiny: Tiny) -> None:
    """Add comments, and change the locked digest of an image that a bootstrapped base replaces."""
    tiny.replace(TOOL, "RUN ", "# why\n# and how\nRUN \\\n# why\n ")
    tiny.replace("imagebuild.lock", "a" * 64, "c" * 64)


TAGS = '    tags: ["{repository}/{image}:{cuda}-{variant}"]\n'
MORE = f"""\
{TAGS}  tool:
    description: one more image
    axes: {{cuda: ["13.3"], os: [debian13], variant: [runtime]}}
    platforms: [linux/amd64, linux/arm64]
    components: [tool]
{TAGS}"""
CHANGES = {
    "what-runs-nothing": what_runs_nothing,
    "a-version": edit("matrix.yaml", 'library: "1.NONCE', 'library: "9.NONCE'),
    "a-file": lambda tiny: tiny.write("dockerfiles/components/tool/files/conf", f"another {tiny.nonce}\n"),
    "a-new-cuda": edit("matrix.yaml", '"13.0"]', '"13.0", "13.1"]'),
    "a-new-target": edit("matrix.yaml", TAGS, MORE),
}


class WithFile(Tiny):
    """The tiny project. Its component `tool` has a file that the final stage copies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.write("dockerfiles/components/tool/install.j2", "COPY --link <<'EOF' /conf\n{{ file('conf') }}\nEOF\n")
        self.write("dockerfiles/components/tool/files/conf", f"one {self.nonce}\n")


@pytest.fixture(scope="module")
def known(client: DockerClient, host: str, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Build a project without a cache. Assert that each stage ran once for all targets, as predicted."""
    with watched(client, host) as environ:
        tiny = WithFile(tmp_path_factory.mktemp("known"), environ)
        predicted = predict(tiny.imagebuild, "nothing", *LOCAL)
        ran = build(tiny, *LOCAL)
        assert predicted.run == predicted.run_of == sum("] RUN " in step.name for step in ran)
        assert_same(predicted, ran)
        return tiny


def test_images_have_what_one_stage_made_for_all_of_them(known: Tiny, client: DockerClient) -> None:
    made: dict[str, list[str]] = {"library": [], "tool": [], "plugin": []}
    for target in json.loads(known.imagebuild("plan", "--json", "-").out)["targets"]:
        tag, command = known.result(target["id"]).tags[0], f"cd / && grep -s . {' '.join(made)} /dev/null"
        for line in client.containers.run(tag, ["sh", "-c", f"{command} || true"], remove=True).decode().splitlines():
            made[line.partition(":")[0]].append(line)
    counts = {name: (len(lines), len(set(lines))) for name, lines in made.items()}
    assert counts == {"library": (4, 1), "tool": (4, 2), "plugin": (2, 1)}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change(environ: dict[str, str], known: Tiny, tmp_path: Path, change: str) -> None:
    tiny = WithFile(tmp_path, environ, known.nonce)
    before = copied(tiny.root, tiny.root / "before")
    CHANGES[change](tiny)
    predicted = predict(tiny.imagebuild, before, *LOCAL)
    assert (not predicted.stages) == (change == "what-runs-nothing")
    assert_same(predicted, build(tiny, *LOCAL))


def cross(tiny: Tiny, server: str, checksum: str) -> None:
    """Add stages that run on the build platform, that depend on the target architecture, and that download files."""
    for name, more in {
        "library": tiny.new,
        "tool": "key: [cuda]\nrequires: [library]\nbuild-requires: [library]\n",
    }.items():
        stages = (ROOT / f"tests/data/cross-{name}.j2").read_text().replace("NONCE", tiny.nonce)
        stages = stages.replace("SERVER", server).replace("CHECKSUM", checksum)
        tiny.component(name, COMPONENT.format(name=name) + more, build=stages)


def test_both_platforms(tiny: Tiny, tmp_path: Path) -> None:
    """Only one target is built, because the steps of the other architecture are emulated."""
    tiny.replace("matrix.yaml", 'cuda: ["12.9", "13.0"]', 'cuda: ["13.0"]')
    tiny.replace("matrix.yaml", "variant: [runtime, devel]", "variant: [runtime]")
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "source.txt").write_text("what is served\n")
    with served(tmp_path / "www") as site:
        cross(tiny, site.url, file_sha256(tmp_path / "www" / "source.txt"))
        cold = predict(tiny.imagebuild, "nothing", *BOTH)
        assert_same(cold, build(tiny, *BOTH))
        # Platforms share stages that run on the build platform.
        assert {stage.stage: stage.run for stage in cold.stages if stage.run} == {
            "native": 1, "library": 2, "tool": 2, "image": 2,
        }  # fmt: skip
        before = copied(tiny.root, tiny.root / "before")
        tiny.replace(TOOL, f"/{tiny.nonce}-arm64", f"/{tiny.nonce}-other")
        tiny.replace(TOOL, "A=1", "A=2")
        predicted = predict(tiny.imagebuild, before, *BOTH)
        assert {s.stage for s in predicted.stages} == {"tool-source-arm64", "tool-source", "tool", "image"}
        assert_same(predicted, build(tiny, *BOTH))


def test_a_base_that_changed(tiny: Tiny, client: DockerClient, registry: str) -> None:
    """A base image in a registry has a new digest. Images that were just built serve as the two bases."""
    build(tiny, *LOCAL, "variant=runtime")
    image, digests, two = f"{registry}/base", [], (*LOCAL, "cuda=13.0")
    for cuda in ("12.9", "13.0"):
        built = client.images.get(tiny.result(f"tiny-cuda{cuda}-debian13-runtime").tags[0])
        assert built.tag(image, cuda)
        client.images.push(image, cuda)
        digests.append(client.images.get_registry_data(f"{image}:{cuda}").id)
        client.images.remove(f"{image}:{cuda}")
    tiny.replace("matrix.yaml", '{image: "debian:13-slim", release: trixie}', f'{{image: "{image}:1"}}')
    tiny.lock({"images": {f"{image}:1": {"digest": digests[0]}}})
    assert_same(predict(tiny.imagebuild, "nothing", *two), build(tiny, *two))
    before = copied(tiny.root, tiny.root / "before")
    tiny.lock({"images": {f"{image}:1": {"digest": digests[1]}}})
    predicted = predict(tiny.imagebuild, before, *two)
    assert {stage.stage for stage in predicted.stages} == {"library", "tool", "plugin", "image"}
    assert_same(predicted, build(tiny, *two))
