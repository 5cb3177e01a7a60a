"""What `plan --from` predicts is what BuildKit then executes, step for step."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.build import STEP_NAME, Cost, CostStep
from imagebuild.core import native_platform
from imagebuild.project import BuildResult, Step
from tests.docker.conftest import COMPONENT, Imagebuild, Tiny, watched

pytestmark = pytest.mark.docker

UUID = "$(cat /proc/sys/kernel/random/uuid)"
BOTH = ("--platform", "linux/amd64", "--platform", "linux/arm64")
LOCAL = ("--platform", "local")
TWO = (*LOCAL, "cuda=13.0")
"""Half of the targets."""


def executed(root: Path) -> list[tuple[str, Step]]:
    """Steps that the last build ran, each with the target whose name it ran under."""
    results = [BuildResult.model_validate_json(f.read_text()) for f in root.glob("build/*/result.json")]
    targets = {result.target.replace(".", "_"): result.target for result in results}
    found = {}
    for result in results:
        for step in result.steps:
            if not step.cached and not step.error and "] FROM " not in step.name:
                found[step.name, step.seconds] = (targets.get(step.target, result.target), step)
    return list(found.values())


def assert_same(predicted: Cost, ran: list[tuple[str, Step]]) -> None:
    """Every step that ran was predicted, and every predicted one ran once: so the stages are the same."""
    left = list(predicted.steps)
    unforeseen = []
    for target, step in ran:
        # A step that fewer targets share is the likelier one.
        fitting = sorted((p for p in left if fits(p, target, step)), key=lambda p: len(p.targets))
        if fitting:
            left.remove(fitting[0])
        else:
            unforeseen.append(step.name)
    assert not unforeseen
    assert not left
    assert predicted.run == sum("] RUN " in step.name for _, step in ran)


def fits(predicted: CostStep, target: str, step: Step) -> bool:
    found = STEP_NAME.match(step.name)
    assert found
    runs_on, arrow, arch = (found["platform"] or native_platform()).partition("->")
    return (
        (predicted.component, predicted.stage) == (step.component, step.stage)
        and predicted.command == found["text"].split()[0]
        and (f"linux/{arch}" if arrow else runs_on) in predicted.platforms
        and target in predicted.targets
    )


def predict(imagebuild: Imagebuild, *args: str | Path) -> Cost:
    return Cost.model_validate_json(imagebuild("plan", "--json", "-", "--from", *args).out)


def copied(project: Path, folder: Path) -> Path:
    """A copy of a project's files as they are."""
    shutil.copytree(project / "dockerfiles", folder / "dockerfiles")
    for file in (project / "matrix.yaml", project / "imagebuild.lock"):
        if file.exists():
            shutil.copy(file, folder)
    return folder


def build(tiny: Tiny, *platforms: str) -> list[tuple[str, Step]]:
    shutil.rmtree(tiny.root / "build", ignore_errors=True)
    tiny.imagebuild("build", *platforms)
    return executed(tiny.root)


def edit(name: str, old: str, new: str) -> Callable[[Tiny], None]:
    """A change of a file; NONCE stands for what makes the project unlike all others."""
    return lambda tiny: tiny.replace(name, old.replace("NONCE", tiny.nonce), new.replace("NONCE", tiny.nonce))


TOOL = "dockerfiles/components/tool/build.j2"
TARGETS_MORE = """\
    tags: ["{repository}/{image}:{cuda}-{variant}"]
  tool:
    description: one more image
    axes: {cuda: ["13.3"], os: [debian13], variant: [runtime]}
    platforms: [linux/amd64, linux/arm64]
    components: [tool]
    tags: ["{repository}/{image}:{cuda}-{variant}"]
"""
TAGS = TARGETS_MORE.splitlines(keepends=True)[0]


def what_runs_nothing(tiny: Tiny) -> None:
    """A comment, and the digest of an image that is replaced."""
    tiny.replace(TOOL, "RUN ", "# why\n# and how\nRUN \\\n# why\n ")
    tiny.replace("imagebuild.lock", "a" * 64, "c" * 64)


CHANGES = {
    "what-runs-nothing": what_runs_nothing,
    "library": edit("matrix.yaml", 'library: "1.NONCE', 'library: "9.NONCE'),
    "a-file": lambda tiny: tiny.write("dockerfiles/components/tool/files/conf", f"another {tiny.nonce}\n"),
    "a-new-cuda": edit("matrix.yaml", '"13.0"]', '"13.0", "13.1"]'),
    "a-new-target": edit("matrix.yaml", TAGS, TARGETS_MORE),
    "a-stage-on-another": edit(TOOL, "FROM {{ base }}", "FROM library"),
}


class WithFile(Tiny):
    """The tiny project, with a file of `tool` that the final stage copies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.write("dockerfiles/components/tool/install.j2", "COPY --link <<'EOF' /conf\n{{ file('conf') }}\nEOF\n")
        self.write("dockerfiles/components/tool/files/conf", f"one {self.nonce}\n")


@dataclass(frozen=True)
class Known:
    """A project that was built from nothing, and what that ran."""

    tiny: Tiny
    predicted: Cost
    ran: list[tuple[str, Step]]

    def copy(self, folder: Path, environ: dict[str, str]) -> Tiny:
        """The same project elsewhere, with all its steps in the cache."""
        return WithFile(folder, environ, self.tiny.nonce)


@pytest.fixture(scope="module")
def known(client: DockerClient, host: str, tmp_path_factory: pytest.TempPathFactory) -> Known:
    with watched(client, host) as environ:
        tiny = WithFile(tmp_path_factory.mktemp("known"), environ)
        return Known(tiny, predict(tiny.imagebuild, "nothing", *LOCAL), build(tiny, *LOCAL))


def test_a_cold_start_runs_each_stage_once_for_all_targets(known: Known, client: DockerClient) -> None:
    assert known.predicted.run == known.predicted.run_of
    assert_same(known.predicted, known.ran)
    targets = json.loads(known.tiny.imagebuild("plan", "--json", "-").out)["targets"]
    keys = {key for target in targets for stage, key in target["stages"].items() if stage != "image"}
    assert len({step.name for _, step in known.ran if step.stage != "image"}) == len(keys) == 4  # tool twice
    # The images say the same: what one stage made has one identity, wherever it is.
    made: dict[str, list[str]] = {"library": [], "tool": [], "plugin": []}
    for target in targets:
        tag, command = known.tiny.result(target["id"]).tags[0], f"cd / && grep -s . {' '.join(made)} /dev/null"
        for line in client.containers.run(tag, ["sh", "-c", f"{command} || true"], remove=True).decode().splitlines():
            made[line.partition(":")[0]].append(line)
    counts = {name: (len(lines), len(set(lines))) for name, lines in made.items()}
    assert counts == {"library": (4, 1), "tool": (4, 2), "plugin": (2, 1)}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change(environ: dict[str, str], known: Known, tmp_path: Path, change: str) -> None:
    tiny = known.copy(tmp_path, environ)
    before = copied(tiny.root, tiny.root / "before")
    CHANGES[change](tiny)
    predicted = predict(tiny.imagebuild, before, *LOCAL)
    assert (not predicted.steps) == (change == "what-runs-nothing")
    assert_same(predicted, build(tiny, *LOCAL))


def test_an_option(environ: dict[str, str], known: Known, tmp_path: Path) -> None:
    tiny = known.copy(tmp_path, environ)
    setting = ("--set", f"tool=9.{tiny.nonce}")
    predicted = predict(tiny.imagebuild, tiny.root, *LOCAL, *setting)
    assert {step.stage for step in predicted.steps} == {"tool", "image"}
    tiny.build(*setting)
    assert_same(predicted, executed(tiny.root))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Address of a server on this machine with one file."""
    folder = tmp_path / "www"
    folder.mkdir()
    (folder / "source.txt").write_text("what is served\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def cross(tiny: Tiny, server: str) -> None:
    """Stages of all kinds: on the build machine, with and without the image's architecture, chosen by it, downloaded."""
    checksum = hashlib.sha256(b"what is served\n").hexdigest()
    tiny.component("library", COMPONENT.format(name="library") + tiny.new, build=f"""\
FROM --platform=$BUILDPLATFORM {{{{ base }}}} AS native
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN echo "{{{{ version }}}} {UUID}" > /native
COPY --chmod=755 <<'EOF' /usr/local/bin/hello
#!/bin/sh
echo $TARGETARCH {tiny.nonce}
EOF

FROM native AS library
ARG TARGETARCH
RUN mkdir -p /out/runtime && echo "$TARGETARCH {UUID}" > /out/runtime/library && cp -r /out/runtime /out/devel
""")  # fmt: skip
    tiny.component("tool", COMPONENT.format(name="tool") + "key: [cuda]\nrequires: [library]\nbuild-requires: [library]\n", build=f"""\
FROM scratch AS tool-source-amd64
ADD --checksum=sha256:{checksum} {server}/source.txt /{tiny.nonce}-amd64
FROM scratch AS tool-source-arm64
ADD --checksum=sha256:{checksum} {server}/source.txt /{tiny.nonce}-arm64
FROM scratch AS tool-common
COPY <<EOF /common
{tiny.nonce} common
EOF
FROM tool-source-$TARGETARCH AS tool-source
COPY --from=tool-common / /
FROM {{{{ base }}}} AS tool
ENV A=1 B="two $A"
WORKDIR /{tiny.nonce}
USER root
COPY --from=tool-source / src/
RUN --mount=type=bind,from=library,target=/{{{{ key.cuda }}}} \\
    mkdir -p /out/runtime && echo "{{{{ version }}}} {UUID}" > /out/runtime/tool && cp -r /out/runtime /out/devel
""")  # fmt: skip


def test_both_platforms(tiny: Tiny, server: str) -> None:
    """Of one target, as all that runs in the other architecture is emulated."""
    tiny.replace("matrix.yaml", 'cuda: ["12.9", "13.0"]', 'cuda: ["13.0"]')
    tiny.replace("matrix.yaml", "variant: [runtime, devel]", "variant: [runtime]")
    cross(tiny, server)
    cold = predict(tiny.imagebuild, "nothing", *BOTH)
    assert_same(cold, build(tiny, *BOTH))
    shared = {s.stage for s in cold.steps if len(s.platforms) == 2}
    assert shared == {"native", "tool-common"}
    before = copied(tiny.root, tiny.root / "before")
    tiny.replace(TOOL, f"/{tiny.nonce}-arm64", f"/{tiny.nonce}-other")
    tiny.replace(TOOL, "A=1", "A=2")
    predicted = predict(tiny.imagebuild, before, *BOTH)
    assert {step.stage for step in predicted.steps} == {"tool-source-arm64", "tool-source", "tool", "image"}
    assert_same(predicted, build(tiny, *BOTH))


def test_a_base_that_changed(tiny: Tiny, client: DockerClient, registry: str) -> None:
    """Images that a registry has, as digests of a vendor's base do; what was built a moment ago serves as such."""
    build(tiny, *LOCAL, "variant=runtime")
    image, digests = f"{registry}/base", []
    for cuda in ("12.9", "13.0"):
        built = client.images.get(tiny.result(f"tiny-cuda{cuda}-debian13-runtime").tags[0])
        assert built.tag(image, cuda)
        client.images.push(image, cuda)
        digests.append(client.images.get_registry_data(f"{image}:{cuda}").id)
        client.images.remove(f"{image}:{cuda}")
    tiny.replace("matrix.yaml", '{image: "debian:13-slim", release: trixie}', f'{{image: "{image}:1"}}')
    tiny.lock({"images": {f"{image}:1": {"digest": digests[0]}}})
    cold = predict(tiny.imagebuild, "nothing", *TWO)
    assert_same(cold, build(tiny, *TWO))
    before = copied(tiny.root, tiny.root / "before")
    tiny.lock({"images": {f"{image}:1": {"digest": digests[1]}}})
    predicted = predict(tiny.imagebuild, before, *TWO)
    assert {step.stage for step in predicted.steps} == {"library", "tool", "plugin", "image"}
    assert_same(predicted, build(tiny, *TWO))


def test_equal_content_makes_the_prediction_an_upper_bound(tiny: Tiny) -> None:
    """The limit that docs/cost.md names: a changed instruction whose result is the same ends the chain."""
    tiny.step("mkdir -p /out/runtime /out/devel")
    build(tiny, *TWO)
    before = copied(tiny.root, tiny.root / "before")
    tiny.step("true && mkdir -p /out/runtime /out/devel")
    predicted = predict(tiny.imagebuild, before, *TWO)
    ran = build(tiny, *TWO)
    assert {step.stage for _, step in ran} == {"library"}
    assert {step.stage for step in predicted.steps} == {"library", "tool", "plugin", "image"}
