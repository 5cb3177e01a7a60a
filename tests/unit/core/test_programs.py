import pytest

from imagebuild.core import CommandError, run_program


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("subprocess.Popen", missing)
    with pytest.raises(CommandError, match="`ip` cannot be run: No such file"):
        run_program("ip", "link")
