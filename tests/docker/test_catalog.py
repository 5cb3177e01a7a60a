"""The catalogue of what was really published: two targets, built, verified, published, and read back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imagebuild.oci import Descriptor, manifests_of
from imagebuild.project import Catalog
from tests.docker.conftest import REPOSITORY
from tests.docker.test_publish import NEW, OLD, Shop, shop, shops

__all__ = ["shop", "shops"]

pytestmark = pytest.mark.docker


def test_what_was_published_is_in_the_catalogue(shop: Shop, tmp_path: Path) -> None:
    shop.publish("catalogue")
    site = tmp_path / "site"
    place = f"{shop.faulty.address}/{REPOSITORY}/catalogue"
    shop.faulty.rule("busy", "GET", "/manifests/", seconds=1)
    done = shop.tiny.imagebuild("catalog", "--registry", place, "-o", site)
    assert f"2 images in {site}/index.html" in "".join(done.out.split("\n"))
    assert "warning" not in done.err
    catalog = Catalog.model_validate_json((site / "images.json").read_text())
    assert catalog.repository == place
    assert not catalog.problems
    assert [image.target for image in catalog.images] == [NEW, OLD]
    named = shop.tags("catalogue")
    for image in catalog.images:
        result = shop.result(image.target)
        assert {named[tag] for tag in (*image.tags, *image.aliases)} == {image.digest}
        assert re.fullmatch(rf"{image.axes['cuda']}-runtime-{str(result.revision)[:7]}", image.tag)
        assert image.versions == {"library": f"1.{shop.tiny.nonce}", "tool": f"2.{shop.tiny.nonce}"}
        index = shop.registry.manifest(f"{REPOSITORY}/catalogue/tiny", image.digest)
        assert index
        listed: list[Descriptor] = list(manifests_of(index.document))
        assert [(p.platform, p.digest) for p in image.platforms] == [(c.platform, c.digest) for c in listed]
        assert [p.digest for p in image.platforms] == list(result.manifests.values())
        (platform,) = image.platforms
        assert platform.size_bytes == result.size_bytes
        (checks,) = platform.checks
        assert (checks.failed, checks.runner) == (0, "docker")
        assert checks.passed >= 1
        assert [entry.digest for entry in platform.evidence if entry.kind == "verification"] == [checks.evidence]
    assert [image.aliases for image in catalog.images] == [("latest",), ()]


def test_what_the_catalogue_names_is_pulled(shop: Shop, tmp_path: Path) -> None:
    """The commands in the article of an image, by tag and by digest."""
    shop.publish("pulled", NEW)
    site = tmp_path / "site"
    shop.tiny.imagebuild("catalog", "--registry", f"{shop.faulty.address}/{REPOSITORY}/pulled", "-o", site)
    (image,) = Catalog.model_validate_json((site / "images.json").read_text()).images
    page = (site / "index.html").read_text()
    assert re.findall(r">(docker pull [^<]+)<", page) == [
        f"docker pull {image.repository}:{image.tag}", f"docker pull {image.reference}"
    ]  # fmt: skip
    shop.tiny.imagebuild("verify", image.reference, "--pull", "--only", "library/*")
