"""What a registry has, as a catalogue: tags, platforms, what refers to them; and the README's table of images."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from imagebuild import __version__
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.oci.attestation import BUNDLE_MEDIA
from imagebuild.oci.layout import Attachment, digest_of
from imagebuild.oci.registry import Repository
from imagebuild.project.plan import Plan, make_plan
from imagebuild.project.project import Project
from imagebuild.project.records import Catalog, PublishedImage
from imagebuild.publish.catalog import BEGIN, END, CatalogReader, images_table, replace_table
from imagebuild.publish.freshness import Freshness
from tests import attached
from tests.conftest import ROOT
from tests.registry_fake import FakeRegistry, index, put_image
from tests.unit.conftest import Call
from tests.unit.publish.conftest import AMD64, ARM64, LABELS, REPOSITORY, TAG, Published, Signers, put_index

NOW = datetime(2026, 11, 21, 10, 45, tzinfo=UTC)


def catalog(registry: FakeRegistry, ours: Project, **more: Any) -> Catalog:
    return CatalogReader(ours, make_plan(ours), connect=lambda _: registry, **more).read(NOW)


def one(registry: FakeRegistry, ours: Project) -> PublishedImage:
    (found,) = catalog(registry, ours).images
    return found


def test_an_image_with_what_refers_to_it(
    published: Published, ours: Project, golden: Callable[[str, str], None]
) -> None:
    """Two verifications, one on GPUs; two scans, of which the newest counts; a signature."""
    published.attach_all()
    gpus = {"surroundings": {"runner": "docker", "gpus": 8}, "started": "2026-11-20T09:00:00Z", "version": "0.6"}
    published.attach("verification", attached.verification(published.amd64, outcome="failed") | gpus)
    findings = [
        {"id": f"CVE-{number}", "severity": severity, "package": "p", "version": "1", "waived": waived}
        for number, (severity, waived) in enumerate([("high", None), ("low", "till then"), ("low", None)])
    ]
    published.attach("scan", attached.scan(published.amd64, "failed", findings=findings, started="2026-11-20"))
    published.attach("scan", attached.scan(published.amd64, started="2026-11-13"))
    published.place.attach(published.platforms[ARM64], Attachment("s", BUNDLE_MEDIA, b"{}"))
    text = catalog(published.registry, ours).model_dump_json(indent=1, exclude_defaults=True)
    golden("tests/golden/images.json", text.replace(f'"{__version__}"', '"VERSION"') + "\n")


def test_the_catalogue_says_which_cuda_can_compile_for_a_gpu(published: Published, ours: Project) -> None:
    plan = make_plan(ours).model_copy(update={"gpu_architectures": {"90": ">=11.8"}})
    made = CatalogReader(ours, plan, connect=lambda _: published.registry).read(NOW)
    assert made.gpu_architectures == {"90": ">=11.8"}


@pytest.mark.parametrize(("signer", "message"), [("ours", "ours.pub"), ("theirs", ""), ("", "")])
def test_whose_signature_it_is(
    published: Published, ours: Project, signers: Signers, signer: str, message: str
) -> None:
    if signer:
        signers.signer(signer).sign([published.reference.at(published.digest)])
    found = catalog(published.registry, ours, trust=signers.trust())
    assert [image.verified_by for image in found.images] == [message]
    # A signature does not cover tags that the index does not state.
    left_out = [problem for problem in found.problems if "is left out: the index does not state its tags" in problem]
    assert (len(left_out), [image.tags for image in found.images]) == ((2, [()]) if message else (0, [(TAG,)]))
    assert one(published.registry, ours).verified_by is None


def test_updates_that_an_image_lacks(published: Published, ours: Project) -> None:
    images = [{"target": "t", "platform": AMD64, "digest": published.amd64, "updates": {"a": "1 → 2", "b": "1 → 3"}},
              {"target": "t", "platform": ARM64, "digest": published.platforms[ARM64].digest, "problem": "has no SBOM"}]  # fmt: skip
    fresh = Freshness.model_validate({"read": "2026-11-22T04:17:00Z", "images": images})
    made = catalog(published.registry, ours, freshness=fresh)
    (image,) = made.images
    assert (made.updates_read, [p.updates for p in image.platforms]) == (fresh.read, [2, None])


def test_an_image_of_one_platform(published: Published, ours: Project) -> None:
    """Attestations of BuildKit are no platform. Where nothing says its commit, all of its tags may move."""
    other = put_image(published.registry, REPOSITORY, b"b", platform="unknown/unknown")
    put_index(published.registry, [published.platforms[AMD64], other], TAG, "13.0-runtime")
    assert [platform.platform for platform in one(published.registry, ours).platforms] == [AMD64]
    for tag in (TAG, "13.0-runtime"):
        published.place.put_manifest(published.place.manifest(published.amd64), tag)
    image = one(published.registry, ours)
    assert (image.digest, [p.platform for p in image.platforms]) == (published.amd64, [AMD64])
    assert (image.tags, image.aliases) == ((), (TAG, "13.0-runtime"))


def test_engines_run_the_first_image_of_a_platform(published: Published, ours: Project) -> None:
    published.attach_all()
    other = put_image(published.registry, REPOSITORY, b"other", platform=AMD64, Labels=LABELS)
    put_index(published.registry, [other, *published.platforms.values()], TAG, "13.0-runtime")
    first, second = one(published.registry, ours).platforms
    assert (first.platform, first.digest, first.checks, second.platform) == (AMD64, other.digest, (), ARM64)


@pytest.mark.parametrize(("axis", "says"), [("Signature", "lower-case letters"), ("signature", "must be a version")])
def test_no_label_of_an_image_becomes_the_column_of_its_signature(
    published: Published, ours: Project, axis: str, says: str
) -> None:
    labels = {**LABELS, f"imagebuild.axis.{axis}": "✓ by release.pub"}
    other = put_image(published.registry, REPOSITORY, b"other", platform=AMD64, Labels=labels)
    put_index(published.registry, [other], "13.0-forged")
    found = catalog(published.registry, ours)
    assert [image.tags for image in found.images] == [(TAG,)]
    assert says in " ".join(found.problems)


def test_what_cannot_be_read_is_told_and_hides_no_other(published: Published, ours: Project) -> None:
    published.attach("verification", b"no JSON")
    published.attach("scan", {"verdict": "perhaps"})
    published.attach("sbom", [1])
    published.attach("verification", attached.verification(f"sha256:{'9' * 64}"))
    other = put_image(published.registry, REPOSITORY, b"other")
    index(published.registry, REPOSITORY, [other], "broken")
    del published.registry.repositories[REPOSITORY].manifests[other.digest]
    found = catalog(published.registry, ours)
    assert len(found.images) == 1
    assert found.images[0].platforms[0].checks == ()
    problems = "\n".join(found.problems)
    assert len(found.problems) == 5
    for word in (
        "cannot be read: JSONDecodeError",
        "the file: must be an object, not a list",
        "use the version of imagebuild that wrote it",
        "is about another image: sha256:999",
        f"{other.digest}: does not exist",
    ):
        assert word in problems, word


def test_a_registry_that_is_empty_or_fails(ours: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = FakeRegistry()
    found = catalog(registry, ours)
    assert (found.images, found.problems) == ((), ())
    assert (found.repository, found.read) == ("registry.test/acme", "2026-11-21T10:45:00Z")

    def refuse(_: Repository) -> tuple[str, ...]:
        raise CommandError("registry.test: 503")

    monkeypatch.setattr(Repository, "tags", refuse)
    with pytest.raises(CommandError, match="503"):
        catalog(registry, ours)


def test_the_newest_comes_first(ours: Project) -> None:
    registry, created = FakeRegistry(), "org.opencontainers.image.created"
    for day, content in (("2026-11-01", b"old"), ("2026-11-19", b"new"), ("2026-11-10", b"middle")):
        labels = {**LABELS, created: f"{day}T00:00:00Z"}
        child = put_image(registry, REPOSITORY, content, Labels=labels)
        put_index(registry, [child], f"13.0-debian13-runtime-{digest_of(content)[7:14]}")
    days = [image.created[:10] for image in catalog(registry, ours).images]
    assert days == ["2026-11-19", "2026-11-10", "2026-11-01"]


# The README's table


TEXT = f"# Title\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n"


def test_the_table_of_this_project_is_fresh(project: Project, full_plan: Plan) -> None:
    text = (ROOT / "docs/images.md").read_text()
    assert text == replace_table("docs/images.md", text, images_table(project, full_plan)), (
        "`imagebuild catalog --readme docs/images.md`"
    )


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", TEXT + BEGIN])
def test_markers_must_be_there_once(text: str) -> None:
    with pytest.raises(ConfigError, match=r"README.md: table markers .*; write one line <!-- images:begin --> and"):
        replace_table("README.md", text, "table\n")


def test_the_table_is_written_between_the_markers(tmp_path: Path, command: Call) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(TEXT)
    assert command("catalog", "--readme", readme, "--project", ROOT)[0] == 0
    before, after = "# Title\n\nbefore\n\n<!-- images:begin -->\n| image |", "<!-- images:end -->\n\nafter\n"
    assert readme.read_text().startswith(before)
    assert readme.read_text().endswith(after)
    for args, problem in (((), "add -o DIR"), (("-o", tmp_path / "x"), "does not name a registry; add --registry")):
        status, _, err = command("catalog", *args, "--project", ROOT)
        assert (status, problem in err, (tmp_path / "x").exists()) == (2, True, False)
