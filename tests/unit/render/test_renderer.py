import re
from collections.abc import Callable

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.project.plan import Plan, make_plan
from imagebuild.project.project import Changes, Project, parse_changes
from imagebuild.project.select import select_one, select_targets
from imagebuild.render.renderer import Renderer
from imagebuild.render.resolve import gpu_capabilities
from imagebuild.render.stages import stages_of
from tests.conftest import ROOT, Files, data

GOLDEN = [
    "quickstart-cuda13.5-debian13-runtime", "quickstart-cuda13.5-debian13-devel", "open-cuda13.5-debian13-devel",
    "open-cuda13.5-ubuntu22.04-runtime", "torch-cuda13.0-debian13-runtime",
    "slim-cuda13.0-gpu90-debian13-runtime",
]  # fmt: skip
BUMPS = data("bumps")
VERSIONS = {"hpcx": "2.24.1", "nccl": "2.31.2", "openmpi-series": "5"}
"""Another version of components whose data name the versions."""


@pytest.mark.parametrize("name", GOLDEN)
def test_dockerfiles_of_this_project(
    name: str, renderer: Renderer, full_plan: Plan, golden: Callable[[str, str], None]
) -> None:
    golden(f"tests/golden/{name}.Dockerfile", renderer.dockerfile(select_one(full_plan, name)).text)


@pytest.mark.parametrize(
    ("changes", "target", "file"),
    [
        (Changes({"cuda": "13.5"}, with_=("aws-ofi-nccl",)), "open-cuda13.5-debian13-runtime", ""),
        # The lock does not have what no image has, so its hashes are missing.
        (Changes(with_=("nvshmem",)), GOLDEN[-1], "nvshmem"),
    ],
)
def test_optional_components(
    project: Project, changes: Changes, target: str, file: str, golden: Callable[[str, str], None]
) -> None:
    changed = project.changed(changes)
    text = Renderer(changed).dockerfile(select_one(make_plan(changed), target)).text
    part = text[text.index(f"# ---- {file} ") : text.index("# ---- image ")] if file else text
    golden(f"tests/golden/{file or f'{target}+aws-ofi-nccl'}.Dockerfile", part)


def test_one_gpu_generation(project: Project) -> None:
    """Without others, there is no PTX for later ones; a capability is refused that the toolkit does not know."""
    changed = project.changed(Changes({"gpu": "90,107"}))
    older, newer = select_targets(make_plan(changed), ["slim"])
    renderer = Renderer(changed)
    assert gpu_capabilities(changed, older, renderer.recipe(older).toolkit) == {"amd64": ("90",), "arm64": ("90",)}
    with pytest.raises(ConfigError, match="gpu-architectures: no entry fits CUDA 13.0, amd64 and arm64 and gpu 107"):
        renderer.dockerfile(newer)
    with pytest.raises(ConfigError, match="no compute capability '91'; known: "):
        make_plan(project.changed(Changes({"gpu": "91"})))


def test_every_target_renders_alone(renderer: Renderer, full_plan: Plan) -> None:
    for target in full_plan.targets:
        text = renderer.dockerfile(target).text
        assert "# syntax" not in text
        for source in re.findall(r"^COPY (?!.*--from)(.*)$", text, re.MULTILINE):
            assert "<<" in source, f"{target.id} copies from a build context: {source}"


def layers(project: Project, target: str, *settings: str) -> dict[str, str]:
    """Map the layers of an image, in order, to what their files depend on."""
    changed = project.changed(parse_changes(settings))
    text = Renderer(changed).dockerfile(select_one(make_plan(changed, [target]), target)).text
    final, stages = text[text.index(" AS image\n") :], stages_of(text, "linux/amd64")
    assert final.count("\nRUN ") == 1
    copied = re.findall(r"^COPY --link --from=(\S+)", final, re.MULTILINE)
    return {
        "RUN": final[final.index("<<'EOF'") : final.index("\nEOF\n")],
        **{name: stages[name].files for name in copied},
    }


@pytest.mark.parametrize("target", BUMPS)
def test_layers_that_an_update_may_change(target: str, project: Project, full_plan: Plan) -> None:
    before, expected = layers(project, target), BUMPS[target]["bumps"]
    assert [*before] == BUMPS[target]["layers"]
    own = {name: project.components[name].model for name in select_one(full_plan, target).components}
    changeable = {component.pin or name: component for name, component in own.items() if not component.version_axis}
    found = {}
    for pin, component in changeable.items():
        version = VERSIONS.get(pin, "9") + (f"@{'c' * 40}" if component.git else "")
        after = layers(project, target, f"{pin}={version}")
        found[pin] = [name for name in after if after[name] != before[name]]
    assert found == expected


def test_targets_share_stages_letter_for_letter(renderer: Renderer, full_plan: Plan) -> None:
    open_targets = select_targets(full_plan, ["open"])
    keys = [renderer.dockerfile(t).stages for t in open_targets]
    assert {t.axes["os"] for t in open_targets} == {"debian12", "debian13", "ubuntu22.04", "ubuntu24.04"}
    each_cuda = {"cuda", "cuda-stubs"}
    for stage in {name for k in keys for name in k} - {"image"}:
        expected = len({t.axes["cuda"] for t in open_targets}) if stage in each_cuda else 1
        assert len({k[stage] for k in keys if stage in k}) == expected, f"{stage} is made more than once"


def test_what_targets_share_changes_none_of_them(project: Project, renderer: Renderer, full_plan: Plan) -> None:
    for target in {(target.image, target.axes["os"]): target for target in full_plan.targets}.values():
        assert renderer.dockerfile(target).text == Renderer(project).dockerfile(target).text


@pytest.mark.parametrize(
    ("command", "is_kept"),
    [
        ("mkdir -p /out/devel /out/runtime/tmp", True), ("mkdir -p /out/{devel,runtime}/root/x", True),
        ("umask 077; mkdir -p /out/runtime/opt", True), ("chown 1001:1001 /out/runtime/opt", True),
        ("tar -xf x.tar -C /out/runtime", True), ("dpkg-deb -x x.deb /out/$variant", True),
        ("cp -a tree/. /out/runtime/", True), ("mkdir -p /out/runtime/lib", True),
        ("mkdir -p /out/runtime/opt/x/lib", False), ("tar -xf x.tar -C /tmp", False),
        ("cp -a lib/. /out/runtime/opt/x/", False), ("cp -a " * 200_000 + "tree/. /out/runtime/", True),
        ("cp -" + "a" * 1_000_000, False),
    ],
)  # fmt: skip
def test_folders_of_the_base_are_kept(tiny: Files, command: str, *, is_kept: bool) -> None:
    """A step follows if a component may leave folders of the base image with other attributes."""
    build = tiny.root / "dockerfiles/components/tool/build.j2"
    build.write_text(build.read_text().replace("RUN make", f"RUN {command}"))
    (tiny.root / "dockerfiles/folders.j2").write_text((ROOT / "dockerfiles/folders.j2").read_text())
    project = tiny.load()
    text = Renderer(project).dockerfile(make_plan(project).targets[0]).text
    assert text.count('chmod --reference="$path" ".$path"') == is_kept
