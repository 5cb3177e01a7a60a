"""An engine uses compiled stages from a cache in a registry that another engine filled."""

from __future__ import annotations

import pytest

from imagebuild.oci.registry import connect_registry
from tests.docker.conftest import TINY_TARGET, SecondEngine, Tiny

pytestmark = pytest.mark.docker


def compiled(tiny: Tiny) -> list[str]:
    return sorted({step.stage for step in tiny.result().steps if step.stage != "image" and not step.cached})


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
    tiny.build(TINY_TARGET, *cache, *output)  # a missing cache is not an error
    first = tiny.result()
    assert compiled(tiny) == ["library", "tool"]
    tiny.build(TINY_TARGET, *cache, "--cache-write")
    place = connect_registry(registry).at("cache")
    written = place.tags()
    assert sorted(tag.rpartition("-")[0] for tag in written) == ["library-amd64", "tool-amd64"]
    done = tiny.build(TINY_TARGET, *cache, "--cache-write")
    assert f"no cache was written: {registry}/cache has all 2 caches already" in done.err + done.out

    tiny.build(TINY_TARGET, *cache, *output, DOCKER_HOST=second_engine.host)
    assert compiled(tiny) == []
    assert tiny.result().digest == first.digest  # the output of the first engine, with its times

    # Another version has another cache reference; the cache of the first version stays.
    tiny.build(TINY_TARGET, *cache, "--cache-write", "--set", f"tool=9.{tiny.nonce}")
    assert compiled(tiny) == ["tool"]
    assert set(written) < set(place.tags())
    assert len(place.tags()) == 3
