"""How an image is pulled by what. Pure.

Texts have `{ref}`, `:tag` or `@sha256:…`, and `{enroot}`, the same as enroot takes it. The page of the picker fills
them in itself, so there is nothing else in them that varies.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagebuild.jobs.slurm import enroot


@dataclass(frozen=True)
class Command:
    """A way to get an image."""

    title: str
    text: str


def templates(repository: str) -> tuple[Command, ...]:
    """The commands for a repository, which is named with its registry."""
    apart = enroot(repository)
    name = repository.rpartition("/")[2]
    return (
        Command("Docker", f"docker pull {repository}{{ref}}"),
        Command("enroot", f"enroot import -o {name}.sqsh {apart}{{enroot}}"),
        Command("Apptainer", f"apptainer pull {name}.sif docker://{repository}{{ref}}"),
        Command("Slurm, pyxis", f"srun --mpi=pmix --container-image={apart.removeprefix('docker://')}{{enroot}} bash"),
        Command("Kubernetes", f"kubectl run {name} --rm -it --restart=Never --image={repository}{{ref}} -- bash"),
        Command("Dockerfile", f"FROM {repository}{{ref}}"),
        Command("Benchmark", f"imagebuild job mpijob --profile h100 --image {repository}{{ref}}"),
    )


def filled(text: str, reference: str) -> str:
    """A command for `:tag` or `@sha256:…`. enroot 3 and 4.0 take a digest where a tag stands, and not after an `@`."""
    return text.replace("{ref}", reference).replace("{enroot}", reference.replace("@", ":"))


def of(repository: str, reference: str) -> tuple[Command, ...]:
    """The commands for one image."""
    return tuple(Command(one.title, filled(one.text, reference)) for one in templates(repository))
