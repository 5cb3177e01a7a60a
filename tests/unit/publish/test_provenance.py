"""Statements about how an image was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from imagebuild import __version__
from imagebuild.build.bake import replaced_contexts
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Platform
from imagebuild.oci.attestation import encode_predicate
from imagebuild.project.lockfile import digest_of
from imagebuild.project.plan import Plan, Target, make_plan
from imagebuild.project.project import Project
from imagebuild.project.records import BuildResult
from imagebuild.project.select import select_one
from imagebuild.publish.provenance import Provenance, provenance_of
from imagebuild.render.renderer import Renderer
from tests.conftest import Files

AMD64: Platform = "linux/amd64"
EMPTY = hashlib.sha256(b"").hexdigest()
DIGEST = f"sha256:{'1' * 64}"
OPEN = "open-cuda13.0-debian13-runtime"


def result_of(target: Target, dockerfile: str = "", **more: Any) -> BuildResult:
    return BuildResult(
        target=target.id, digest=f"sha256:{'2' * 64}", tags=(), platforms=target.platforms, size_bytes=1, seconds=61.4,
        steps=(), manifests={AMD64: DIGEST}, started="2026-11-21T10:00:00+00:00",
        dockerfile=hashlib.sha256(dockerfile.encode()).hexdigest(), **{"builder": "node-1", "revision": "c" * 40, **more},
    )  # fmt: skip


ORIGIN = {
    "revision": "c" * 40, "source": "https://git.example/acme/images", "run": "https://ci.example/runs/1",
    "workflow": "https://ci.example/w@main", "builder": "https://ci.example/w@main",
}  # fmt: skip
"""What the environment that signs says of itself."""


def stated(
    renderer: Renderer, plan: Plan, name: str, origin: Mapping[str, str] = ORIGIN, **more: Any
) -> dict[str, Any]:
    target = select_one(plan, name)
    recipe, lock = renderer.recipe(target), renderer.project.lock
    return provenance_of(result_of(target, **more), AMD64, recipe, lock, EMPTY, origin=origin)


def test_a_statement(tiny: Files, golden: Callable[[str, str], None]) -> None:
    """Of a build in CI, whose file another one called."""
    project = tiny.load()
    renderer, plan = Renderer(project), make_plan(project)
    options: Any = {"rebuilt": "2026-11-22", "compression": "estargz"}
    document = stated(renderer, plan, plan.targets[0].id, **options)
    text = encode_predicate(document).decode().replace(f'"{__version__}"', '"VERSION"')
    golden("tests/golden/provenance.json", text)
    # Nothing that only a result says is stated of the builder and of the commit.
    claims = {"run": "https://evil.example/r", "workflow": "https://evil.example/w", "source": "https://evil.example/s"}
    again = stated(renderer, plan, plan.targets[0].id, **options, origin=ORIGIN, revision="d" * 40, **claims)
    assert again == document
    unknown = stated(renderer, plan, plan.targets[0].id, {}, builder="https://evil.example/b", **claims)
    assert unknown["runDetails"]["builder"]["id"] == "urn:imagebuild:builder:unknown"
    # in-toto wants one of these of every resource.
    found = document["buildDefinition"]["resolvedDependencies"]
    assert all(item.keys() & {"uri", "digest", "content"} for item in found)


def test_every_pin_of_the_dockerfile_is_named_and_nothing_of_other_platforms(
    renderer: Renderer, full_plan: Plan, project: Project
) -> None:
    document = json.dumps(stated(renderer, full_plan, OPEN))
    text = renderer.dockerfile(select_one(full_plan, OPEN)).text
    for name, commit in project.lock.git.items():
        assert (commit in text) == (commit in document), name
    for wheel in (wheel for wheels in project.lock.wheels.values() for wheel in wheels):
        assert (wheel.sha256["amd64"] in text) == (wheel.sha256["amd64"] in document), wheel.name
        assert wheel.sha256.get("arm64") in (None, wheel.sha256["amd64"]) or wheel.sha256["arm64"] not in document


def replacing(renderer: Renderer, plan: Plan, contexts: dict[str, str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The statement of a build that had these contexts, and its dependencies."""
    document = stated(renderer, plan, OPEN, replaced=replaced_contexts(contexts))
    return document, document["buildDefinition"]["resolvedDependencies"]


def test_a_bootstrapped_base_is_not_called_the_official_one(
    renderer: Renderer, full_plan: Plan, project: Project
) -> None:
    official = digest_of(project.lock, "debian:13.7-slim")
    document, found = replacing(renderer, full_plan, {official: f"oci-layout:///cache@sha256:{'9' * 64}"})
    assert not [item for item in found if official.rpartition(":")[2] in json.dumps(item.get("digest", {}))]
    (base,) = [item for item in found if item.get("digest") == {"sha256": "9" * 64}]
    assert official.rpartition("@")[2] in base["annotations"]["instead-of"]
    assert Provenance.model_validate(document).replaced == (base["annotations"]["instead-of"],)
    # An image from a mirror is the same image.
    mirrored, _ = replacing(renderer, full_plan, {official: f"docker-image://mirror.example/{official}"})
    assert mirrored == stated(renderer, full_plan, OPEN)


def test_a_folder_instead_of_a_commit_has_no_digest(renderer: Renderer, full_plan: Plan, project: Project) -> None:
    document, found = replacing(renderer, full_plan, {"ucx-source": "/home/someone/ucx"})
    (item,) = [item for item in found if item["name"] == "ucx-source"]
    assert ("digest" in item, "/home" in json.dumps(document)) == (False, False)
    commit = project.lock.git["https://github.com/openucx/ucx.git v1.22.0"]
    assert item["annotations"]["instead-of"].endswith(commit)
    assert Provenance.model_validate(document).folders == ("ucx-source",)
    assert commit not in {d.get("digest", {}).get("gitCommit") for d in found}


def test_what_is_unresolved_cannot_be_stated(renderer: Renderer, full_plan: Plan) -> None:
    hpcx = next(target.id for target in full_plan.targets if "hpcx" in target.components)
    with pytest.raises(ConfigError, match=r"hpcx-v2\.51"):
        stated(renderer, full_plan, hpcx)
