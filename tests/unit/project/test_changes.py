from imagebuild.project.changes import parse_changes


def test_the_command_that_pins_what_changes_need() -> None:
    changes = parse_changes(["tool=4", "cuda=13.1"], with_=["extra"], repository="r.test/x")
    assert changes.lock_command("tiny") == "imagebuild lock tiny --set tool=4 --set cuda=13.1 --with extra"
