"""The environment of a job: which layer wins, and what NCCL reads."""

from __future__ import annotations

import pytest

from imagebuild.core.errors import ConfigError
from tests.unit.jobs.job_fakes import job, rank_exports

H100 = "mpijob --profile h100 --fabric ib"


def test_some_variables_can_be_overridden() -> None:
    for name in ("NCCL_NET_PLUGIN", "LD_LIBRARY_PATH", "UCX_NET_DEVICES", "NCCL_IB_HCA"):
        assert rank_exports(f"{H100} --param {name}=x")[name].startswith("x")


def test_another_value_stops_and_tells_how_to_replace_it() -> None:
    with pytest.raises(ConfigError, match=r"UCX_TLS has two values: 'tcp' .*'rc'.* write --param UCX_TLS:=rc"):
        job(f"{H100} --param UCX_TLS=rc")
    assert rank_exports(f"{H100} --param UCX_TLS:=rc")["UCX_TLS"] == "rc"


def test_what_nccl_reads() -> None:
    settings = "NCCL_IB_NET_LATENCY=50 NCCL_IB_TIMOUT=22 NCCL_ALGO=ring NCCL_TESTS_SPLIT=AND7 NCCL_OFI_X=1"
    assert list(job(f"{H100} --param {settings.replace(' ', ' --param ')}").messages)[:2] == [
        "warning: --param NCCL_IB_NET_LATENCY: NCCL 2.30.7 does not read NCCL_IB_NET_LATENCY",
        "warning: --param NCCL_IB_TIMOUT: NCCL 2.30.7 does not read NCCL_IB_TIMOUT; did you mean 'NCCL_IB_TIMEOUT'?",
    ]
