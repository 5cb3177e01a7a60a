"""The catalogue in a browser: the picker, the table, copying, on a phone, and by keyboard."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from imagebuild.project.records import Catalog, PublishedImage
from imagebuild.publish.site import checks_badge, write_site
from tests import catalog_samples
from tests.browser.conftest import Visit
from tests.conftest import data

CASES = data("cases/browser/catalog")

pytestmark = [pytest.mark.browser, pytest.mark.programs]


def has_failures(image: PublishedImage) -> bool:
    return any(checks_badge(platform.checks)[0] == "failed" for platform in image.platforms)


def choices_of(image: PublishedImage) -> dict[str, str]:
    """Return the choices in the picker that lead to an image. The platform is the image's first."""
    cuda = ".".join(image.axes["cuda"].split(".")[:2])
    return {"image": image.image, **image.axes, **image.stack, "cuda": cuda, "platform": image.platforms[0].platform}


def choose(page: Page, facet: str, value: str) -> None:
    box = page.get_by_label(facet, exact=True)
    box.select_option(box.locator("option", has_text=re.compile(rf"^{re.escape(value)}$")).get_attribute("value"))


def test_the_picker_leads_to_every_tag(visit: Visit, catalog: Catalog) -> None:
    """The page's own script makes all choices of each image."""
    page = visit("catalog").page
    offered = page.evaluate(
        """images => images.map(choices => {
            Object.keys(choices).forEach(key => { document.getElementById('choice-' + key).value = choices[key]; });
            document.querySelector('form.facets').dispatchEvent(new Event('change'));
            return document.getElementById('tag').textContent;
        })""",
        [choices_of(image) for image in catalog.images],
    )
    for image, name in zip(catalog.images, offered, strict=True):
        best = next(i for i in catalog.images if f"{i.image}:{i.tag}" == name)
        # The picker offers the newest matching image without failures; if all have failures, the newest.
        wanted = choices_of(image)
        fitting = [
            i for i in catalog.images
            if any(choices_of(i) | {"platform": p.platform} == wanted for p in i.platforms)
        ]  # fmt: skip
        sound = [i for i in fitting if not has_failures(i)] or fitting
        assert best in sound
        assert best.created == max(i.created for i in sound)


def test_facets_are_the_newest_first(visit: Visit) -> None:
    """Versions are sorted from newest to oldest, images as in the matrix, other words alphabetically."""
    boxes = visit("catalog").page.locator(".facets div")
    facets = boxes.evaluate_all(
        "boxes => boxes.map(box => [box.textContent.split(' ')[0], Array.from(box.lastChild.options, o => o.value)])"
    )
    titles, values = zip(*facets, strict=True)
    names = [title.removesuffix("any") for title in titles]
    assert names == ["Image", "CUDA", "OS", "NCCL", "MPI", "Variant", "Platform"]
    assert values[0] == ["", "hpcx", "open", "quickstart"]
    assert values[1][:4] == ["", "13.5", "13.4", "13.3"]
    assert values[2] == ["", "ubuntu26.04", "ubuntu24.04", "ubuntu22.04", "debian13"]
    assert values[5:] == (["", "devel", "runtime"], ["", "linux/amd64", "linux/arm64"])


def test_choices_are_narrowed_and_say_why(visit: Visit) -> None:
    page = visit("catalog").page
    expect(page.locator("#fits")).to_contain_text("that fit.")
    choose(page, "OS", "ubuntu26.04")
    options = page.get_by_label("CUDA", exact=True).locator("option")
    refused = options.filter(has_text="13.5 – not with OS ubuntu26.04")
    expect(refused).to_be_disabled()
    expect(options.filter(has_text="12.6")).to_be_disabled()
    expect(page.get_by_label("MPI", exact=True).locator("option:disabled")).to_have_text(
        "Open MPI 5.0.10 – not with OS ubuntu26.04"
    )
    choose(page, "CUDA", "13.4")
    choose(page, "Variant", "devel")
    expect(page.locator("#tag")).to_contain_text(
        re.compile(r"^hpcx:cuda13\.4\.2-nccl2\.32\.3-hpcx2\.51-ubuntu26\.04-devel-")
    )
    expect(page.locator("#facts")).to_contain_text("13.4.2")
    page.get_by_role("button", name="Start again").click()
    expect(refused).to_have_count(0)


def test_the_answer_is_on_the_first_screen_of_a_phone(visit: Visit) -> None:
    """For CUDA 13.2 on Ubuntu 24.04: the name of the image, its facts, and the command to pull it."""
    page = visit("catalog#cuda=13.2&os=ubuntu24.04", width=390).page
    expect(page.locator("#tag")).to_contain_text("hpcx:cuda13.2.1-")
    titles = page.locator("#facts dt").all_text_contents()
    assert titles == ["Checks", "Scan", "Signature", "CUDA", "Platforms", "Compressed", "Dated"]
    expect(page.locator("#facts dd").last).to_contain_text(re.compile(r"^ ?2026-\d\d-\d\d, .+"))
    for part in ("#tag", "#facts", "#commands .command:first-child .copy"):
        box = page.locator(part).bounding_box()
        assert box
        assert box["y"] + box["height"] <= 844


def test_a_newer_image_with_failures_is_mentioned_and_not_offered(browser: Browser, tmp_path: Path) -> None:
    new, old, *_ = (i for i in catalog_samples.catalog(150).images if i.axes["cuda"] == "13.5" and not has_failures(i))
    platform = new.platforms[0]
    checks = (platform.checks[0].model_copy(update={"failed": 2}),)
    bad = new.model_copy(update={"platforms": (platform.model_copy(update={"checks": checks}),)})
    old = old.model_copy(update={"axes": new.axes, "platforms": old.platforms[:1], "created": "2026-10-01T00:00:00Z"})
    page = browser.new_page()
    for images, offered, printed in (
        ((bad, old), old, f"Not offered, as it has failures: {bad.image}:{bad.tag}, dated {bad.created[:10]}."),
        ((bad,), bad, ""),
        ((new, old), new, ""),
    ):
        made = catalog_samples.catalog(1).model_copy(update={"images": images})
        page.goto("about:blank")
        page.goto(write_site(made, tmp_path).as_uri())
        expect(page.locator("#tag")).to_have_text(f"{offered.image}:{offered.tag}")
        expect(page.locator("#over:not([hidden])")).to_have_text([printed] if printed else [])
    page.close()


@pytest.mark.parametrize(("address", "printed", "shown"), CASES["a-link-that-cannot-be-met-says-so"])
def test_a_link_that_cannot_be_met_says_so(visit: Visit, address: str, printed: str, shown: str) -> None:
    opened = visit(f"catalog{address}")
    expect(opened.page.locator("#unmet")).to_contain_text(printed)
    expect(opened.page.locator("#unmet")).to_be_visible(visible=bool(printed))
    expect(opened.page.locator("#tag")).to_contain_text(shown)
    assert opened.messages == []
    opened.page.get_by_role("button", name="Start again").click()
    expect(opened.page.locator("#unmet")).to_be_hidden()


def test_commands_by_tag_and_by_digest(visit: Visit, catalog: Catalog) -> None:
    page = visit("catalog#image=open&cuda=13.5&variant=devel&platform=linux/arm64").page
    image = next(
        item for item in catalog.images
        if (item.image, item.axes["cuda"], item.axes["variant"]) == ("open", "13.5", "devel") and len(item.platforms) == 2
    )  # fmt: skip
    codes = page.locator("#commands code")
    expect(codes.nth(0)).to_have_text(f"docker pull --platform linux/arm64 registry.example.org/gpu/open:{image.tag}")
    page.get_by_role("button", name="by digest").click()
    expect(codes.nth(0)).to_have_text(f"docker pull --platform linux/arm64 {image.reference}")
    expect(codes.nth(1)).to_have_text(
        f"enroot import -o open.sqsh docker://registry.example.org#gpu/open:{image.digest}"
    )


def test_an_image_is_shown_when_its_name_is_followed(visit: Visit, catalog: Catalog) -> None:
    image = catalog.images[0]
    page = visit("catalog", permissions=["clipboard-read", "clipboard-write"]).page
    article = page.locator("article:visible")
    expect(article).to_have_count(0)
    page.get_by_role("link", name=image.tag).click()
    expect(article.locator("h2")).to_have_text(f"{image.image} {image.tag}")
    expect(article.locator("dl").first).to_contain_text(image.digest)
    article.get_by_role("button", name="Copy the command for Apptainer").click()
    copied = str(page.evaluate("navigator.clipboard.readText()"))
    assert copied == f"apptainer pull {image.image}.sif docker://{image.repository}:{image.tag}"
    article.get_by_role("link", name="All images").click()
    expect(article).to_have_count(0)
    page.get_by_role("link", name="All about this image").click()
    expect(article.locator("h2")).to_have_text(str(page.locator("#tag").text_content()).replace(":", " "))


def test_the_address_keeps_the_choice(visit: Visit) -> None:
    page = visit("catalog").page
    choose(page, "OS", "debian13")
    assert page.evaluate("location.hash") == "#os=debian13"
    page.reload()
    expect(page.get_by_label("OS").locator("option:checked")).to_have_text("debian13")
    expect(page.locator("#tag")).to_contain_text("debian13")
    page.evaluate("location.hash = '#os=ubuntu26.04'")
    expect(page.locator("#tag")).to_contain_text("ubuntu26.04")


def test_by_keyboard(visit: Visit) -> None:
    page = visit("catalog").page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the table of images")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.type("hpcx")
    expect(page.get_by_label("Image", exact=True).locator("option:checked")).to_have_text("hpcx")
    page.keyboard.press("Tab")
    # Only another image has CUDA 13.5, so the arrow key skips it.
    page.keyboard.press("ArrowDown")
    expect(page.get_by_label("CUDA", exact=True).locator("option:checked")).to_have_text("13.4")
    expect(page.locator("#tag")).to_contain_text("hpcx:cuda13.4.2")
    assert page.locator("select:focus").evaluate("e => getComputedStyle(e).outlineStyle") == "solid"


def test_search_sort_and_pages(visit: Visit, catalog: Catalog) -> None:
    page = visit("catalog").page
    status, shown = page.get_by_role("status"), page.locator("table.images tbody tr:visible")
    expect(status).to_have_text("1–50 of 150")
    page.get_by_role("button", name="Next").click()
    expect(status).to_have_text("51–100 of 150")
    assert shown.locator("a").all_text_contents() == [image.tag for image in catalog.images[50:100]]
    search = page.get_by_role("searchbox", name="Search")
    search.fill("13.5 debian13 DEVEL")
    hits = [i for i in catalog.images if i.axes == {"cuda": "13.5", "os": "debian13", "variant": "devel"}]
    expect(status).to_have_text(f"1–{len(hits)} of {len(hits)}")
    expect(shown).to_have_count(len(hits))
    search.fill("nonsense")
    expect(status).to_have_text("nothing fits")
    search.fill("")
    head = page.get_by_role("columnheader", name="Compressed")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    texts = page.locator('td[data-title="Compressed"]').all_text_contents()
    sizes = [float(t.split()[0]) * (1000 if t.endswith("GB") else 1) for t in texts]
    assert sizes == sorted(sizes)
    # Sorting the table does not change the image that the picker names.
    choose(page, "Image", "quickstart")
    page.get_by_role("button", name="by digest").click()
    named = str(page.locator("#tag").text_content())
    assert named.partition("@")[2] in {i.digest for i in catalog.images if i.image == "quickstart"}


def test_a_phone_has_cards_with_labels(visit: Visit) -> None:
    page = visit("catalog", width=390).page
    cells = page.locator("table.images tbody tr").first.locator("td")
    labels = cells.evaluate_all("cells => cells.map(e => getComputedStyle(e, '::before').content)")
    assert (labels[0], labels[-1]) == ('"CUDA"', '"Dated"')
