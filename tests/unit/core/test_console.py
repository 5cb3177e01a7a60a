from imagebuild.core import markdown_table


def test_a_markdown_table_keeps_its_cells_apart() -> None:
    rows = [("a|b", "two\nlines"), (r"has\|one", r"ends in \\|"), ("", "")]
    assert markdown_table(("x", "y|z"), rows).splitlines() == [
        r"| x | y\|z |",
        "| --- | --- |",
        r"| a\|b | two lines |",
        r"| has\|one | ends in \\\| |",
        "|  |  |",
    ]
