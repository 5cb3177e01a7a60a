"""The site: random catalogues, whatever texts are in them; the picker's data; sizes; the files that are written."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from imagebuild.core import ResultError
from imagebuild.project import AttachedFile, Bound, Catalog, Checks, Curve, PublishedImage, Scan
from imagebuild.publish import (
    ABSENT,
    BOTTOM,
    HEIGHT,
    LEFT,
    PLATFORM,
    WIDTH,
    Badge,
    RegistryReading,
    checks_badge,
    choices_of,
    draw_chart,
    embed_json,
    facets_of,
    format_day,
    format_minute,
    image_tags,
    index_page,
    load_catalog,
    natural_order,
    page_path,
    picker_rows,
    pull_commands,
    read_catalog,
    site_pages,
    write_site,
)
from tests import catalog_samples
from tests.catalog_samples import digest
from tests.report_samples import HOSTILE

VOID = {"meta", "input", "br", "line", "circle", "path"}


@dataclass
class Outline(HTMLParser):
    """What a browser would find; every element must be closed."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    found.close()
    assert not found.open
    return found


@pytest.fixture(scope="module")
def few() -> Catalog:
    return catalog_samples.catalog(60)


def spoiled(catalog: Catalog) -> Catalog:
    """The catalogue with hostile text wherever a registry may have put it."""

    def image(one: PublishedImage) -> PublishedImage:
        bound = Bound(gb_s=450.0, what=HOSTILE)
        drawn = Curve(
            evidence=HOSTILE, collective=HOSTILE, ranks=8, nodes=2, device=HOSTILE, points=((1, 1.0), (1 << 33, 2.0)),
            best_gb_s=2.0, best_bytes=1 << 33, verdict=HOSTILE, outcome=HOSTILE, reason=HOSTILE, profile=HOSTILE,
            ceiling=bound, reference=bound,
        )  # fmt: skip
        platforms = tuple(
            p.model_copy(update={
                "platform": f"linux/{HOSTILE}", "labels": {HOSTILE: HOSTILE}, "created": HOSTILE, "curves": (drawn,),
                "scan": Scan(evidence=HOSTILE, verdict="failed", reason=HOSTILE, counts={"high": 1}, scanner=HOSTILE,
                             database=HOSTILE, started=HOSTILE),
                "checks": (Checks(evidence=HOSTILE, passed=1, failed=1, skipped=0, started=HOSTILE, runner=HOSTILE,
                                  gpus=1, device=HOSTILE, failures=(HOSTILE,), version=HOSTILE),),
                "evidence": (AttachedFile(kind=HOSTILE, digest=HOSTILE),),
            })
            for p in one.platforms
        )  # fmt: skip
        texts = {
            "target": HOSTILE, "description": HOSTILE, "axes": {"cuda": HOSTILE, "os": "x"}, "revision": HOSTILE,
            "versions": {HOSTILE: HOSTILE}, "stack": {"nccl": HOSTILE, "mpi": HOSTILE}, "created": HOSTILE,
            "restricted": {"x": HOSTILE}, "platforms": platforms,
        }  # fmt: skip
        return one.model_copy(update=texts)

    images = tuple(image(one) for one in catalog.images[:3])
    return catalog.model_copy(update={"images": images, "problems": (HOSTILE,), "repository": HOSTILE, "read": HOSTILE})


def test_hostile_text_is_text(few: Catalog) -> None:
    pages = dict(site_pages(spoiled(few)))
    assert len(pages) == 5
    for name, text in pages.items():
        if not name.endswith(".html"):
            continue
        found = outline(text)
        kinds = {tag for tag, _ in found.elements}
        assert "img" not in kinds, name
        assert not [a for _, attributes in found.elements for a in attributes if a.startswith("on") or a == "style"]
        allowed = 2 if name == "index.html" else 1
        assert sum(tag == "script" for tag, _ in found.elements) == allowed
        assert "onerror=alert" in "".join(found.texts)
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_nothing_is_loaded_from_elsewhere(few: Catalog) -> None:
    for name, text in site_pages(few):
        if not name.endswith(".html"):
            continue
        found = outline(text)
        policy = next(a["content"] for tag, a in found.elements if a.get("http-equiv") == "Content-Security-Policy")
        assert policy
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert not re.search(r"unsafe|https?:|\*", policy)
        assert not [a["src"] for _, a in found.elements if "src" in a]
        links = [str(a["href"]) for tag, a in found.elements if tag == "a"]
        assert not [link for link in links if ":" in link.split("/")[0]]
        assert not re.search(r"url\(|@import", text)


def test_links_lead_somewhere(few: Catalog) -> None:
    pages = dict(site_pages(few))
    for name, text in pages.items():
        if name.endswith(".html"):
            ids = {a["id"] for _, a in outline(text).elements if "id" in a}
            for tag, attributes in outline(text).elements:
                link = str(attributes.get("href", ""))
                if tag == "a" and link.startswith("#"):
                    assert link[1:] in ids
                elif tag == "a":
                    parts: list[str] = []
                    for part in [*name.split("/")[:-1], *link.split("/")]:
                        parts = parts[:-1] if part == ".." else [*parts, part]
                    assert "/".join(parts) in pages


def test_the_same_catalogue_gives_the_same_site(few: Catalog) -> None:
    again = Catalog.model_validate_json(few.model_dump_json())
    assert dict(site_pages(few)) == dict(site_pages(again))


def test_500_images_are_quick_and_the_index_is_small(tmp_path: Path) -> None:
    catalog = catalog_samples.catalog(500)
    began = time.process_time()
    write_site(RegistryReading(catalog), tmp_path)
    assert time.process_time() - began < 15  # 2 to 3 s; the bound is for a machine that does much else
    assert (tmp_path / "index.html").stat().st_size < 1_000_000
    assert max(page.stat().st_size for page in tmp_path.glob("images/*/*.html")) < 1_000_000
    assert len(list(tmp_path.glob("images/*/*.html"))) == 500


def test_every_row_is_an_image(few: Catalog) -> None:
    found = outline(index_page(few))
    rows = [a["data-digest"] for tag, a in found.elements if tag == "tr" and "data-digest" in a]
    assert rows == [image.digest.removeprefix("sha256:") for image in few.images]
    text = "".join(found.texts)
    for image in few.images:
        assert image.tag in text


@pytest.mark.parametrize("seed", range(8))
def test_the_picker_leads_to_the_newest_of_every_kind(seed: int) -> None:
    """What the page's program does, done here: all choices of an image lead to it, or to a newer one of its kind."""
    catalog = catalog_samples.catalog(random.Random(seed).randrange(1, 200), seed)
    facets = facets_of(catalog.images)
    rows = picker_rows(catalog.images, facets)
    assert facets[-1].key == PLATFORM
    reached = set()
    for place, image in enumerate(catalog.images):
        own = choices_of(image)
        wanted = [facet.values.index(own.get(facet.key, ABSENT)) for facet in facets[:-1]]
        mask = sum(1 << facets[-1].values.index(platform.platform) for platform in image.platforms)
        hits = [row for row in rows if row[1:-1] == wanted and row[-1] == mask]
        assert len(hits) == 1
        offered = catalog.images[hits[0][0]]
        assert offered.created >= image.created
        assert hits[0][0] <= place
        reached.add(hits[0][0])
    assert reached == {row[0] for row in rows}
    assert [catalog.images[row[0]].created[:10] for row in rows] == sorted(
        (catalog.images[row[0]].created[:10] for row in rows), reverse=True
    )


def test_facets_are_the_newest_first(few: Catalog) -> None:
    facets = {facet.key: facet for facet in facets_of(few.images)}
    assert list(facets) == ["image", "cuda", "os", "nccl", "mpi", "variant", "platform"]
    assert facets["cuda"].values[:3] == ("13.5", "13.4.2", "13.4")
    assert facets["os"].values == ("ubuntu26.04", "ubuntu24.04", "ubuntu22.04", "debian13")
    assert facets["platform"].values == ("linux/amd64", "linux/arm64")
    lacking = few.images[0].model_copy(update={"stack": {}})
    assert facets_of([lacking, *few.images])[3].values[-1] == ABSENT
    assert not facets_of([])


def test_data_cannot_end_its_script() -> None:
    text = str(embed_json({"a": "</script><!--", "b": "\u2028&"}))
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><!--", "b": "\u2028&"}


def test_versions_are_sorted_as_numbers() -> None:
    assert sorted(["12.10", "12.9", "9", "12"], key=natural_order) == ["9", "12", "12.9", "12.10"]


def test_commands() -> None:
    name = "ghcr.io/acme/open"
    by_tag = {one.title: one.text for one in pull_commands(name, ":1.2")}
    by_digest = {one.title: one.text for one in pull_commands(name, f"@{digest(1)}")}
    assert by_tag["Docker"] == "docker pull ghcr.io/acme/open:1.2"
    assert by_tag["enroot"] == "enroot import -o open.sqsh docker://ghcr.io#acme/open:1.2"
    assert by_tag["Apptainer"] == "apptainer pull open.sif docker://ghcr.io/acme/open:1.2"
    assert "--container-image=ghcr.io#acme/open:1.2 " in by_tag["Slurm, pyxis"]
    assert "--image=ghcr.io/acme/open:1.2 " in by_tag["Kubernetes"]
    assert by_digest["Docker"] == f"docker pull ghcr.io/acme/open@{digest(1)}"
    assert by_digest["enroot"].endswith(f"docker://ghcr.io#acme/open:{digest(1)}")
    assert f"ghcr.io#acme/open:{digest(1)} " in by_digest["Slurm, pyxis"]


@pytest.mark.parametrize("ceiling", [None, 450.0])
def test_a_curve_lies_within_its_drawing(ceiling: float | None) -> None:
    curve = catalog_samples.curve("all_gather", 362.0, 450.0, "x")
    curve = curve.model_copy(update={"ceiling": Bound(gb_s=ceiling, what="it")} if ceiling else {"ceiling": None})
    drawn = draw_chart(curve)
    assert len(drawn.dots) == len(curve.points)
    assert all(LEFT <= x <= WIDTH and 0 <= y <= HEIGHT - BOTTOM for x, y in drawn.dots)
    assert [x for x, _ in drawn.dots] == sorted(x for x, _ in drawn.dots)
    lines = {limit.kind: limit.y for limit in drawn.limits}
    assert ("ceiling" in lines) == bool(ceiling)
    if ceiling:
        assert lines["ceiling"] < lines["reference"] < min(y for _, y in drawn.dots)
    assert 3 <= len(drawn.y_marks) <= 7
    assert drawn.x_marks


@pytest.mark.parametrize("points", [((8, 0.5),), ((8, 0.0), (16, 0.0)), ((1, 1e-6), (1 << 40, 1e6))])
def test_odd_curves_are_drawn(points: tuple[tuple[int, float], ...]) -> None:
    curve = Curve(evidence="x", collective="c", points=points, best_gb_s=1, best_bytes=8, verdict="ok")
    assert "nan" not in repr(draw_chart(curve))


def test_words() -> None:
    run = Checks(evidence="x", passed=60, failed=0, skipped=9)
    gpu = run.model_copy(update={"passed": 80, "gpus": 8})
    assert checks_badge([]) == Badge("skipped", "not checked")
    assert checks_badge([run, gpu]) == Badge("passed", "80 passed, 8 GPUs")
    assert checks_badge([gpu, run.model_copy(update={"failed": 2})]).text == "2 failed"
    assert checks_badge([run.model_copy(update={"passed": 0})]).state == "skipped"
    assert format_day("1970-01-01T00:00:00Z") == "\u2013"
    assert format_minute("2026-11-21T10:45:00Z") == "2026-11-21 10:45 UTC"


def test_old_pages_are_removed_and_nothing_else(tmp_path: Path, few: Catalog) -> None:
    copies = {"evidence/one-verify.json": "{}", "evidence/two-verify.json": "{}"}
    write_site(RegistryReading(few, copies), tmp_path)
    (tmp_path / "CNAME").write_text("example.org")
    (tmp_path / "images/mine.txt").write_text("mine")
    fewer = few.model_copy(update={"images": few.images[:2]})
    write_site(RegistryReading(fewer, {"evidence/one-verify.json": "{}"}), tmp_path)
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    pages = sorted(page_path(image) for image in fewer.images)
    assert files == sorted(
        ["CNAME", "evidence/one-verify.json", "images/mine.txt", "images.json", "index.html", *pages]
    )


def with_copy(catalog: Catalog, name: str) -> Catalog:
    first = catalog.images[0]
    entry = AttachedFile(kind="verification", digest=digest("x"), file=name)
    platforms = (first.platforms[0].model_copy(update={"evidence": (entry,)}), *first.platforms[1:])
    return catalog.model_copy(
        update={"images": (first.model_copy(update={"platforms": platforms}), *catalog.images[1:])}
    )


def test_a_catalogue_comes_back_with_its_copies(tmp_path: Path, few: Catalog) -> None:
    catalog = with_copy(few, "evidence/x-verify.json")
    write_site(RegistryReading(catalog, {"evidence/x-verify.json": '{"a": 1}'}), tmp_path)
    again = load_catalog(tmp_path / "images.json")
    assert again == RegistryReading(catalog, {"evidence/x-verify.json": '{"a": 1}'})
    (tmp_path / "evidence/x-verify.json").unlink()
    assert load_catalog(tmp_path / "images.json").catalog.images[0].platforms[0].evidence[0].file is None


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "evidence/../../secret", "evidence/..", "images.json"])
def test_a_catalogue_names_no_file_but_copies(name: str, tmp_path: Path, few: Catalog) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "secret").write_text("secret")
    path = tmp_path / "site/images.json"
    path.write_text(with_copy(few, name).model_dump_json())
    reading = load_catalog(path)
    assert reading.copies == {}
    assert reading.catalog.images[0].platforms[0].evidence[0].file is None


@pytest.mark.parametrize("tag", ["../../x", "..", "a/b", "", "-a", "a b"])
def test_a_tag_names_no_other_page(tag: str, few: Catalog) -> None:
    assert image_tags((tag, "good")) == ("good",)
    spoiled_ = few.images[0].model_dump() | {"tags": [tag]}
    with pytest.raises(ValidationError):
        PublishedImage.model_validate(spoiled_)


def test_another_file_is_no_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "images.json"
    path.write_text('{"images": []}')
    with pytest.raises(ResultError, match=r"images.json: repository: Field required; is it an images.json"):
        read_catalog(path)


def test_the_schema(golden: Callable[[str, str], None]) -> None:
    schema: dict[str, Any] = Catalog.model_json_schema(by_alias=False)
    golden("schemas/images.json", json.dumps(schema, indent=1) + "\n")
