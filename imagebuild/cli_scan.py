"""`imagebuild scan`: arguments, help and exit status. What it does is in the package `scanning`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagebuild import cli, config, files
from imagebuild.errors import ConfigError
from imagebuild.models import Plan, Target

DEFAULT_POLICY = Path("scan-policy.yaml")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("scan")(scan_command)


def plan_of(matrix: Path, dockerfiles: Path, lock: Path) -> Plan | None:
    """The plan, for commands that also work where there is no project: None if there is no default matrix."""
    if matrix == cli.DEFAULT_MATRIX and not matrix.exists():
        return None
    return cli.prepare(matrix, dockerfiles, lock).plan


def scan_command(
    image: Annotated[
        str | None,
        typer.Argument(help="A target's id, a tag or digest in the engine or a registry, an OCI layout or archive."),
    ] = None,
    sbom: Annotated[Path | None, typer.Option("--sbom", metavar="FILE", help="Instead of an image, its SBOM.")] = None,
    scanner: Annotated[str, typer.Option("--scanner", help="auto, grype, trivy or debsecan.")] = "auto",
    database: Annotated[
        Path | None, typer.Option("--database", metavar="PATH", help="Compare with this database of the scanner.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use no network.")] = False,
    policy: Annotated[
        Path, typer.Option("--policy", metavar="FILE", help="What fails, and what is waived.")
    ] = DEFAULT_POLICY,
    platform: Annotated[str | None, typer.Option("--platform", help="Of several, this one.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result.")] = None,
    every: Annotated[bool, typer.Option("--all", help="List also what is less than high and fails nothing.")] = False,
    folder: Annotated[Path, typer.Option("--folder", help="Where builds leave layouts of targets.")] = Path("build"),
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """Look for known vulnerabilities in an image, and judge them by a policy. Exit status 1 if it fails."""
    from imagebuild.locating.resolve import NO_PLAN, Places  # noqa: PLC0415 - imports the docker SDK
    from imagebuild.scanning import command, show, subject  # noqa: PLC0415 - as above
    from imagebuild.scanning.policy import Policy, read  # noqa: PLC0415 - as above

    if (image is None) == (sbom is None):
        raise ConfigError("what to scan? give an image, or --sbom FILE")
    plan = plan_of(matrix, dockerfiles, lock)
    axes = {name: () for target in plan.targets for name in target.axes} if plan else None
    if policy == DEFAULT_POLICY and not policy.exists():
        rules = config.Document(policy, Policy(), {})
    else:
        rules = read(policy, axes)
    wish = command.Wish(scanner, database, offline)
    if sbom:
        result = command.scan(subject.of_sbom_file(sbom), rules, wish)
    else:
        assert image is not None
        with Places(plan or NO_PLAN, folder, offline).find(image) as found:
            if isinstance(found, Target):
                raise ConfigError(f"{image}: is not built, or has other versions than the plan; build it first")
            result = command.scan(subject.of_image(found.image(platform)), rules, wish)
    if json_file:
        files.write_text(json_file, result.model_dump_json(indent=1) + "\n")
    show.show(result, every=every)
    if result.verdict == "failed":
        raise typer.Exit(1)
