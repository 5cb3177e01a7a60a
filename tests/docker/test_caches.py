"""What one engine compiled, another one takes from a registry."""

from __future__ import annotations

import json
from urllib.request import urlopen

import pytest

from tests.docker.conftest import SecondEngine, Tiny

pytestmark = pytest.mark.docker

TARGET = "tiny-cuda13.0-debian13-runtime"


def compiled(tiny: Tiny) -> list[str]:
    return sorted({step.stage for step in tiny.result().steps if step.stage != "image" and not step.cached})


def tags(registry: str) -> list[str]:
    with urlopen(f"http://{registry}/v2/cache/tags/list") as answer:
        return sorted(json.load(answer)["tags"])


def test_another_engine_compiles_nothing_that_the_cache_has(
    tiny: Tiny, registry: str, second_engine: SecondEngine
) -> None:
    tiny.add("library", tiny.new + "compiles: true\n")
    tiny.add(
        "tool",
        "compiles: true\nkey: [cuda]\nrequires: [library]\nbuild-requires: [library]\n",
        with_="{{ key.cuda }}",
    )
    cache = ("--cache", f"{registry}/cache")
    output = ("--output", tiny.root / "layouts")
    tiny.build(TARGET, *cache, *output)  # which has nothing yet; that is no error
    first = tiny.result()
    assert compiled(tiny) == ["library", "tool"]
    tiny.build(TARGET, *cache, "--cache-write")
    written = tags(registry)
    assert [tag.rpartition("-")[0] for tag in written] == ["library-amd64", "tool-amd64"]
    done = tiny.build(TARGET, *cache, "--cache-write")
    assert "writing" not in done.err + done.out

    tiny.build(TARGET, *cache, *output, DOCKER_HOST=second_engine.host)
    assert compiled(tiny) == []
    assert tiny.result().digest == first.digest  # with what the first engine made, at its time

    # Another version is another reference; the cache of the first one stays.
    tiny.build(TARGET, *cache, "--cache-write", "--set", f"tool=9.{tiny.nonce}")
    assert compiled(tiny) == ["tool"]
    assert set(written) < set(tags(registry))
    assert len(tags(registry)) == 3
