"""Ceilings: formulas against public measurements, limits of ranks and profiles, and the command `limits`."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from imagebuild.bench.ceilings import (
    NotComparable,
    RankLayout,
    class_ceilings,
    forced_classes,
    lint_profile,
    rank_layout,
)
from imagebuild.bench.models import Collective
from imagebuild.bench.profiles import load_profiles
from imagebuild.cli.app import app
from imagebuild.core.errors import ConfigError, Mistakes
from tests.conftest import ROOT, data
from tests.unit.bench.speed_fakes import BOX, every_shipped, folder, shipped


def value(collective: str, ranks: int, nodes: int, hardware: RankLayout, algorithm: str | None = None) -> float:
    """Return the ceiling of a class of algorithms. Default: the highest ceiling."""
    known = class_ceilings(collective, ranks, replace(hardware, domains=nodes))
    return max((ceiling.value for ceiling in known if algorithm in (None, ceiling.algorithm)), default=0.0)


MEASURED = data("bench/measured")


@pytest.mark.parametrize(
    ("measured", "ranks", "nodes", "network", "of_flat", "of_hierarchical"), MEASURED.values(), ids=MEASURED
)
def test_public_measurements(
    measured: float, ranks: int, nodes: int, network: float, of_flat: float, of_hierarchical: float
) -> None:
    endless = RankLayout(1, 1e9, network)  # so that only the network limits
    assert 100 * measured / value("all_reduce", ranks, nodes, endless, "ring") == pytest.approx(of_flat, abs=0.51)
    share = 100 * measured / value("all_reduce", ranks, nodes, endless, "hierarchical")
    assert share == pytest.approx(of_hierarchical, abs=0.51)


CEILINGS = data("bench/ceilings")
LAYOUTS = {name: RankLayout(**row) for name, row in CEILINGS["layouts"].items()}


@pytest.mark.parametrize(("names", "scales", "layout", "algorithm", "expected"), CEILINGS["ceilings"])
def test_ceilings_of_classes(
    names: str, scales: dict[int, int], layout: str, algorithm: str | None, expected: list[float]
) -> None:
    for name in names.split():
        found = [value(name, ranks, nodes, LAYOUTS[layout], algorithm) for ranks, nodes in scales.items()]
        assert found == pytest.approx(expected, rel=1e-4)


def test_one_rank_and_unknown_things_have_no_ceiling() -> None:
    for collective in get_args(Collective):
        assert class_ceilings(collective, 1, LAYOUTS["hgx"]) == ()
        assert class_ceilings(collective, 16, RankLayout(2, 450)) == ()
        assert class_ceilings(collective, 7, replace(LAYOUTS["hgx"], domains=2)) == ()
    assert class_ceilings("unheard-of", 8, LAYOUTS["hgx"]) == ()


@pytest.mark.parametrize(("variables", "classes"), data("bench/cases")["variables-may-force-classes"])
def test_variables_may_force_classes(variables: dict[str, str], classes: list[str]) -> None:
    assert list(forced_classes(variables)) == classes


def lint(root: Path) -> str:
    mistakes = Mistakes()
    for document in load_profiles(root).values():
        lint_profile(document, mistakes)
    return "\n".join(mistakes.texts).replace(f"{root}/", "")


def test_every_shipped_reference_is_possible() -> None:
    assert lint(ROOT / "profiles") == ""


@pytest.mark.parametrize("mistake", data("bench/profiles")["lint"], ids=str)
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
    assert "box.yaml:14: other: the profile has no rate that limits this test" in text


def layout(name: str, ranks: int, nodes: int) -> RankLayout:
    return rank_layout(shipped(name), ranks, nodes)


def test_how_ranks_use_the_hardware() -> None:
    """A rack is one domain. W counts NICs of the hosts in use, up to the GPUs' host links. Bridges may join pairs."""
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
    assert (
        "n = 16 ranks, k = 2 NVLink domains, g = 8 ranks each\nlink = 450 GB/s one way: NVLink 4 (ml-engineering"
        in text
    )
    assert "W = 400 GB/s for the network of one domain: 32 ports of 12.5 GB/s, efa (AWS EC2" in text
    assert "nvls-tree     750.0 *" in text
    assert "link * 2g(n-1)/(n(g+1)), W * k(n-1)/(n(k-1))) = min(450 * 1.667, 400 * 1.875)" in text
    # Data of gather and scatter pass through one rank: through its link and its NIC, and not through 8 links.
    assert "500.0 *       min((link + card), W * (n-1)/(n-g)) = min(500, 400 * 1.875)" in text
    assert "aws/aws-k8s-tester#503, 2024-11-05" in text
    code, text = limits_cli("gb300-nvl72", "--nodes", "2", "--domains", "2", "--gpus", "2")
    assert "4 ranks on 2 nodes\nn = 4 ranks, k = 2 NVLink domains, g = 2 ranks each" in text
    assert (code, "oracle" in text) == (0, False)  # references are of hosts in one domain


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
        "title": shipped("a100-pcie").title,
    }
    assert limits_cli("--check") == (0, f"{len(every_shipped())} profiles: every reference is below its ceiling.\n")
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
