"""A project that extends another project: inherited parts, overridden parts, and earlier states. Images that start from other
images: see tests/data/inheritance.yaml."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import yaml

from imagebuild.cli.options import data_folders
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import run_program
from imagebuild.project.explain import explain
from imagebuild.project.load import load_project
from imagebuild.project.plan import make_plan
from imagebuild.project.project import Project
from imagebuild.project.revision import files_at_revision
from imagebuild.render.renderer import Renderer
from tests.conftest import LOCK, ROOT, TOOL, Files, data, git
from tests.faulty import Answer
from tests.unit.conftest import LOGIN, Call, Serve

OWN = (ROOT / "tests/data/own-matrix.yaml").read_text()


def own(folder: Path, extends: str, more: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "matrix.yaml").write_text(OWN.replace("{extends}", extends) + more)
    return folder


def render(project: Project) -> str:
    (target,) = make_plan(project).targets
    return Renderer(project).dockerfile(target).text


def test_all_but_the_images_comes_along(tmp_path: Path, tiny: Files) -> None:
    project = load_project(own(tmp_path / "own", ".."))
    (target,) = make_plan(project).targets
    assert (target.id, target.components) == ("train-cuda13.0-debian13-runtime", {"library": "1.2", "tool": "3.4"})
    assert render(project).count("b" * 40) == 1, "the commit is from the lock of the extended project"


def test_the_own_lock_gets_what_its_targets_need_of_the_other_one(tmp_path: Path, tiny: Files, command: Call) -> None:
    tiny.lock({**LOCK, "git": {**LOCK["git"], "https://example.org/other.git 1": "d" * 40}})
    folder = own(tmp_path / "own", "..")
    for options in ([], ["--set", "library=1.5"]):
        assert command("lock", "--project", folder, *options)[0] == 0
        assert command("lock", "--project", folder, "--date", "2026-11-23")[0] == 0
        written = json.loads((folder / "imagebuild.lock").read_text())
        assert {name: written[name] for name in LOCK} == {**LOCK, "images": ANY}
        assert command("lock", "--project", folder, "--check", "--offline")[0] == 0
        (folder / "imagebuild.lock").unlink()


@pytest.mark.parametrize("leads_to", ["nowhere", "empty"])
def test_no_lock_is_written_to_where_a_link_leads(
    leads_to: str, tmp_path: Path, tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    folder = own(tmp_path / "own", "..")
    for place, target in ((folder, folder / "imagebuild.lock"), (tmp_path / "bare", tmp_path / "bare/imagebuild.lock")):
        place.mkdir(exist_ok=True)
        target.symlink_to(tmp_path / leads_to)
        monkeypatch.chdir(place)
        status, out, err = command("lock", *([] if place == folder else ["quickstart"]), "--date", "2026-11-23")
        assert status == 2, out + err
        assert "imagebuild.lock" in err
        assert not (tmp_path / "nowhere").exists()
        assert (tmp_path / "empty").read_bytes() == b""


def test_own_versions_bases_components_and_entries_of_the_lock_count_instead(tmp_path: Path, tiny: Files) -> None:
    folder = own(tmp_path / "own", "..", 'versions: {library: "1.5"}\n')
    (folder / "imagebuild.lock").write_text(json.dumps({"git": {"https://example.org/tool.git 3.4": "c" * 40}}))
    component = folder / "dockerfiles/components/library"
    component.mkdir(parents=True)
    (component / "component.yaml").write_text("title: Own\ndescription: x\nhomepage: https://x.org\nlicense: MIT\n")
    project = load_project(folder)
    text = render(project)
    assert "AS library" not in text, "the replaced component has no build.j2, so neither has the image"
    assert ("c" * 40 in text, "b" * 40 in text) == (True, False)
    assert make_plan(project).targets[0].components["library"] == "1.5"
    assert [project.is_own("versions", name) for name in ("library", "tool")] == [True, False]
    assert project.template("components/tool/build.j2") == tmp_path / "own/../dockerfiles/components/tool/build.j2"


def test_what_an_image_has_without_a_component(tmp_path: Path, tiny: Files) -> None:
    more = """\
    packages: {apt: [htop, "jq=1.7"]}
    env: {TEAM: net work, PATH: /opt/acme/bin}
    labels: {com.acme.team: 'a "b" $c \\d'}
    user: mpiuser
    cmd: [train, "--fast now"]
    append: |
      RUN echo last
      CMD ["mine"]
"""
    text = render(load_project(own(tmp_path / "own", "..", more)))
    assert "\n  htop \\\n  'jq=1.7*'\n" in text
    assert 'TEAM="net work"' in text
    assert 'PATH="/opt/acme/bin:/usr/local/sbin' in text
    assert 'com.acme.team="a \\"b\\" \\$c \\\\d"' in text
    assert "USER 1000:1000\n" in text
    assert 'CMD ["train", "--fast now"]\n' in text
    assert text.endswith('\nRUN echo last\nCMD ["mine"]\n')


def test_profiles_and_facts_of_jobs_of_all_layers(tmp_path: Path) -> None:
    base, top = own(tmp_path / "base", "imagebuild"), own(tmp_path / "top", "../base")
    assert data_folders(None, "profiles", tmp_path / "none") == (ROOT / "profiles",)
    for folder in (base, top):
        (folder / "profiles").mkdir()
    assert data_folders(None, "profiles", top) == (ROOT / "profiles", top / "../base/profiles", top / "profiles")
    assert data_folders(None, "jobs", ROOT) == (ROOT / "jobs",)


@pytest.mark.programs
def test_a_commit_is_extended(tmp_path: Path, tiny: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "matrix.yaml", "dockerfiles", "imagebuild.lock")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    folder = own(tmp_path / "own", f"{{git: 'file://{tmp_path}', commit: {commit}}}")
    tiny.write("matrix.yaml", "broken: later")
    assert "b" * 40 in render(load_project(folder))


@pytest.mark.programs
def test_a_commit_is_fetched_with_the_users_password(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("IMAGEBUILD_CONFIG", str(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text(f"netrc: {tmp_path}/netrc\n")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    site = serve(Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'}), Answer(404))
    with pytest.raises(CommandError, match="not found"):
        load_project(own(tmp_path / "own", f"{{git: '{site.address}', commit: {'a' * 40}}}"))
    assert site.asked[:2] == [None, LOGIN]


@pytest.mark.programs
@pytest.mark.parametrize("how", ["folder", "link", "submodule"])
def test_an_earlier_revision_is_read_with_what_it_extends(tmp_path: Path, how: str, command: Call) -> None:
    work = tmp_path / "work"
    work.mkdir()
    git(work, "init", "-q")
    if how == "submodule":
        vendored = Files(tmp_path / "upstream").root
        git(vendored, "init", "-q")
        git(vendored, "add", ".")
        git(vendored, "commit", "-qm", "one")
        git(work, "submodule", "--quiet", "add", str(vendored), "vendor")
    else:
        Files(work / "vendor")
    own(work, "vendor" if how != "link" else "linked")
    if how == "link":
        (work / "linked").symlink_to("vendor")
    git(work, "add", ".")
    git(work, "commit", "-qm", "one")
    tool = work / "vendor/dockerfiles/components/tool/build.j2"
    tool.write_text(tool.read_text().replace("make", "make all"))
    now = make_plan(load_project(work))
    with files_at_revision("HEAD", work, run_program) as folder:
        before = load_project(folder)
        assert make_plan(before) == now
        assert "RUN make\n" in render(before)
    status, _, printed = command("ci-matrix", "--project", work, "--changed-since", "HEAD")
    assert (status, "1 of 1 targets differ from HEAD\n" in printed) == (0, True), printed


def test_all_mistakes_at_once(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "description: A small", "descripton: A small")
    tiny.replace("matrix.yaml", "platforms: [linux/amd64]", "platforms: []")
    tiny.component("tool", TOOL + "cheks: []\n")
    with pytest.raises(ConfigError) as caught:
        make_plan(tiny.load())
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any("cheks: unknown key; did you mean 'checks'?" in line for line in lines)


def written(folder: Path, images: Any, extends: str = "imagebuild") -> Path:
    folder.mkdir(exist_ok=True)
    document = {"extends": extends, "repository": "ghcr.io/acme", "images": images}
    (folder / "matrix.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder


def targets(project: Project) -> list[str]:
    return [target.id for target in make_plan(project).targets]


@pytest.mark.parametrize("row", data("inheritance"), ids=lambda row: row.get("title", row.get("error")))
def test_first_matrices(tmp_path: Path, row: dict[str, Any]) -> None:
    folder = written(tmp_path, row["images"])
    if "error" in row:
        with pytest.raises(ConfigError) as error:
            targets(load_project(folder))
        assert row["error"] in str(error.value)
        written(tmp_path, row["instead"])
    assert targets(load_project(folder)) == row["targets"]


def test_only_named_keys_change(tmp_path: Path) -> None:
    shipped = load_project(written(tmp_path, {"slim": None}))
    train = {
        "from": "slim",
        "axes": {"gpu": "90"},
        "build-with": {"sharp": "nccl-rdma-sharp-plugin"},
        "components": {"remove": ["sshd"]},
    }
    own = load_project(written(tmp_path, {"train": train})).matrix.model.images["train"]
    slim = shipped.matrix.model.images["slim"]
    assert own.components == tuple(name for name in slim.components if name != "sshd")
    assert own.axes == {**slim.axes, "gpu": ("90",)}
    assert own.build_with == {**slim.build_with, "sharp": "nccl-rdma-sharp-plugin"}
    same = {"axes", "build_with", "components_", "from_"}
    assert own.model_dump(exclude=same) == slim.model_dump(exclude=same)


def test_packages_are_added_to_those_of_the_image_to_start_from(tmp_path: Path) -> None:
    train = {"from": "slim", "packages": {"apt": ["htop", "numactl=2"]}}
    images = {"train": train, "debug": {"from": "train", "packages": {"apt": ["vim", "numactl"]}}}
    own = load_project(written(tmp_path, images)).matrix.model.images
    assert (own["train"].packages.apt, own["debug"].packages.apt) == (("htop", "numactl=2"), ("htop", "vim", "numactl"))


def test_conditions_of_inherited_aliases_may_name_other_values(tmp_path: Path, tiny: Files) -> None:
    tiny.replace("matrix.yaml", "    tags:", '    aliases: [{tag: "x:{os}", when: {cuda: "12.9"}}]\n    tags:')
    folder = written(tmp_path / "own", {"tiny": {"axes": {"cuda": "13.0"}}}, "..")
    assert targets(load_project(folder))[0] == "tiny-cuda13.0-debian13-runtime"


def test_images_start_from_those_of_each_extended_project(tmp_path: Path) -> None:
    written(tmp_path / "base", {"corp": {"from": "quickstart", "axes": {"os": "debian13", "variant": "runtime"}}})
    small = {"cuda": "13.0", "os": "debian13", "variant": "runtime"}
    images = {"mine": {"from": "open", "axes": small}, "own": {"from": "corp", "axes": small}}
    project = load_project(written(tmp_path / "mine", images, "../base"))
    assert targets(project) == ["mine-cuda13.0-debian13-runtime", "own-cuda13.0-debian13-runtime"]
    (target,) = (target for target in make_plan(project).targets if target.image == "mine")
    places = {name: place for name, _, place in explain(project, target)}
    assert places["description"].startswith(f"{ROOT}/matrix.yaml:")


def test_a_long_chain_is_refused(tmp_path: Path) -> None:
    images = {f"a{number}": {"from": f"a{number + 1}"} for number in range(3000)}
    with pytest.raises(ConfigError) as error:
        load_project(written(tmp_path, images))
    assert "starts from more than 50 images" in str(error.value)
