"""What is kept of an environment and of command lines, without secrets."""

import pytest

from imagebuild.core.console import kept_environment, redacted_arguments
from tests.conftest import data


@pytest.mark.parametrize(("value", "kept"), data("secrets").items())
def test_secrets_are_blanked_by_what_they_look_like(value: str, kept: str) -> None:
    assert kept_environment({"NCCL_X": value}) == {"NCCL_X": kept}


def test_what_explains_a_measurement_is_kept_and_nothing_else() -> None:
    variables = {
        "PATH": "/usr/local/cuda/bin:/usr/bin:/bin", "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1", "UCX_TLS": "rc,cuda_copy,cuda_ipc", "OMPI_MCA_btl": "^openib",
        "NVIDIA_VISIBLE_DEVICES": "GPU-8a56a4bc-06f9-f4e9-4d6c-0123456789ab", "SLURM_JOB_NODELIST": "node[001-004]",
    }  # fmt: skip
    others = {"GITHUB_TOKEN": "x", "DB_PASSWORD": "x", "SLURM_JWT": "x", "OLDPWD": "/", "EDITOR": "vi"}
    assert kept_environment(variables | others) == variables


def test_arguments_lose_the_values_of_secret_options() -> None:
    argv = ["kubectl", "--token", "abc", "--password=x", "-n", "team", "exec", "pod", "--", "bash", "-c", "echo $TOKEN"]
    assert redacted_arguments(argv) == (
        "kubectl", "--token", "(redacted)", "--password=(redacted)", "-n", "team", "exec", "pod", "--", "bash", "-c",
        "echo $TOKEN",
    )  # fmt: skip
