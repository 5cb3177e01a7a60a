"""Keys of stages and steps: what must change them, and what must not."""

import pytest

from imagebuild.render import needed_stages, stages_of
from tests.conftest import ROOT

TEXT = (ROOT / "tests/data/stages.Dockerfile").read_text()
CROSS, IMAGE = {"cross 1"}, {"image 1", "image 2", "image 3", "image 4", "image 5"}


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


@pytest.mark.parametrize(
    ("old", "new", "executed"),
    [
        ("RUN one", "RUN 1", {"native 1"} | CROSS | IMAGE - {"image 1", "image 3"}),
        ("RUN two", "RUN 2", CROSS | IMAGE - {"image 1", "image 3"}),
        ("RUN two", "RUN \\\n# why\n\n two", set()),
        ("  three", "   three", IMAGE - {"image 1", "image 3"}),  # BuildKit keeps spaces
        ("\\\n", "\\\n# why\n", set()),
        ("RUN two", "# why\nRUN two", set()),
        ("# ---- native ----", "", set()),
        ("AS cross", "AS Cross", set()),
        ("RUN unused", "RUN useless", set()),
        ("# four", "# five", {"image 5"}),  # a comment of a script is text
        ("FROM four", "FROM five", {"image 5"}),
        ("A=1", "A=3", IMAGE - {"image 1", "image 3"}),
        ("a=b", "a=c", set()),
        ('"-c"', '"-ec"', {"native 1"} | CROSS | IMAGE - {"image 1", "image 3"}),
        ("source=/out", "source=/other", IMAGE - {"image 1", "image 3"}),
        ("/source", "/src", IMAGE - {"image 1", "image 2"}),
        ("#aaaaaaaa", "#bbbbbbbb", {"source-amd64 1", "image 3", "image 4", "image 5"}),
        ("sha256:1", "sha256:2", set()),  # of the other platform
        ("debian:13 AS image", "debian:14 AS image", IMAGE - {"image 3"}),
    ],
)
def test_what_a_change_executes(old: str, new: str, executed: set[str]) -> None:
    assert changed(old, new) == executed


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


@pytest.mark.parametrize(
    ("old", "new", "others"),
    [
        ("#aaaaaaaa", "#bbbbbbbb", {"source-amd64", "source", "image"}),
        ("RUN two", "RUN 2", {"cross", "unused", "image"}),
        ("a=b", "a=c", {"image"}),
        ("RUN two", "# why\nRUN two", set()),
    ],
)
def test_a_stage_s_key_follows_what_it_names_and_the_configuration_of_an_image(
    old: str, new: str, others: set[str]
) -> None:
    before, after = stages_of(TEXT, "linux/amd64"), stages_of(TEXT.replace(old, new), "linux/amd64")
    assert {name for name in after if after[name].key != before[name].key} == others
    assert len({stage.key for stage in before.values()}) == len(before)


def test_what_a_stage_needs() -> None:
    stages = stages_of(TEXT, "linux/amd64")
    assert stages["image"].needs == {"native", "cross", "source-amd64", "source"}
    assert [*needed_stages(stages)] == ["native", "cross", "source-amd64", "source", "image"]
    assert [word for word, _ in stages["image"].steps] == ["WORKDIR", "RUN", "COPY", "COPY", "RUN"]


def test_heredocs_end_where_buildkit_ends_them() -> None:
    text = "FROM x\nRUN <<'A' cat; cat <<-B\nFROM y \\\nA\n\t1\n\tB\nCOPY <<EOF /f\n$X\nEOF\nRUN cat <<< EOF\nFROM z\n"
    assert [len(stage.steps) for stage in stages_of(text, "linux/amd64").values()] == [3, 0]
