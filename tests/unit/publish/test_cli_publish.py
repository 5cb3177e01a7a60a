"""`imagebuild publish` as it is called: what it prints, and its exit status."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from imagebuild.cli import ProjectFiles
from imagebuild.oci import registry
from imagebuild.project import revision
from imagebuild.publish import attest
from tests.publish_fakes import AMD64, ARM64, COMMIT, HOST, NEW, OLD, Site
from tests.registry_fake import FakeRegistry, index, put_image
from tests.unit.conftest import Call

TAG = f"{HOST}/acme/tiny:cuda13.0-tool3.4-{COMMIT[:7]}"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(tmp_path, fake=FakeRegistry(HOST))
    monkeypatch.chdir(site.files.root)
    monkeypatch.setattr(registry, "connect_registry", lambda _: site.fake)
    return site


def ready(site: Site, **more: object) -> None:
    """Built from what this checkout renders, and verified."""
    matrix, folder = Path("matrix.yaml"), Path("dockerfiles")
    work = ProjectFiles(matrix=matrix, dockerfiles=folder).open()
    text = work.renderer.dockerfile(site.target(NEW)).text
    for platform in (AMD64, ARM64):
        digest = site.stage(NEW, platform, platform.encode())
        stated = {"dockerfile": hashlib.sha256(text.encode()).hexdigest(), **more}
        site.built(NEW, {platform: digest}, file="", **stated)
        site.verified(digest, platform)


def test_what_is_printed(site: Site, command: Call) -> None:
    ready(site)
    status, out, _ = command("publish", "--results", str(site.evidence), "--dry-run")
    assert status == 0
    assert f"would be given  {TAG}" in out
    assert not site.tags()
    status, out, _ = command("publish", "--results", str(site.evidence), "--json", "out.json")
    assert status == 0
    (target,) = json.loads(Path("out.json").read_text())["targets"]
    assert f"✓ published {NEW} {target['digest']}\n    given  {TAG}\n" in out
    assert "attached  4 provenance, 4 verification" in out
    status, out, _ = command("publish", "--results", str(site.evidence))
    assert (status, f"✓ unchanged {NEW}" in out, f"kept   {TAG}" in out) == (0, True, True)
    before = index(site.fake, "acme/tiny", [put_image(site.fake, "acme/tiny")], tag="latest")
    _, out, _ = command("publish", "--results", str(site.evidence))
    assert f"moved  {HOST}/acme/tiny:latest: {before} → {target['digest']}" in out


def unpublished(command: Call) -> list[str]:
    status, out, _ = command("plan", "--github", "--unpublished")
    assert status == 0
    return [entry["targets"] for entry in json.loads(out)["include"]]


def test_what_is_built_is_what_is_not_published_as_it_is_now(site: Site, command: Call) -> None:
    """`OLD` is never published, and keeps nothing else from being up to date."""
    site.files.write("matrix.yaml", (site.files.root / "matrix.yaml").read_text() + "github-runners: "
                     "{linux/amd64: here, linux/arm64: there}\n")  # fmt: skip
    assert unpublished(command) == [OLD, OLD, NEW, NEW]
    ready(site)
    assert command("publish", "--results", str(site.evidence))[0] == 0
    assert unpublished(command) == [OLD, OLD]
    # An alias that something else took, a check, the lock's date, an alias that is new.
    published = site.tags()["latest"]
    site.fake.repositories["acme/tiny"].tags["latest"] = index(
        site.fake, "acme/tiny", [put_image(site.fake, "acme/tiny")]
    )
    assert NEW in unpublished(command)
    site.fake.repositories["acme/tiny"].tags["latest"] = published
    for file, old, new in (
        (
            "dockerfiles/components/library/component.yaml",
            'description: It works, run: "true"',
            "description: x, run: a",
        ),
        ("imagebuild.lock", '{"git"', '{"date": "2026-01-02", "git"'),
        ("matrix.yaml", '"{repository}/{image}:latest"', '"{repository}/{image}:newest"'),
    ):
        before = (site.files.root / file).read_text()
        site.files.replace(file, old, new)
        assert NEW in unpublished(command), file
        site.files.write(file, before)
    assert unpublished(command) == [OLD, OLD]
    # Without an alias, the tag of any commit says it.
    site.files.replace("matrix.yaml", '      - "{repository}/{image}:cuda{cuda}"\n', "")
    site.files.replace("matrix.yaml", '    aliases:\n      - "{repository}/{image}:latest"\n', "")
    assert unpublished(command) == [OLD, OLD]


def test_what_is_refused(site: Site, command: Call) -> None:
    ready(site, dockerfile="0" * 64)
    status, out, _ = command("publish", "--results", str(site.evidence))
    assert status == 1
    assert f"✗ refused {NEW}" in out
    assert "linux/amd64: provenance: " in out
    assert "was built from another Dockerfile than this checkout renders" in out
    assert not site.tags()


def test_builds_from_folders_are_refused(site: Site, command: Call) -> None:
    ready(site, replaced={"tool-source": "folder"})
    status, out, _ = command("publish", "--results", str(site.evidence))
    assert status == 1
    assert "came from a folder that nobody can compare; build without --source" in out
    assert command("publish", "--results", str(site.evidence), "--allow-dirty")[0] == 0


@pytest.mark.programs
def test_a_job_signs_what_its_own_run_built(
    site: Site, command: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other jobs of a run can leave results for it; with a key, somebody else may publish later."""
    (tmp_path / "cosign").symlink_to("/bin/true")
    workflow = "acme/images/.github/workflows/build.yml@refs/heads/main"
    for name, value in {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "GITHUB_SERVER_URL": "https://git.test", "GITHUB_REPOSITORY": "acme/images", "GITHUB_RUN_ID": "7",
        "GITHUB_RUN_ATTEMPT": "2", "GITHUB_WORKFLOW_REF": workflow,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    run, own = "https://git.test/acme/images/actions/runs", f"https://git.test/{workflow}"
    monkeypatch.setattr(revision, "current_revision", lambda *_: COMMIT)
    stated = {"source": "https://git.test/acme/images", "workflow": own, "run": f"{run}/7/attempts/1"}
    arguments = ("publish", "--results", str(site.evidence), "--sign", "--dry-run")
    for other in ({"run": f"{run}/6/attempts/1"}, {"workflow": f"{own}2"}, {"revision": "f" * 40}, {"source": ""}):
        ready(site, **stated | other)
        status, out, _ = command(*arguments)
        ((name, value),) = other.items()
        assert (status, f"provenance: {name} of its build is {value or 'unknown'}, and that of this job" in out) == (
            1,
            True,
        )
    ready(site, **stated)
    status, out, _ = command(*arguments)
    assert status == 0, out


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--results", "nowhere"], 2, "--results nowhere: no such folder"),
        (["--key", "k"], 2, "need --sign"),
        (
            ["--platform", "linux/arm"],
            2,
            "--platform linux/arm: unknown platform; use linux/amd64, linux/arm64 or local",
        ),
        (["--sign"], 4, "`cosign` is missing"),
        (["nothing"], 3, "no target fits nothing"),
    ],
)
def test_wrong_options(
    site: Site, command: Call, monkeypatch: pytest.MonkeyPatch, options: list[str], status: int, message: str
) -> None:
    ready(site)
    monkeypatch.setattr(attest, "which", lambda _: None)
    found = command("publish", "--results", str(site.evidence), *options)
    assert (found[0], message in found[2]) == (status, True), found
