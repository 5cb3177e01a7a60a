"""What `plan --from` predicts is what BuildKit then executes, step for step."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
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
CHANGES = {
    "nothing": lambda tiny: None,
    "library": edit("matrix.yaml", 'library: "1.NONCE', 'library: "9.NONCE'),
    "a-file": lambda tiny: tiny.write("dockerfiles/components/tool/files/conf", f"another {tiny.nonce}\n"),
    "a-new-cuda": edit("matrix.yaml", '"13.0"]', '"13.0", "13.1"]'),
    "a-new-target": edit("matrix.yaml", TAGS, TARGETS_MORE),
    "a-comment": edit(TOOL, "RUN ", "# why\n# and how\nRUN \\\n# why\n "),
    "a-digest-of-an-image-that-is-replaced": edit("imagebuild.lock", "a" * 64, "c" * 64),
    "a-stage-on-another": edit(TOOL, "FROM {{ base }}", "FROM library"),
}
WITHOUT_STEPS = {"nothing", "a-comment", "a-digest-of-an-image-that-is-replaced"}


class WithFile(Tiny):
    """The tiny project, with a file of `tool` that the final stage copies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.write("dockerfiles/components/tool/install.j2", "COPY --link <<'EOF' /conf\n{{ file('conf') }}\nEOF\n")
        self.write("dockerfiles/components/tool/files/conf", f"one {self.nonce}\n")


@pytest.fixture(scope="module")
def known(client: DockerClient, host: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What makes a project that was built unlike all others; whoever writes it again finds its steps in the cache."""
    with watched(client, host) as environ:
        tiny = WithFile(tmp_path_factory.mktemp("known"), environ)
        build(tiny, *LOCAL)
    return tiny.nonce


@pytest.mark.parametrize("change", CHANGES)
def test_a_change(environ: dict[str, str], known: str, tmp_path: Path, change: str) -> None:
    tiny = WithFile(tmp_path, environ, known)
    before = copied(tiny.root, tiny.root / "before")
    CHANGES[change](tiny)
    predicted = predict(tiny.imagebuild, before, *LOCAL)
    assert (not predicted.steps) == (change in WITHOUT_STEPS)
    assert_same(predicted, build(tiny, *LOCAL))


def test_a_cold_start_and_an_option(tiny: Tiny) -> None:
    cold = predict(tiny.imagebuild, "nothing", *LOCAL)
    assert cold.run == cold.run_of
    assert_same(cold, build(tiny, *LOCAL))
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
    build(tiny, *LOCAL)
    image, digests = f"{registry}/base", []
    for cuda in ("12.9", "13.0"):
        built = client.images.get(tiny.result(f"tiny-cuda{cuda}-debian13-runtime").tags[0])
        assert built.tag(image, cuda)
        client.images.push(image, cuda)
        digests.append(client.images.get_registry_data(f"{image}:{cuda}").id)
        client.images.remove(f"{image}:{cuda}")
    tiny.replace("matrix.yaml", '{image: "debian:13-slim", release: trixie}', f'{{image: "{image}:1"}}')
    tiny.lock({"images": {f"{image}:1": {"digest": digests[0]}}})
    cold = predict(tiny.imagebuild, "nothing", *LOCAL)
    assert_same(cold, build(tiny, *LOCAL))
    before = copied(tiny.root, tiny.root / "before")
    tiny.lock({"images": {f"{image}:1": {"digest": digests[1]}}})
    predicted = predict(tiny.imagebuild, before, *LOCAL)
    assert {step.stage for step in predicted.steps} == {"library", "tool", "plugin", "image"}
    assert_same(predicted, build(tiny, *LOCAL))


def test_equal_content_makes_the_prediction_an_upper_bound(tiny: Tiny) -> None:
    """The limit that docs/cost.md names: a changed instruction whose result is the same ends the chain."""
    tiny.step("mkdir -p /out/runtime /out/devel")
    build(tiny, *LOCAL)
    before = copied(tiny.root, tiny.root / "before")
    tiny.step("true && mkdir -p /out/runtime /out/devel")
    predicted = predict(tiny.imagebuild, before, *LOCAL)
    ran = build(tiny, *LOCAL)
    assert {step.stage for _, step in ran} == {"library"}
    assert {step.stage for step in predicted.steps} == {"library", "tool", "plugin", "image"}
