"""The options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from imagebuild.cli.app import load_command
from imagebuild.oci.attestation import DEFAULT_KINDS, KINDS
from tests.conftest import data
from tests.unit.conftest import Call


def test_without_a_matrix_the_shipped_one_is_named(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    status, text, complaint = call("plan", "quickstart", "--json", "-")
    assert (status, json.loads(text)["targets"][0]["image"]) == (0, "quickstart")
    assert complaint.startswith(f"{tmp_path}/empty has no matrix.yaml, so these are the images that come with")
    assert complaint.count("\n") == 1
    assert "has no matrix.yaml" not in call("plan", "--project", tmp_path)[2]


@pytest.mark.parametrize(("line", "names"), data("completions").items())
def test_a_shell_completes_commands_and_names_of_the_project(
    call: Call, monkeypatch: pytest.MonkeyPatch, line: str, names: list[str]
) -> None:
    monkeypatch.setenv("_IMAGEBUILD_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"imagebuild {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
    assert call()[1].splitlines()[: len(names)] == [f"plain,{name}" for name in names]


@pytest.mark.programs
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_asks_for_names(command: Call, shell: str) -> None:
    status, script, _ = command("--show-completion", shell)
    assert (status, f"_IMAGEBUILD_COMPLETE={shell}_complete" in script) == (0, True)


def test_an_option_with_one_value_is_given_once(call: Call) -> None:
    status, _, complaint = call("plan", "--registry", "r.test/a", "--registry=r.test/b")
    assert (status, complaint) == (2, "error: --registry: given twice; remove one of the two\n")
    assert call("plan", "--why", "--why")[0] == 0


def test_the_kinds_of_attachments_in_the_table_of_options_are_those_of_registries() -> None:
    attest = load_command("attest")
    assert isinstance(attest, click.Group)
    options = {option.name: option for name in ("add", "verify") for option in attest.commands[name].params}
    assert options["kind"].to_info_dict()["type"]["choices"] == tuple(KINDS)
    assert ",".join(DEFAULT_KINDS) in str(options["require"].help)
