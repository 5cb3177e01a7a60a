"""Profiles: mistakes with file and line, `extends`, units, limits, and that every shipped reference is possible."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imagebuild.bench.ceilings import NotComparable, RankLayout, lint_profile, rank_layout
from imagebuild.bench.profiles import ProfileFile, load_profiles
from imagebuild.cli.app import app
from imagebuild.core.errors import ConfigError, Mistakes
from imagebuild.report.document import Report
from tests.conftest import ROOT, data
from tests.unit.bench.speed_fakes import BOX, every_shipped, folder, shipped

SHIPPED = every_shipped()


def lint(root: Path) -> str:
    mistakes = Mistakes()
    for document in load_profiles(root).values():
        lint_profile(document, mistakes)
    return "\n".join(mistakes.texts).replace(f"{root}/", "")


def test_schema(golden: Callable[[str, str], None]) -> None:
    golden("schemas/profile.json", json.dumps(ProfileFile.model_json_schema(by_alias=True), indent=1) + "\n")


def test_every_shipped_reference_is_possible() -> None:
    assert lint(ROOT / "profiles") == ""


def test_every_reference_has_an_address() -> None:
    for profile in SHIPPED.values():
        assert [r for r in profile.model.references if not re.search(r"\w/\w|\w\.md @", r.source)] == []


@pytest.mark.parametrize(
    ("profile", "device"),
    [
        ("a100-sxm", "A100-SXM4-40GB"), ("a100-pcie", "NVIDIA A100-PCIE-40GB"), ("a100-pcie", "NVIDIA A100 80GB PCIe"),
        ("h100", "NVIDIA H100 80GB HBM3"), ("h200", "NVIDIA H200"), ("b200", "NVIDIA B200"), ("b300", "NVIDIA B300 SXM6 AC"),
        ("gb200-nvl72", "NVIDIA GB200"), ("gh200", "NVIDIA GH200 120GB"), ("mi300x", "AMD Instinct MI300X"), ("p5en", "NVIDIA H200"),
    ],
)  # fmt: skip
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
    with pytest.raises(ConfigError, match=r"b\.yaml:2: extends: a extends box; name box"):
        load_profiles(folder(tmp_path, **files))


@pytest.mark.parametrize("mistake", MISTAKES["lint"], ids=str)
def test_lint(tmp_path: Path, mistake: dict[str, str]) -> None:
    assert mistake["old"] in BOX
    assert mistake["says"] in lint(folder(tmp_path, box=BOX.replace(mistake["old"], mistake["new"])))


def test_lint_of_what_a_variant_takes_over(tmp_path: Path) -> None:
    slow = "links: [{kind: PCIe, gpus: 8, rate: 31 GB/s, source: me, date: 2026-02}]\n"
    assert "slow.yaml:2: all_reduce on 8 ranks" in lint(folder(tmp_path, slow=f"title: S\nextends: box\n{slow}"))


def test_lint_of_copies(tmp_path: Path) -> None:
    copies = "copies:\n  - {tests: [host_to_device_memcpy_ce, other], rate: 64 GB/s, source: me, date: 2026-02}\n"
    text = lint(folder(tmp_path, box=BOX + copies))
    assert (
        "box.yaml:14: host_to_device_memcpy_ce: 64 GB/s is not below the ceiling, 63.0 GB/s (PCIe 5, one way)" in text
    )
    assert "box.yaml:14: other: the profile has no rate that limits it" in text


def layout(name: str, ranks: int, nodes: int) -> RankLayout:
    return rank_layout(shipped(name), ranks, nodes)


def test_how_ranks_use_the_hardware() -> None:
    """A rack is one domain; cards are those of the hosts in use, no more than GPUs can feed; pairs may be bridged."""
    assert [layout("gb200-nvl72", 4 * n, n).domains for n in (1, 18, 36, 360)] == [1, 1, 2, 20]
    rack = layout("coreweave-gb200", 144, 36)
    assert (rack.network, rack.link) == (18 * 200, 900)
    assert [layout("h100", n, 2).network for n in (16, 2)] == [400, 63]
    assert layout("a40", 16, 2).network is None
    assert [layout("a100-pcie", n, 1).link for n in (2, 4)] == [300, 31]
    assert [layout("mi300x", n, 1).link for n in (2, 4, 8)] == [64, 192, 448]


@pytest.mark.parametrize(("name", "ranks", "nodes"), [("h100", 9, 1), ("h100", 7, 2), ("gb200-nvl72", 76, 19)])
def test_ranks_that_do_not_fit_the_hardware(name: str, ranks: int, nodes: int) -> None:
    with pytest.raises(NotComparable, match="do not fit|do not divide evenly"):
        layout(name, ranks, nodes)


@pytest.fixture
def limits_cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.chdir(ROOT)

    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["limits", *arguments])
        if isinstance(result.exception, ConfigError):
            return result.exception.exit_code, str(result.exception)
        return result.exit_code, result.output

    return call


def test_limits_prints_a_table(limits_cli: Callable[..., tuple[int, str]]) -> None:
    code, text = limits_cli("p5", "--nodes", "2")
    assert code == 0
    assert "n = 16 ranks, k = 2 NVLink domains, g = 8 ranks each; link = 450 GB/s one way; W = 400 GB/s" in text
    assert "nvls-tree     750.0 *" in text
    assert "aws/aws-k8s-tester#503, 2024-11-05" in text


def test_limits_as_json(limits_cli: Callable[..., tuple[int, str]]) -> None:
    code, text = limits_cli("h200", "--json", "-")
    rows = {(row["test"], row["algorithm"]): row for row in json.loads(text)}
    nvls, ring = (rows["all_reduce", name] for name in ("nvls", "ring"))
    assert (code, nvls["nodes"], nvls["ranks"]) == (0, 1, 8)
    assert (nvls["ceiling"], nvls["hardest"], nvls["rate"], ring["rate"]) == (700, True, 482.26, 367.61)
    assert rows["RDMA_Write BW, host memory", ""]["ceiling"] == 50.0


def test_limits_lists_and_checks(limits_cli: Callable[..., tuple[int, str]]) -> None:
    assert "HGX H200" in limits_cli()[1]
    assert json.loads(limits_cli("--json", "-")[1])[0] == {
        "profile": "a100-pcie",
        "title": SHIPPED["a100-pcie"].model.title,
    }
    assert limits_cli("--check") == (0, f"{len(SHIPPED)} profiles: every reference is below its ceiling.\n")
    assert limits_cli("--check", "--json", "-") == (0, "[]\n")


def test_limits_that_fail(limits_cli: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert limits_cli("h20") == (2, "no profile 'h20'; did you mean 'h200'?")
    assert limits_cli("gb200-nvl72", "--nodes", "19")[0] == 2
    assert limits_cli("--nodes", "2")[0] == 2
    assert limits_cli("--check", "--nodes", "2")[0] == 2
    bad = folder(tmp_path, box=BOX.replace("rate: 480", "rate: 800"))
    code, text = limits_cli("--check", "--profiles", str(bad))
    assert code == 1
    assert "box.yaml:9: all_reduce on 8 ranks, 1 node: 800 GB/s is not below" in text


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
