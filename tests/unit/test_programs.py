import pytest

from imagebuild import programs
from imagebuild.errors import CommandError


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("subprocess.Popen", missing)
    with pytest.raises(CommandError, match="`ip` cannot be run: No such file"):
        programs.run("ip", "link")
