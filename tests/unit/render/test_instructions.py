"""Dockerfiles as BuildKit's frontend reads them."""

import pytest

from imagebuild.render import expand, parse


def test_lines_are_joined_without_comments() -> None:
    (stage,) = parse("# head\nFROM x AS A\nRUN one \\\n# why\n\n  two\n").stages
    assert (stage.name, stage.base, stage.platform) == ("a", "x", "")
    assert [i.text for i in stage.instructions] == ["one   two"]


def test_heredocs_belong_to_their_instruction() -> None:
    text = "FROM x\nRUN <<'A' cat; cat <<-B\n# kept\nFROM y \\\nA\n\t1\n\tB\nCOPY --chmod=755 <<EOF /f\n$X\nEOF\nRUN cat <<< EOF\n"
    (stage,) = parse(text).stages
    run, copy, last = stage.instructions
    assert [(h.text, h.literal) for h in run.heredocs] == [("# kept\nFROM y \\", True), ("1", False)]
    assert [(h.text, h.literal) for h in copy.heredocs] == [("$X", False)]
    assert copy.flag("chmod") == "755"
    assert not last.heredocs
    assert stage.name == "stage-0"


def test_from_with_platform_and_global_arguments() -> None:
    parsed = parse("ARG V=1\nFROM --platform=$BUILDPLATFORM x:$V as Base\nFROM base\n")
    assert [i.text for i in parsed.arguments] == ["V=1"]
    assert (parsed.stages[0].platform, parsed.stages[0].base) == ("$BUILDPLATFORM", "x:$V")
    assert parsed.names == {"0": 0, "base": 0, "1": 1}


@pytest.mark.parametrize(
    ("text", "result"),
    [("$A-${A}", "1-1"), ("${B:-$A}", "1"), ("${A:-2}", "1"), ("${A:+3}", "3"), ("${B:+3}", ""), ("$B", "")],
)
def test_expand(text: str, result: str) -> None:
    assert expand(text, {"A": "1"}) == result
