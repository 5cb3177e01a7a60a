"""The commands `imagebuild plan`, `render` and `ci-matrix --unpublished`. tests/unit/build tests the other cases of `ci-matrix`."""

from __future__ import annotations

import json
import shlex

from imagebuild import __version__
from imagebuild.publish.publish import unpublished_targets
from imagebuild.publish.signatures import Signer
from tests.conftest import Files
from tests.cosign_fake import FakeCosign
from tests.publish_fakes import NEW, OLD, Site
from tests.registry_fake import index, put_image
from tests.unit.conftest import Call


def test_plan_says_why_and_how_many_sources_have_no_pin(call: Call, tiny: Files) -> None:
    tiny.replace("matrix.yaml", 'tool: "3.4"', 'tool: "3.44"')
    status, printed, shown = call("plan", "--why")
    assert (status, shown) == (0, "sources without a pin: 1; `imagebuild lock tiny` completes the lock\n")
    for words in ("tiny-cuda13.0-debian13-runtime", "no-old-devel", "nobody asked for it"):
        assert words in printed


def test_the_header_has_the_command_that_makes_the_same_file_again(call: Call, tiny: Files) -> None:
    tiny.write("my more", "RUN mine")
    arguments = ["render", "tiny-cuda13.0-debian13-runtime", "--set", "library=1.3", "--append", "my more"]
    _, text, _ = call(*arguments, "--for", "standalone")
    written = next(line for line in text.splitlines() if line.startswith("# Written by"))
    assert written.startswith(f"# Written by imagebuild {__version__}, lock ")
    again = shlex.split(written.partition(":  ")[2])
    assert again == ["imagebuild", *arguments, "--for", "standalone"]
    assert call(*again[1:])[1] == text
    assert ("type=secret" in text, "type=secret" in call(*arguments)[1]) == (False, True)
    assert text.endswith("\nRUN mine\n")


def test_unresolved_prints_what_the_lock_lacks(call: Call, tiny: Files) -> None:
    tiny.lock({})
    status, _, complaint = call("render", "tiny-cuda13.0-debian13-runtime")
    assert (status, "or print the Dockerfile with --unresolved" in complaint) == (2, True)
    status, text, _ = call("render", "tiny-cuda13.0-debian13-runtime", "--unresolved")
    assert (status, "debian:13-slim@sha256:unresolved" in text) == (0, True)
    assert text.startswith("# This cannot be built yet. imagebuild.lock: 2 of 2 sources have no pin, so they cannot")


def test_another_base_of_the_same_release(call: Call) -> None:
    _, text, _ = call("render", "tiny-cuda13.0-debian13-runtime", "--base-image", "debian:13.7-slim")
    assert "FROM debian:13.7-slim AS image\n" in text
    status, _, complaint = call("render", "tiny-cuda13.0-debian13-runtime", "--base-image", "x\nRUN y")
    assert (status, "not an image" in complaint) == (2, True)


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
