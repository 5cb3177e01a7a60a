"""Jobs that cannot be, facts with mistakes, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild import cli, cli_job
from imagebuild.errors import ConfigError
from imagebuild.fields import Model
from imagebuild.jobs import load, resolve
from imagebuild.jobs.image import Offer
from imagebuild.jobs.models import Cluster, Fabric, Feature, JobTest, NodeFacts, SchedulerFacts, Stack
from tests.conftest import ROOT
from tests.unit.job_fakes import (
    copy_of_facts,
    machines,
    request,
)


def refused(folder: Path, line: str) -> str:
    wanted = request(line)
    with pytest.raises(ConfigError) as caught:
        resolve.resolve(wanted, machines()[wanted.profile], load.load_facts(folder), Offer())
    return str(caught.value)


def test_layers_that_disagree_stop_with_both_places(tmp_path: Path) -> None:
    folder = copy_of_facts(tmp_path)
    with (folder / "features/strict.yaml").open("a") as file:
        file.write("  - {name: UCX_TLS, value: rc, why: because}\n")
    said = refused(folder, "mpijob --profile h100 --fabric ib --with strict")
    assert re.match(r".*/features/strict\.yaml:8: UCX_TLS has two values: 'tcp' .* and 'rc' .*feature strict", said)


@pytest.mark.parametrize(
    ("line", "scope", "said"),
    [
        ("slurm --profile h100 --fabric ib --with strict", "launcher", "Slurm starts ranks without one"),
        ("slurm --profile h100 --fabric ib --with strict --container none", "container", "there is no container"),
        ("mpijob --profile h100 --fabric ib --with strict", "batch", "mpijob has no batch script"),
    ],
)
def test_a_scope_without_a_place_stops(tmp_path: Path, line: str, scope: str, said: str) -> None:
    folder = copy_of_facts(tmp_path)
    with (folder / "features/strict.yaml").open("a") as file:
        file.write(f"  - {{name: SOMETHING, value: x, scope: {scope}, why: because}}\n")
    found = refused(folder, line)
    assert ".yaml:8: SOMETHING: scope" in found
    assert said in found


def test_mistakes_in_facts_have_their_line(tmp_path: Path) -> None:
    folder = copy_of_facts(tmp_path)
    (folder / "clusters/mine.yaml").write_text("title: Mine\nintreface: eth0\nfabrics:\n  ip: {}\n")
    (folder / "features/bad.yaml").write_text('title: Bad\nenv:\n  - {name: A B, value: "it\'s", why: x}\n')
    with pytest.raises(ConfigError) as caught:
        load.load_facts(folder)
    lines = str(caught.value).splitlines()
    assert any(re.search(r"mine\.yaml:2: intreface: unknown key; did you mean 'interface'\?", one) for one in lines)
    assert any(re.search(r"bad\.yaml:3: env\.0\.name", one) for one in lines)
    assert any(re.search(r"bad\.yaml:3: env\.0\.value", one) for one in lines)
    (folder / "features/bad.yaml").unlink()
    (folder / "clusters/mine.yaml").write_text("title: Mine\nfabrics:\n  ip: {}\n")
    (folder / "features/bad.yaml").write_text(
        "title: Bad\nenv:\n  - name: X\n    why: x\n    when:\n      fabirc: ib\n      nccl: '>>2'\n"
    )
    with pytest.raises(ConfigError) as caught:
        load.load_facts(folder)
    assert "bad.yaml:6: env.0.when.fabirc: no such fact; did you mean 'fabric'?" in str(caught.value)
    assert "bad.yaml:7: env.0.when.nccl: '>>2' is not a version specifier" in str(caught.value)
    (folder / "features/bad.yaml").unlink()
    (folder / "tests/all-reduce.yaml").write_text("title: x\ncollectives: [allreduce]\nmin-bytes: 1M\nmax-bytes: 1M\n")
    with pytest.raises(ConfigError, match="no 'allreduce'; did you mean 'all_reduce'"):
        load.load_facts(folder)
    with pytest.raises(ConfigError, match=r"mine\.yaml:3: fabrics\.ip: there is no such fabric"):
        load.load_facts(folder)


BAD = [
    ("mpijob --profile h101", "no profile 'h101'; did you mean 'h100'?"),
    ("mpiob --profile h100", "job mpiob: there is none; did you mean 'mpijob'?"),
    ("mpijob --profile mi300x", "nccl-tests runs on NVIDIA GPUs only"),
    ("mpijob --profile h100 --fabric rocee", "--fabric rocee: there is none; did you mean 'roce'?"),
    ("mpijob --profile h100 --cluster corewave", "did you mean 'coreweave'?"),
    ("mpijob --profile h100 --test allreduce", "did you mean 'all-reduce'?"),
    ("mpijob --profile h100 --with shrap", "--with shrap: there is none; did you mean 'sharp'?"),
    ("slurm --profile h100 --container docker", "--container docker: it is pyxis or none"),
    ("slurm --profile gb200-nvl72 --nodes 19", "take 18 (1 * 18) or 20 (2 * 10)"),
    ("slurm --profile gb200-nvl72 --nodes 2 --racks 1", "--nodes and --racks exclude each other"),
    ("slurm --profile h100 --nodes 0", "--nodes 0: at least 1"),
    ("slurm --profile h100 --racks 2", "--racks 2: NVLink of h100 ends at the node; take --nodes"),
    ("mpijob --profile h100 --fabric roce --with sharp", "--with sharp: only InfiniBand switches reduce"),
    ("mpijob --profile h100 --with sharp,gdrcopy", "the SHARP plug-in does not use GDRCopy"),
    ("mpijob --profile h100 --with sharp,noib", "SHARP is in the InfiniBand switches that noib does not use"),
    ("mpijob --profile h100 --with sharp --nodes 1", "nothing of one node passes a switch"),
    ("mpijob --profile gb200-nvl72 --with sharp", "takes a rack with NVLink across nodes for one node"),
    ("mpijob --profile h100 --with sharp --test collectives", "SHARP serves all_reduce, all_gather and reduce_scatter"),
    ("mpijob --profile h100 --with sharp --image x/hpcx:nccl2.21.5", "NCCL before 2.24 goes back to rings"),
    ("mpijob --profile gb300-nvl72 --with tuning", "NCCL has a tuner of its own from 2.30.3 on"),
    ("mpijob --profile h100 --with dra", "so there is no channel to allocate"),
    ("slurm --profile gb200-nvl72 --with dra", "it is a part of Kubernetes"),
    ("mpijob --profile gb200-nvl72 --nodes 4 --with multirack", "fit one rack; take --racks 2"),
    ("mpijob --profile h100 --fabric ethernet --with gdrcopy", "NCCL uses GDRCopy with its InfiniBand"),
    ("mpijob --profile a40 --fabric ib", "the profile's cards do neither"),
    ("mpijob --profile h100 --fabric efa", "p4d, p4de, p5, p5en"),
    ("slurm --profile a3-mega --fabric tcpxo", "its receive daemon runs beside the benchmark"),
    ("mpijob --profile h100 --fabric gib", "only A3 Ultra (H200), A4 (B200)"),
    ("mpijob --profile gb200-nvl72 --image x/y:1-amd64", "is for amd64, but gb200-nvl72 is arm64"),
    ("mpijob --profile h100 --image x_space_y", "not the name of an image"),
    ("slurm --profile h100 --container none --image x/y:1", "the programs of the nodes run, and no image"),
    ("mpijob --profile h100 --set NCCL_X=it's", 'NCCL_X: "\'" in a value'),
    ("mpijob --profile h100 --set NCCL_X=a\nb", "NCCL_X: '\\n' in a value"),
    ("mpijob --profile h100 --set NCCL_X=a\"b", "NCCL_X: '\"' in a value"),
    ("mpijob --profile h100 --set NCCL_X=$HOME", "NCCL_X: '$' in a value"),
    ("mpijob --profile h100 --set nonsense", "write it as name=value"),
    ("mpijob --profile h100 --set minuts=3", "--set minuts: no such parameter; did you mean 'minutes'?"),
    ("jobset --profile gb300-nvl72 --nodes 32 --with dra,nics,debug --test collectives", "is longer than 43; give another"),
    (f"mpijob --profile h100 --set name={'x' * 52}", "is longer than 51"),
    ("mpijob --profile h100 --set name=X", "must match"),
    ("mpijob --profile h100 --with sharp --set plugin=none", "--set plugin=none: --with sharp needs ibext"),
    ("mpijob --profile h100 --set minutes=long", "--set minutes='long': must match"),
    ("mpijob --profile h100 --set rnak:X=1", "no scope 'rnak'; did you mean 'rank'?"),
    ("slurm --profile h100 --container none --set container:X=1", "there is no container"),
    ("slurm --profile h100 --set launcher:X=1", "Slurm starts ranks without one"),
    ("mpijob --profile h100 --set batch:X=1", "mpijob has no batch script"),
    ("mpijob --profile h100 --set NCCL_NET_PLUGIN=none --set plugin=ofi --image x/hpcx:1", "no plug-in 'ofi' in it"),
    ("mpijob --profile h100 --test collectives --set min-bw=100", "reach different rates"),
    ("mpijob --profile gb300-nvl72 --with dra,debug,nics --test reduce-scatter-and-more", "there is none"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), BAD)
def test_bad_input_is_one_line_and_status_2(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("_space_", " ") for word in line.split(" ")]  # quotes and line ends are part of words
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["imagebuild", "job", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    errors = [one for one in output.err.splitlines() if one.startswith("error: ")]
    assert len(errors) == 1
    assert said in output.err


def test_the_command_writes_what_it_would_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["imagebuild", "job", "slurm", "--profile", "h100", "--set", "NCCL_FOO=1", "--with", "debug"]
    for extra in ([], ["-o", str(tmp_path / "job.sh")]):
        monkeypatch.setattr("sys.argv", [*words, *extra])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 0
    output = capsys.readouterr()
    assert (tmp_path / "job.sh").read_text() == output.out
    assert output.out.startswith("#!/bin/bash\n# imagebuild job slurm --profile h100 --fabric ib --with debug")
    assert output.err.count("does not read NCCL_FOO") == 2


MODELS = [Stack, Fabric, Feature, Cluster, JobTest, SchedulerFacts, NodeFacts]


@pytest.mark.parametrize("model", MODELS)
def test_schemas(model: type[Model], golden: Callable[[str, str], None]) -> None:
    name = model.__name__.removesuffix("Facts").removeprefix("Job").lower()
    golden(f"schemas/job-{name}.json", json.dumps(model.model_json_schema(by_alias=True), indent=1) + "\n")


def test_files_of_facts_name_their_schema() -> None:
    for file in (ROOT / "jobs").rglob("*.yaml"):
        line = file.read_text().splitlines()[0]
        found = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", line)
        assert found, file
        assert (file.parent / found[1]).resolve().is_file(), file


def test_offer_without_a_matrix_is_empty(tmp_path: Path) -> None:
    assert cli_job.offer(tmp_path / "matrix.yaml", tmp_path, tmp_path / "lock") == Offer()
