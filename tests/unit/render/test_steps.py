"""Keys of steps: what must change them, and what must not."""

import itertools
from collections.abc import Mapping

import pytest

from imagebuild.project import Plan
from imagebuild.render import CacheStep, Renderer, Setting, stages, steps_of
from imagebuild.render.stages import stage_keys

TEXT = """\
ARG RELEASE=13
FROM --platform=$BUILDPLATFORM debian:$RELEASE AS native
SHELL ["/bin/bash", "-c"]
RUN one

FROM native AS cross
ARG TARGETARCH
RUN two

FROM scratch AS source-amd64
ADD https://example.org/repository.git#aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa /
FROM scratch AS source-arm64
ADD --checksum=sha256:1 https://example.org/a.tar /
FROM source-$TARGETARCH AS source

FROM cross AS unused
RUN unused

FROM debian:13 AS image
ENV A=1 B=2
WORKDIR /work
RUN --mount=type=bind,from=cross,source=/out,target=/in three
COPY --link --from=source / /source
COPY --from=native /a $A
COPY <<EOF /text
$A
EOF
RUN <<EOF
four
EOF
"""
AMD64, ARM64 = Setting("linux/amd64", "linux/amd64"), Setting("linux/arm64", "linux/amd64")


def keys(text: str, setting: Setting = AMD64) -> dict[tuple[str, int], str]:
    return {(s.stage, s.number): s.key for s in steps_of(text, setting)}


def changed(old: str, new: str, setting: Setting = AMD64) -> set[str]:
    """Steps that a change of the text executes again, as `stage number`."""
    assert old in TEXT
    before, after = keys(TEXT, setting), keys(TEXT.replace(old, new), setting)
    return {f"{stage} {number}" for (stage, number), key in after.items() if key not in before.values()}


IMAGE = {f"image {n}" for n in range(1, 7)}


@pytest.mark.parametrize(
    ("old", "new", "steps"),
    [
        ("RUN one", "RUN 1", {"native 1", "cross 1"} | IMAGE - {"image 1", "image 3"}),
        ("RUN two", "RUN 2", {"cross 1"} | IMAGE - {"image 1", "image 3"}),
        ("RUN two", "RUN \\\n# why\ntwo", set()),
        ("RUN two", "# why\nRUN two", set()),
        ("cross", "crossed", set()),
        ("RUN unused", "RUN useless", set()),
        ("four", "# four", {"image 6"}),
        ("$A\nEOF", "$B\nEOF", {"image 5", "image 6"}),
        ("A=1", "A=3", {"image 2", "image 4", "image 5", "image 6"}),
        ("B=2", "B=3", {"image 2", "image 4", "image 5", "image 6"}),
        ("/work", "/works", IMAGE - {"image 3"}),
        ('"-c"', '"-ec"', {"native 1", "cross 1"} | IMAGE - {"image 1", "image 3"}),
        ("source=/out", "source=/other", IMAGE - {"image 1", "image 3"}),
        ("target=/in", "target=/on", IMAGE - {"image 1", "image 3"}),
        ("/source", "/src", {"image 3", "image 4", "image 5", "image 6"}),
        ("https://example.org/repository.git", "https://mirror.example.org/copy.git", set()),
        ("a" * 40, "b" * 40, {"source-amd64 1", "image 3", "image 4", "image 5", "image 6"}),
        ("sha256:1", "sha256:2", set()),  # of the other platform
        ("RELEASE=13", "RELEASE=14", {"native 1", "cross 1"} | IMAGE - {"image 1", "image 3"}),
        ("debian:13 AS", "debian:14 AS", IMAGE - {"image 3"}),
    ],
)
def test_what_a_change_executes(old: str, new: str, steps: set[str]) -> None:
    assert changed(old, new) == steps


def test_the_address_of_a_file_with_a_checksum_does_not_matter_but_its_name_does() -> None:
    assert not changed("https://example.org/a.tar", "https://mirror.example.org/b/a.tar", ARM64)
    assert "source-arm64 1" in changed("a.tar", "b.tar", ARM64)
    assert "source-arm64 1" in changed("sha256:1", "sha256:2", ARM64)


def test_platforms_share_what_does_not_know_them() -> None:
    amd64, arm64 = keys(TEXT), keys(TEXT, ARM64)
    assert {place for place in amd64 if amd64[place] == arm64.get(place)} == {("native", 1)}
    known = keys(TEXT.replace("RUN one", "ARG TARGETARCH\nRUN one"))
    assert known["native", 1] != keys(TEXT.replace("RUN one", "ARG TARGETARCH\nRUN one"), ARM64)["native", 1]


def test_steps_without_programs_are_the_same_on_all_platforms() -> None:
    text = "FROM scratch AS a\nCOPY <<EOF /f\nx\nEOF\nFROM debian\nCOPY --link --from=a / /\nRUN x\n"
    amd64, arm64 = keys(text), keys(text, ARM64)
    assert [amd64[place] == arm64[place] for place in amd64] == [True, True, False]


def test_steps_after_a_linked_copy_depend_on_all_before_it() -> None:
    text = "FROM debian\nRUN one\nCOPY --link <<EOF /f\nx\nEOF\nRUN two\n"
    before, after = keys(text), keys(text.replace("one", "1"))
    assert [before[p] == after[p] for p in before] == [False, True, False]


def test_an_image_that_is_replaced_counts_as_what_replaces_it() -> None:
    def with_(bases: Mapping[str, str]) -> dict[tuple[str, int], str]:
        return keys("FROM debian@sha256:1\nRUN x\n", Setting("linux/amd64", "linux/amd64", bases))

    assert with_({"debian@sha256:1": "made"}) == with_({"debian@sha256:1": "made", "other": "x"})
    assert with_({"debian@sha256:1": "made"}) != with_({})


def test_what_link_ignores() -> None:
    text = """\
FROM x AS a
RUN a
FROM x AS b
RUN --mount=type=bind,from=a,target=/a b
FROM x
RUN --mount=type=bind,from=b,source=/out/link/b,target=/b c
"""
    setting = Setting("linux/amd64", "linux/amd64", ignores={"b": ("a",)})
    before, after = keys(text, setting), keys(text.replace("RUN a", "RUN A"), setting)
    assert [before[p] == after[p] for p in before] == [False, False, True]
    # What is ignored is executed all the same, and the stage's own change counts.
    assert ("a", 1) in before
    assert before["stage-2", 1] != keys(text.replace("/a b", "/a B"), setting)["stage-2", 1]
    assert keys(text)["stage-2", 1] != keys(text.replace("RUN a", "RUN A"))["stage-2", 1]


@pytest.mark.parametrize("setting", [AMD64, ARM64])
def test_every_line_of_every_script_counts(setting: Setting) -> None:
    """Property: what is added to any line of a needed step changes that step, and none before it in its stage."""
    lines = TEXT.splitlines()
    before = keys(TEXT, setting)
    tried = 0
    for n, line in enumerate(lines):
        if not line.startswith(("RUN", "four", "WORKDIR", "COPY")) or line.endswith(("EOF", "unused")):
            continue
        after = keys("\n".join([*lines[:n], f"{line}x", *lines[n + 1 :]]), setting)
        new = {place for place in after if after[place] != before[place]}
        assert new, line
        for stage in {stage for stage, _ in new}:
            last = max(number for name, number in before if name == stage)
            first = min(number for name, number in new if name == stage)
            linked = {("image", 3)}
            assert {(stage, number) for number in range(first, last + 1)} - linked <= new, line
        tried += 1
    assert tried == 8


def test_places_and_counts() -> None:
    steps = steps_of(TEXT, AMD64)
    assert [(s.stage, s.number, s.total) for s in steps if s.stage in ("native", "cross")] == [
        ("native", 1, 2), ("cross", 1, 1),
    ]  # fmt: skip
    assert [s.number for s in steps if s.stage == "image" and s.last_run] == [6]
    runs_on = {s.stage: s.runs_on for s in steps_of(TEXT, ARM64)}
    assert (runs_on["native"], runs_on["cross"], runs_on["image"]) == ("linux/amd64", "linux/amd64", "linux/arm64")
    assert all(isinstance(step, CacheStep) and step.title.startswith(step.word) for step in steps)


def test_keys_of_stages_follow_variables_in_from_and_the_configuration_of_an_image() -> None:
    before = stage_keys(TEXT, (AMD64, ARM64))
    for old, new, others in (
        ("a" * 40, "b" * 40, {"source-amd64", "source", "image"}),
        ("RUN two", "RUN 2", {"cross", "unused", "image"}),
        ("EOF\nRUN", 'EOF\nLABEL a="b"\nRUN', {"image"}),
    ):
        after = stage_keys(TEXT.replace(old, new), (AMD64, ARM64))
        assert {stage for stage in after if after[stage] != before[stage]} == others
    assert all(a != b for a, b in itertools.combinations(before.values(), 2))


def test_what_several_dockerfiles_share_changes_no_key(full_plan: Plan, renderer: Renderer) -> None:
    texts = [renderer.dockerfile(target).text for target in full_plan.targets[::4]]
    setting = Setting("linux/arm64", "linux/amd64")
    together = [[step.key for step in stages.steps_of(text, setting)] for text in texts]
    for text, keys in zip(texts, together, strict=True):
        stages._shared_states.clear()
        assert [step.key for step in stages.steps_of(text, setting)] == keys


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("FROM a AS base\nRUN one\n", "FROM a AS base\nRUN two\n"),  # what it starts from, through another stage
        ("ARG V=1\nFROM a:$V AS base\n", "ARG V=2\nFROM a:$V AS base\n"),
        ("FROM a AS base\nFROM b AS from-amd64\nRUN one\n", "FROM a AS base\nFROM b AS from-amd64\nRUN two\n"),
        ("FROM a AS base\nFROM b AS mounted\nRUN one\n", "FROM a AS base\nFROM b AS mounted\nRUN two\n"),
        ("FROM a AS base\nFROM b AS mounted\nRUN one\n", "FROM a AS base\n"),  # now it is an image
    ],
)
def test_the_same_stage_after_other_stages_is_another(before: str, after: str) -> None:
    rest = (
        "FROM base AS middle\nARG TARGETARCH\nRUN --mount=type=bind,from=mounted,target=/m make\n"
        "COPY --from=from-${TARGETARCH} /x /x\nFROM scratch\nCOPY --from=middle / /\n"
    )
    setting = Setting("linux/amd64", "linux/amd64")
    both = [{s.title: s.key for s in stages.steps_of(text + rest, setting)} for text in (before, after)]
    assert both[0]["COPY --from=middle / /"] != both[1]["COPY --from=middle / /"]
