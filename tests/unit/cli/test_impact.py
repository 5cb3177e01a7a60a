"""The command `imagebuild ci-matrix --unpublished`. tests/unit/build tests the other cases."""

from __future__ import annotations

import json

from imagebuild.publish.publish import unpublished_targets
from imagebuild.publish.signatures import Signer
from tests.cosign_fake import FakeCosign
from tests.publish_fakes import NEW, OLD, Site
from tests.registry_fake import index, put_image
from tests.unit.conftest import Call


def unpublished(command: Call) -> list[str]:
    status, out, _ = command("ci-matrix", "--unpublished")
    assert status == 0
    return [entry["targets"] for entry in json.loads(out)["include"]]


def test_what_is_built_is_what_is_not_published_as_it_is_now(site: Site, command: Call) -> None:
    """`OLD` is never published, and keeps nothing else from being up to date."""
    assert unpublished(command) == [OLD, NEW, OLD, NEW]
    site.ready(NEW)
    assert command("publish", "--results", str(site.evidence))[0] == 0
    assert command("ci-matrix", NEW, "--unpublished")[:2] == (0, '{"include": []}\n')
    assert unpublished(command) == [OLD, OLD]
    assert "no signature was checked" in command("ci-matrix", "--unpublished")[2]
    # Whoever may push can write the key into an index. With a signer, only the signed index under its own alias counts.
    fake, tags = FakeCosign(), site.fake.repositories["acme/tiny"].tags
    targets, trust = [site.target(NEW)], Signer("ours.pub", cosign=fake.cosign())
    assert unpublished_targets(site.renderer, targets, lambda _: site.fake, trust) == targets
    fake.signed.add((tags["latest"], "ours"))
    assert unpublished_targets(site.renderer, targets, lambda _: site.fake, trust) == []
    # An alias that something else took, a check, the lock's date, an alias that is new.
    published, tags["latest"] = tags["latest"], index(site.fake, "acme/tiny", [put_image(site.fake, "acme/tiny")])
    assert NEW in unpublished(command)
    tags["latest"] = published
    for file, old, new in (
        ("dockerfiles/components/library/component.yaml", 'It works, run: "true"', "x, run: a"),
        ("imagebuild.lock", '{"git"', '{"date": "2026-01-02", "git"'),
        ("matrix.yaml", '"{repository}/{image}:latest"', '"{repository}/{image}:newest"'),
    ):
        before = (site.files.root / file).read_text()
        site.files.replace(file, old, new)
        assert NEW in unpublished(command), file
        site.files.write(file, before)
    assert unpublished(command) == [OLD, OLD]
    # Without an alias, nothing says it.
    site.files.replace("matrix.yaml", '      - "{repository}/{image}:cuda{cuda}"\n', "")
    site.files.replace("matrix.yaml", '    aliases:\n      - "{repository}/{image}:latest"\n', "")
    assert unpublished(command) == [OLD, NEW, OLD, NEW]
