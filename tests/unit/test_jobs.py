"""Jobs from facts: what layers, features, images and parameters do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from imagebuild.errors import ConfigError
from imagebuild.jobs import resolve
from imagebuild.jobs.image import Offer
from imagebuild.jobs.lint import default, nearest
from imagebuild.jobs.merge import of
from imagebuild.jobs.models import COLLECTIVES, CONDITIONS, OVERRIDABLE
from imagebuild.jobs.resolve import Job
from imagebuild.jobs.slurm import enroot
from imagebuild.models import Plan
from tests.unit.job_fakes import IMAGE, exports, facts, job, machines, messages, places, rank_script, request, text

NEW = [
    "slurm --profile h200 --fabric ib",
    "mpijob --profile h200 --fabric ib --with sharp",
    "mpijob --profile gb200-nvl72 --fabric ib --racks 1 --with dra",
    "mpijob --profile gb200-nvl72 --fabric ib --racks 2 --with dra",
    "slurm --profile gb200-nvl72 --fabric ib --racks 2",
    "slurm --profile gb300-nvl72 --fabric ib --racks 2 --with sharp",
    "slurm --profile gb200-nvl72 --fabric ib --nodes 16 --container none",
    "jobset --profile h100 --fabric roce",
    "mpijob --profile h100 --fabric roce --with gdrcopy",
    "slurm --profile a100-sxm --fabric ib --with sharp",
    "slurm --profile a40 --fabric ethernet",
    "mpijob --profile p5 --fabric efa --image example.com/efa:1",
    "mpijob --profile a3-mega --fabric tcpxo",
    "jobset --profile a4 --fabric gib",
    "slurm --profile a4 --fabric gib",
    "mpijob --profile gh200 --fabric ethernet",
    "mpijob --profile gb300-nvl72 --fabric roce --racks 1 --with nics --image example.com/hpcx:nccl2.29.2",
    "mpijob --profile gb300-nvl72 --fabric roce --racks 2 --with tuning --image example.com/hpcx:nccl2.29.2",
]  # fmt: skip


@pytest.mark.parametrize("line", NEW)
def test_combinations_that_the_reference_lacks(line: str) -> None:
    assert text(line)


def test_segments_and_racks() -> None:
    two = text("slurm --profile gb200-nvl72 --fabric ib --racks 2")
    assert "#SBATCH --nodes=36\n" in two
    assert "#SBATCH --segment=18\n" in two
    uneven = text("slurm --profile gb200-nvl72 --fabric ib --nodes 32")
    assert "#SBATCH --segment=16\n" in uneven
    assert "#SBATCH --segment=4\n" in text("slurm --profile gb200-nvl72 --fabric ib --nodes 4")
    spare = text("slurm --profile gb200-nvl72 --fabric ib --racks 1 --set rack-nodes=16")
    assert "#SBATCH --nodes=16\n" in spare
    assert "#SBATCH --segment" not in text("slurm --profile h100 --fabric ib")


def test_efa_asks_for_as_many_cards_as_the_node_has() -> None:
    document = yaml.safe_load(text("mpijob --profile p5 --fabric efa --image example.com/efa:1"))
    container = document["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert "export NCCL_NET_PLUGIN=ofi" in rank_script(
        text("mpijob --profile p5 --fabric efa --image example.com/efa:1")
    )


def test_the_host_chooses_the_plug_in_and_says_what_it_wants_first() -> None:
    script = re.sub("(?m)^ *", "", rank_script(text("jobset --profile a4 --fabric gib")))
    assert script.splitlines()[1] == ". /usr/local/gib/scripts/set_nccl_env.sh"
    assert "NCCL_NET_PLUGIN" not in exports(script)


def test_the_library_path_reaches_ranks_under_all_schedulers() -> None:
    for scheduler in ("mpijob", "jobset", "slurm"):
        made = text(f"{scheduler} --profile h100 --fabric roce --set plugin=spcx")
        value = exports(rank_script(made))["LD_LIBRARY_PATH"]
        assert value == ["/opt/hpcx/nccl_spectrum-x_plugin/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"]
        assert ("-x LD_LIBRARY_PATH" in made) == (scheduler != "slurm")


def test_user_variables_land_in_the_scope_they_name() -> None:
    made = text("slurm --profile h100 --fabric ib --set container:NVIDIA_GDRCOPY=enabled --set batch:TMPDIR=/scratch")
    found = places(made)
    assert found["container"] == {"NVIDIA_GDRCOPY": ["enabled"]}
    assert found["batch"] == {"TMPDIR": ["/scratch"]}


def test_names_that_may_be_set_anew_are_four() -> None:
    assert len(OVERRIDABLE) == 4
    made = job("mpijob --profile h100 --fabric ib --set NCCL_IB_HCA==mlx5_0,mlx5_3")
    assert next(one.value for one in made.env if one.entry.name == "NCCL_IB_HCA") == "=mlx5_0,mlx5_3"


def test_another_value_stops_and_says_how_to_insist() -> None:
    line = "mpijob --profile h100 --fabric ib --set UCX_TLS{}=rc"
    with pytest.raises(ConfigError, match=r"UCX_TLS has two values: 'tcp' .*'rc'.* write --set UCX_TLS:=rc"):
        job(line.format(""))
    assert [one.value for one in job(line.format(":")).env if one.entry.name == "UCX_TLS"] == ["rc"]


def test_lint_knows_names_and_defaults() -> None:
    base = "mpijob --profile h100 --fabric ib"
    assert messages(base) == []
    assert messages(f"{base} --set NCCL_IB_NET_LATENCY=50") == [
        "warning: --set NCCL_IB_NET_LATENCY: NCCL 2.28.3 does not read NCCL_IB_NET_LATENCY"
    ]
    assert "did you mean 'NCCL_IB_TIMEOUT'" in messages(f"{base} --set NCCL_IB_TIMOUT=22")[0]
    assert messages(f"{base} --set NCCL_SHM_DISABLE=0") == [
        "note: --set NCCL_SHM_DISABLE: NCCL_SHM_DISABLE=0 is the default of NCCL 2.28.3"
    ]
    assert messages(f"{base} --set NCCL_TESTS_SPLIT=AND7 --set NCCL_OFI_X=1") == []


def test_lint_knows_releases() -> None:
    old, new = "example.com/hpcx:nccl2.26.2", "example.com/hpcx:nccl2.28.3"
    line = "mpijob --profile h100 --fabric ib --set NCCL_NET_GDR_C2C=1 --image "
    assert messages(line + old) == []
    assert messages(line + new) == ["note: --set NCCL_NET_GDR_C2C: NCCL_NET_GDR_C2C=1 is the default of NCCL 2.28.3"]
    gone = messages(f"mpijob --profile h100 --fabric ib --set NCCL_PROXY_PROFILE=x --image {new}")
    assert "releases 2.21.5 to 2.22.3 do" in gone[0]
    assert messages("mpijob --profile h100 --fabric ib --image example.com/x:1") == [
        "note: which NCCL runs is not known, so 2.30.7 is assumed; say it with --nccl"
    ]


def test_lint_says_where_it_looked_up_another_release() -> None:
    line = "mpijob --profile h100 --fabric ib --set NCCL_FOO=1 --image example.com/hpcx:nccl2.32.3"
    assert messages(line)[1:] == [
        "note: the image has NCCL 2.32.3; 2.30.7 is the nearest release that the table of names has"
    ]


def test_the_table_of_parameters() -> None:
    table = facts().parameters
    assert nearest(table, "2.99.1") == "2.30.7"
    assert nearest(table, "2.28.5") == "2.28.3"
    assert nearest(table, "2.1.0") == "2.21.5"
    assert default(table, "NCCL_NET_GDR_C2C", "2.26.2") == "0"
    assert default(table, "NCCL_P2P_NET_CHUNKSIZE", "2.30.7") == "131072"
    assert default(table, "NCCL_ALGO", "2.30.7") is None
    assert table.names["NCCL_IB_HCA"].documented
    assert not table.names["NCCL_GDRCOPY_ENABLE"].documented
    assert len(table.names) > 250


def offer(plan: Plan, project: Any) -> Offer:
    provides = {name: document.model.provides for name, document in project.components.items()}
    return Offer(plan.targets, provides, project.matrix.model.gpu_architectures)


def chosen(line: str, offer: Offer) -> Job:
    wanted = request(line)
    plain = type(wanted)(**{**wanted.__dict__, "image": None if wanted.image == IMAGE else wanted.image})
    return resolve.resolve(plain, machines()[plain.profile], facts(), offer)


def test_without_image_the_newest_that_fits(full_plan: Plan, project: Any) -> None:
    have = offer(full_plan, project)
    found = chosen("mpijob --profile h100 --fabric ib", have).image
    assert found.reference == next(t for t in full_plan.targets if t.id == "hpcx-cuda13.4.2-ubuntu26.04-runtime").name
    assert found.nccl == project.matrix.model.versions["nccl"][0].version
    assert found.arches == ("amd64", "arm64")
    (note,) = chosen("mpijob --profile h100 --fabric ib", have).messages
    assert note.endswith("needs driver 580 or later; if the nodes' is older, say so with --set driver=…")
    assert chosen("mpijob --profile h100 --fabric ib --set driver=580.65", have).messages == ()
    older = chosen("mpijob --profile h100 --fabric ib --set driver=570", have).image
    assert "cuda12.9.2" in older.reference
    with pytest.raises(ConfigError, match="runs on driver 500; give one with --image"):
        chosen("mpijob --profile h100 --fabric ib --set driver=500", have)
    with pytest.raises(ConfigError, match="has the plug-in 'ofi'; give one with --image"):
        chosen("mpijob --profile p5 --fabric efa", have)


def test_images_of_the_plan_are_known_by_id_and_tag(full_plan: Plan, project: Any) -> None:
    have = offer(full_plan, project)
    by_id = chosen("mpijob --profile h100 --fabric ib --image open-cuda13.5-debian13-runtime", have)
    target = next(t for t in full_plan.targets if t.id == "open-cuda13.5-debian13-runtime")
    assert by_id.image.reference == target.name
    assert {"OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_plm_ssh_args"} <= {e.entry.name for e in of(by_id.env, "launcher")}
    by_tag = chosen(f"mpijob --profile h100 --fabric ib --image {target.aliases[0]}", have)
    assert by_tag.image.reference == target.aliases[0]
    assert by_tag.image.nccl == by_id.image.nccl
    with pytest.raises(ConfigError, match="no plug-in 'ibext' in it; known: none|no plug-in 'ibext' in it"):
        chosen("mpijob --profile h100 --fabric ib --with sharp --image open-cuda13.5-debian13-runtime", have)


def test_enroot_sets_the_registry_off() -> None:
    assert enroot("ghcr.io/team/image:1") == "docker://ghcr.io#team/image:1"
    assert enroot("localhost:5000/image:1") == "docker://localhost:5000#image:1"
    assert enroot("team/image:1") == "docker://team/image:1"


def test_collect_says_how_the_result_comes_back() -> None:
    for scheduler in ("mpijob", "jobset", "slurm"):
        plain = text(f"{scheduler} --profile h100 --fabric ib")
        asked = text(f"{scheduler} --profile h100 --fabric ib --collect")
        extra = set(asked.splitlines()) - set(plain.splitlines())
        assert any("imagebuild report all-reduce-64-h100-ib-8n" in one for one in extra)
        assert all(one.startswith("# ") for one in extra)


def test_speed_is_judged_only_by_numbers_about_the_job() -> None:
    def judged(line: str) -> tuple[bool, bool]:
        made = text(f"slurm {line}")
        return "--profile " in made.split("set -uo pipefail")[1], "NCCL_TESTS_MIN_BW" in exports(rank_script(made))

    assert judged("--profile gb300-nvl72 --fabric ib --nodes 16") == (True, True)
    assert judged("--profile gb300-nvl72 --fabric ib --nodes 16 --with debug") == (True, True)
    assert judged("--profile gb300-nvl72 --fabric ib --nodes 17") == (True, False)
    assert judged("--profile gb300-nvl72 --fabric ib --nodes 16 --test latency") == (True, False)
    assert judged("--profile gb300-nvl72 --fabric ib --nodes 16 --with nics") == (False, False)
    assert judged("--profile gb300-nvl72 --fabric roce --nodes 16") == (False, False)
    assert judged("--profile h100 --fabric ethernet") == (False, False)
    assert judged("--profile a4 --fabric gib") == (True, False)
    assert judged("--profile a40 --fabric ethernet") == (True, False)


def test_the_least_bandwidth_is_the_profiles_threshold_or_the_users() -> None:
    line = "mpijob --profile gb300-nvl72 --fabric ib --nodes 16"
    reference = machines()["gb300-nvl72"].thresholds["all_reduce", 64, 16]
    assert exports(rank_script(text(line)))["NCCL_TESTS_MIN_BW"] == [f"{reference:.1f}"]
    assert exports(rank_script(text(f"{line} --set min-bw=500")))["NCCL_TESTS_MIN_BW"] == ["500"]


def test_conditions_can_ask_about_exactly_what_there_is() -> None:
    made = job("slurm --profile h100 --fabric ib")
    assert set(made.choices.facts(facts().features)) == {*CONDITIONS, *COLLECTIVES, *facts().features}
