"""Stages that targets share run once, and a change runs only what depends on it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from docker import DockerClient

from tests.docker.conftest import Tiny

pytestmark = pytest.mark.docker

TARGETS = [f"tiny-cuda{cuda}-debian13-{variant}" for cuda in ("12.9", "13.0") for variant in ("runtime", "devel")]


def executed(tiny: Tiny, targets: Iterable[str] = TARGETS) -> set[tuple[str, str]]:
    """Compile steps of the last build that BuildKit ran: stage and name; one that targets share counts once."""
    steps = [step for target in targets for step in tiny.result(target).steps if step.stage != "image"]
    return {(step.stage, step.name) for step in steps if not step.cached}


def made(client: DockerClient, tiny: Tiny, name: str) -> dict[str, str]:
    """Target → what the component `name` left in its image, where there is one."""
    results = [tiny.result(target) for target in TARGETS]
    command = ["sh", "-c", f"cat /{name} 2> /dev/null || true"]
    texts = {r.target: client.containers.run(r.tags[0], command, remove=True).decode().strip() for r in results}
    return {target: text for target, text in texts.items() if text}


def test_each_stage_runs_once_for_all_targets(tiny: Tiny, client: DockerClient) -> None:
    plan = json.loads(tiny.imagebuild("plan", "--json", "-").out)["targets"]
    assert [t["id"] for t in plan] == TARGETS
    keys = {key for target in plan for stage, key in target["stages"].items() if stage != "image"}
    tiny.build()
    assert len(executed(tiny)) == len(keys) == 4  # library, plugin, and tool twice
    # The images say the same: what one stage made has one identity, wherever it is.
    assert len(made(client, tiny, "library")) == 4
    assert len(set(made(client, tiny, "library").values())) == 1
    assert len(set(made(client, tiny, "tool").values())) == 2
    assert len(made(client, tiny, "plugin")) == 2
    assert len(set(made(client, tiny, "plugin").values())) == 1
    tiny.build()
    assert not executed(tiny)


def test_a_folder_replaces_a_source_in_git(tiny: Tiny, client: DockerClient, tmp_path: Path) -> None:
    """What counts is what the folder holds, not where it is or when it was written."""
    tiny.from_git("https://nowhere.invalid/tool.git")

    def build(folder: str, content: str) -> set[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "main.c").write_text(f"{content} of {tiny.nonce}\n")
        tiny.build("tiny-cuda13.0*runtime", "--source", f"tool={tmp_path / folder}")
        return {stage for stage, _ in executed(tiny, TARGETS[2:3])}

    assert build("one", "first") == {"library", "tool"}
    assert build("one", "first") == set()
    assert build("two", "first") == set()
    assert build("two", "second") == {"tool"}
    assert "/nowhere.invalid" not in str(tiny.result().steps)
