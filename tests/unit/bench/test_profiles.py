"""Profiles: mistakes with file and line, `extends`, units, names of GPUs, and the references of h200."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.bench.profiles import ProfileFile, load_profiles
from imagebuild.core.errors import ConfigError
from imagebuild.report.document import Report
from tests.conftest import ROOT, data
from tests.unit.bench.speed_fakes import BOX, every_shipped, folder, shipped

SHIPPED = every_shipped()


def test_schema(golden: Callable[[str, str], None]) -> None:
    golden("schemas/profile.json", json.dumps(ProfileFile.model_json_schema(by_alias=True), indent=1) + "\n")


def test_every_reference_has_an_address() -> None:
    for profile in SHIPPED.values():
        assert [r for r in profile.model.references if not re.search(r"\w/\w|\w\.md @", r.source)] == []


@pytest.mark.parametrize(("profile", "device"), data("bench/cases")["names-of-gpus"])
def test_names_of_gpus(profile: str, device: str) -> None:
    bases = {name: d.model for name, d in SHIPPED.items() if not d.model.extends}
    assert SHIPPED[profile].model.has(device)
    if profile in bases:
        assert [name for name, model in bases.items() if model.has(device)] == [profile]


MISTAKES = data("bench/profiles")


@pytest.mark.parametrize("mistake", MISTAKES["load"], ids=str)
def test_mistakes_have_a_line(tmp_path: Path, mistake: dict[str, str]) -> None:
    assert mistake["old"] in BOX
    with pytest.raises(ConfigError) as caught:
        load_profiles(folder(tmp_path, box=BOX.replace(mistake["old"], mistake["new"], 1)))
    assert mistake["says"] in str(caught.value).replace(f"{tmp_path}/", "")


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_profiles(folder(tmp_path, one="title: 1\nextends: bxo\n", two="title: 2\n"))
    text = str(caught.value).replace(f"{tmp_path}/", "")
    assert "one.yaml:2: extends: no profile 'bxo'; did you mean 'box'?" in text
    assert "two.yaml:1: gpu: is missing" in text


def test_a_variant_with_its_own_network_keeps_what_is_within_a_node(tmp_path: Path) -> None:
    network = "network: {kind: roce, count: 4, rate: 100 Gb/s, source: me, date: 2026-02}\n"
    known = load_profiles(folder(tmp_path, cloud=f"title: Cloud\nextends: box\n{network}"))
    cloud = known["cloud"].model
    assert (cloud.name, cloud.title, cloud.gpu) == ("cloud", "Cloud", known["box"].model.gpu)
    assert [r.nodes for r in cloud.references] == [1]
    assert cloud.wires == ()
    assert cloud.network
    assert cloud.network.rate == 12.5


def test_a_variant_replaces_references_of_the_same_scale(tmp_path: Path) -> None:
    own = "  - {collective: all_reduce, ranks: 8, rate: 460 GB/s, tolerance: 1, source: me, date: 2026-02}\n"
    known = load_profiles(folder(tmp_path, cloud=f"title: Cloud\nextends: box\nreferences:\n{own}"))
    assert {(r.ranks, r.rate) for r in known["cloud"].model.references} == {(8, 460), (16, 440)}
    assert known["cloud"].model.wires


def test_extends_goes_one_level(tmp_path: Path) -> None:
    files = {"a": "title: A\nextends: box\n", "b": "title: B\nextends: a\n"}
    with pytest.raises(ConfigError, match=r"b\.yaml:2: extends: a itself extends box; extend box instead"):
        load_profiles(folder(tmp_path, **files))


def test_references_are_the_least_of_the_measured_runs() -> None:
    best = defaultdict(list)
    for file in (ROOT / "tests/data/gpu-results").glob("h200*.json"):
        for run in Report.model_validate_json(file.read_text()).runs:
            rows = [row for row in run.rows if row.size_bytes >= 1 << 30]
            halves = [half for row in rows for half in (row.out_of_place, row.in_place) if half]
            best[run.collective, run.ranks].append(max(half.busbw_gb_s or 0 for half in halves))
    ours = [reference for reference in shipped("h200").references if "docs/evidence.md" in reference.source]
    assert len(ours) == 18
    for reference in ours:
        values = best[reference.collective, reference.ranks]
        assert len(values) == 4
        assert reference.rate == pytest.approx(min(values), abs=0.06)
