"""Keys of stages and steps: what must change them, and what must not."""

from typing import Any

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.render.stages import check_stages, first_mistake, needed_stages, stages_of
from tests.conftest import ROOT, data

TEXT = (ROOT / "tests/data/stages.Dockerfile").read_text()


def steps(text: str, platform: str = "linux/amd64") -> dict[str, str]:
    """`stage number` → key."""
    return {
        f"{name} {number}": key
        for name, stage in needed_stages(stages_of(text, platform)).items()
        for number, (_, key) in enumerate(stage.steps, 1)
    }


def changed(old: str, new: str, platform: str = "linux/amd64") -> set[str]:
    """Steps that a change of the text executes again."""
    assert old in TEXT
    before, after = steps(TEXT, platform), steps(TEXT.replace(old, new), platform)
    return {place for place, key in after.items() if key not in before.values()}


CHANGES = data("stages")


@pytest.mark.parametrize("row", CHANGES["steps"], ids=str)
def test_what_a_change_executes(row: dict[str, Any]) -> None:
    assert changed(row["old"], row["new"]) == set(row["executed"])


def test_platforms_have_their_own_sources_and_share_what_does_not_know_them() -> None:
    assert changed("sha256:1", "sha256:2", "linux/arm64") >= {"source-arm64 1", "image 3"}
    amd64, arm64 = steps(TEXT), steps(TEXT, "linux/arm64")
    assert {place for place in amd64 if amd64[place] == arm64.get(place)} == {"native 1"}
    text = "FROM scratch AS a\nCOPY <<EOF /f\nx\nEOF\nFROM debian\nCOPY --link --from=a / /\nRUN x\n"
    amd64, arm64 = steps(text), steps(text, "linux/arm64")
    assert [amd64[place] == arm64[place] for place in amd64] == [True, True, False]


def test_an_image_that_is_replaced_counts_as_what_replaces_it() -> None:
    def with_(**bases: str) -> str:
        return stages_of("FROM debian\nRUN x\n", "linux/amd64", bases)["stage-0"].key

    assert with_(debian="made") == with_(debian="made", other="x") != with_()


@pytest.mark.parametrize("row", CHANGES["stages"], ids=str)
def test_a_stage_s_key_follows_what_it_names_and_the_configuration_of_an_image(row: dict[str, Any]) -> None:
    before, after = (stages_of(text, "linux/amd64") for text in (TEXT, TEXT.replace(row["old"], row["new"])))
    assert {name for name in after if after[name].key != before[name].key} == set(row["others"])
    assert len({stage.key for stage in before.values()}) == len(before)


def test_what_a_stage_needs() -> None:
    stages = stages_of(TEXT, "linux/amd64")
    assert stages["image"].needs == {"native", "cross", "source-amd64", "source"}
    assert [*needed_stages(stages)] == ["native", "cross", "source-amd64", "source", "image"]
    assert [word for word, _ in stages["image"].steps] == ["WORKDIR", "RUN", "COPY", "COPY", "RUN"]


def test_heredocs_end_where_buildkit_ends_them() -> None:
    text = "FROM x\nRUN <<'A' cat; cat <<-B\nFROM y \\\nA\n\t1\n\tB\nCOPY <<EOF /f\n$X\nEOF\nRUN cat <<< EOF\nFROM z\n"
    assert [len(stage.steps) for stage in stages_of(text, "linux/amd64").values()] == [3, 0]


def test_lines_continue_where_buildkit_continues_them() -> None:
    text = "FROM x AS a\nRUN 1 \\\n\n# c\nFROM a AS b\nRUN 2\\\\\nRUN 3 \\ \t\n 4\nFROM z\nCOPY --from=a / /\n"
    assert [*stages_of(text, "linux/amd64")] == ["a", "stage-1"]
    first, changed = (stages_of(text.replace("RUN 2", run), "linux/amd64")["stage-1"] for run in ("RUN 2", "RUN evil"))
    assert first.key != changed.key
    assert first_mistake("FROM x \\\n")[1].startswith("FROM x: ends with a backslash")
    with pytest.raises(ConfigError, match="sets a variable of BuildKit"):
        check_stages("ARG TARGETARCH=evil\nFROM x", "Dockerfile.j2:1", "x")
