"""Ranks in the image, started by a real Slurm whose PMIx is another version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.project import VerifyResult
from tests.docker import slurm
from tests.docker.conftest import Built, Imagebuild

pytestmark = pytest.mark.docker

RANKS = ("pmix/slurm", "ucx-distro/mpi-slurm", "openmpi-distro/sum-slurm")
"""Checks of ranks: they know Slurm's PMIx server, make a world, and add up."""


@pytest.fixture(scope="module")
def into_image(devel: Built, client: DockerClient) -> Iterator[tuple[str, dict[str, str]]]:
    """What leads into the image by srun, and the variables for that."""
    with slurm.running() as started:
        enter = started.unpack(client, devel.tag)
        yield f"exec:srun {' '.join(enter)}", {name: started.environ[name] for name in ("SLURM_CONF", "TMPDIR")}


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ("", "passed"),
        # An image whose PMIx does not hear of Slurm's, so that each rank is alone.
        (" env --unset=PMIX_NAMESPACE --unset=PMIX_RANK", "failed"),
    ],
    ids=["together", "alone"],
)
def test_verify_runs_ranks_through_srun(
    into_image: tuple[str, dict[str, str]],
    devel: Built,
    imagebuild: Imagebuild,
    tmp_path: Path,
    more: str,
    outcome: str,
) -> None:
    runner, variables = into_image
    chosen = [f"--only={check}" for check in (*RANKS, "pmix/loads", "ucx-distro/two-nodes")]
    path, status = tmp_path / "verify.json", int(outcome == "failed")
    imagebuild(
        "verify", devel.result.target, "--runner", runner + more, *chosen, "--json", path, expect=status, **variables
    )  # fmt: skip
    result = VerifyResult.model_validate_json(path.read_text())
    found = {f"{check.component}/{check.check}": check.outcome for check in result.checks}
    # The build left its image in the engine's store, which this runner does not read.
    others = {"image/same-files": "skipped", "pmix/loads": "passed", "ucx-distro/two-nodes": "skipped"}
    assert found == dict.fromkeys(RANKS, outcome) | others
