"""Mistakes in the facts of `jobs/`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.jobs.load import load_facts
from tests.conftest import ROOT
from tests.unit.jobs.job_fakes import copy_of_facts


def test_values_of_clusters_are_refused_with_line_and_reason(tmp_path: Path) -> None:
    """Values that Kubernetes, sbatch or a job could not use, each in a cluster of its own; all are reported at once."""
    folder = copy_of_facts(tmp_path)
    contents = (ROOT / "tests/data/refused-clusters.txt").read_text().splitlines()
    for number, content in enumerate(contents):
        (folder / f"clusters/c{number}.yaml").write_text(f"title: Mine\n\n{content}\n")
    found = errors(folder).splitlines()
    for number, content in enumerate(contents):
        key = content.partition(":")[0]
        lines = [line for line in found if f"/clusters/c{number}.yaml:" in line]
        assert lines, content
        assert all(re.match(rf".*/c{number}\.yaml:(3|1): {key}[.:]", line) for line in lines), lines
    assert not re.search(r"pattern|instance of|a (dict|str|tuple)", "".join(found))


def errors(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_facts(folder)
    return str(caught.value)


def test_a_folder_without_facts(tmp_path: Path) -> None:
    assert f"{tmp_path}/stacks: this folder contains no *.yaml file; name a complete copy" in errors(tmp_path)
