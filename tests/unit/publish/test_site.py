"""The catalogue's page: random catalogues, whatever texts are in them; the picker's data; the files that are written."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from imagebuild.core.errors import ResultError
from imagebuild.core.yaml import read_written
from imagebuild.project.records import Catalog, Checks, PublishedImage
from imagebuild.publish.site import catalog_page, checks_badge, format_day, pull_commands, write_site
from tests import catalog_samples
from tests.page_outline import outline
from tests.report_samples import HOSTILE


@pytest.fixture(scope="module")
def few() -> Catalog:
    return catalog_samples.catalog(60)


def spoiled(value: Any) -> Any:
    """The same with hostile text wherever a registry may have put it."""
    match value:
        case BaseModel():
            kept = {"image", "digest", "tags", "aliases", "repository", "verdict"}
            return value.model_copy(update={name: spoiled(v) for name, v in value if name not in kept})
        case tuple():
            return tuple(map(spoiled, value))
        case dict():
            return {HOSTILE if name.startswith("imagebuild.") else name: spoiled(v) for name, v in value.items()}
    return HOSTILE if isinstance(value, str) else value


def test_hostile_text_is_text(few: Catalog) -> None:
    problems = {"problems": (HOSTILE,), "repository": HOSTILE, "images": few.images[:3]}
    text = catalog_page(spoiled(few.model_copy(update=problems)))
    found = outline(text)
    assert not found.named("img")
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert [attributes.get("type") for attributes in found.named("script")] == ["application/json", None]
    assert "onerror=alert" in found.text
    assert not re.search("[\x1b\u202e]", text)


def test_nothing_is_loaded_and_links_lead_somewhere(few: Catalog) -> None:
    found = outline(catalog_page(few))
    found.runs_only_its_own_scripts()
    links = {str(a["href"]) for a in found.named("a")}
    ids = [a["id"] for _, a in found.elements if "id" in a]
    assert {link[1:] for link in links - {"images.json"}} <= set(ids)
    assert len(ids) == len(set(ids))
    assert {f"#{image.image}:{image.tag}" for image in few.images} < links


def test_an_empty_catalogue_has_no_script(few: Catalog) -> None:
    empty = catalog_page(few.model_copy(update={"images": ()}))
    assert ("<script" in empty, "Nothing is published in registry.example.org/gpu yet." in empty) == (False, True)


def test_500_images_are_quick_and_the_page_is_small(tmp_path: Path) -> None:
    catalog = catalog_samples.catalog(500)
    began = time.process_time()
    write_site(catalog, tmp_path)
    assert time.process_time() - began < 6  # 1 s; the bound is for a machine that does much else
    text = (tmp_path / "index.html").read_text()
    assert len(text) < 8_000_000
    assert text.index("<article") < 1_000_000  # all that the picker needs is there soon


def test_what_is_known_of_an_image(few: Catalog) -> None:
    image = few.images[0]
    page, platform = catalog_page(few.model_copy(update={"images": (image,)})), image.platforms[0]
    run = platform.checks[0]
    for part in (
        f"docker pull {image.reference}<", platform.digest, f"{run.passed} passed, {run.failed} failed, 13 skipped",
        "31 low, 2 waived", f"imagebuild attest verify {image.reference}",
    ):  # fmt: skip
        assert part in page, part


def row_of(image: PublishedImage, catalog: Catalog) -> list[str]:
    """The table's row for an image, as text: its title, and what is in each cell."""
    page = catalog_page(catalog.model_copy(update={"images": (image,)}))
    row = page[page.index("<tr data-digest") : page.index("</tbody>")]
    return [" ".join(re.sub("<[^>]+>", " ", cell).split()) for cell in re.findall("<t[hd].*?</t[hd]>", row)]


def test_what_is_weighed(few: Catalog) -> None:
    sound = (i for i in few.images if not any(run.failed for p in i.platforms for run in p.checks))
    image = next(i for i in sound if i.platforms[0].checks[0].gpus)
    _, cuda, *_, checks, _, signature, _ = row_of(image, few)
    assert (cuda, signature) == (image.axes["cuda"], "– not verified")
    assert checks.endswith(" passed, 8 GPUs NVIDIA H100 80GB HBM3")
    bare = image.platforms[0].model_copy(update={"checks": (), "scan": None})
    unknown = row_of(image.model_copy(update={"platforms": (bare,), "created": "", "stack": {}}), few)
    assert unknown[-4:] == ["– not checked", "– not scanned", "– not verified", "–"]
    for signer, printed in (("a.pub", "✓ by a.pub"), ("", "✗ none that is trusted")):
        assert row_of(image.model_copy(update={"verified_by": signer}), few)[-2] == printed
    few = few.model_copy(update={"updates_read": "2026-11-22T04:17:00Z"})
    platforms = tuple(image.platforms[0].model_copy(update={"updates": number}) for number in (0, 3))
    late = image.model_copy(update={"platforms": platforms})
    assert row_of(late, few)[-3].endswith(" 3 security updates pending, as of 2026-11-22")
    page = catalog_page(few.model_copy(update={"images": (late,)}))
    assert page.count("pending, as of") == 1 + len(platforms), "in the row, and of each platform"


def test_words() -> None:
    """Commands of programs that the browser's tests do not ask for; of several runs, failures of any count."""
    commands = pull_commands("ghcr.io/acme/open")
    assert "--container-image=ghcr.io#acme/open{enroot} " in commands["Slurm, pyxis"]
    assert "--image=ghcr.io/acme/open{ref} " in commands["Kubernetes"]
    run = Checks(passed=60, failed=0, skipped=9)
    gpu = run.model_copy(update={"passed": 80, "gpus": 8})
    assert checks_badge([run, gpu]) == ("passed", "80 passed, 8 GPUs")
    assert checks_badge([gpu, run.model_copy(update={"failed": 2})]) == ("failed", "2 failed")
    assert checks_badge([run.model_copy(update={"passed": 0})])[0] == "skipped"
    assert format_day("1970-01-01T00:00:00Z") == "\u2013"


def test_the_same_catalogue_gives_the_same_files(tmp_path: Path, few: Catalog) -> None:
    page = write_site(few, tmp_path)
    (tmp_path / "CNAME").write_text("example.org")
    again = read_written(Catalog, (tmp_path / "images.json").read_bytes(), "images.json")
    assert again == few
    assert page.read_text() == catalog_page(again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CNAME", "images.json", "index.html"]
    (tmp_path / "images.json").write_text('{"images": []}')
    with pytest.raises(
        ResultError, match=r"images.json: repository: is missing; .*; write the document again, or use the version"
    ):
        read_written(Catalog, (tmp_path / "images.json").read_bytes(), "images.json")


def test_the_schema(golden: Callable[[str, str], None]) -> None:
    golden("schemas/images.json", json.dumps(Catalog.model_json_schema(by_alias=False), indent=1) + "\n")
