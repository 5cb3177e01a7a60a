"""`imagebuild attest`: arguments, help and exit status. What it does is in the package `attest`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from imagebuild import cli, console, files
from imagebuild.attachments import KINDS
from imagebuild.config import suggestion
from imagebuild.console import out
from imagebuild.errors import ConfigError
from imagebuild.registry.reference import parse
from imagebuild.report.clean import one_line

if TYPE_CHECKING:
    from imagebuild.attest.judge import Checkout
    from imagebuild.attest.models import AttestResult
    from imagebuild.registry.client import Client

app = typer.Typer(no_args_is_help=True, help="What refers to a published image: SBOM, provenance, results, signatures.")

ImageArgument = Annotated[str, typer.Argument(metavar="REF", help="An image of a registry: a tag, or a digest.")]
PlatformOption = Annotated[str | None, typer.Option("--platform", help="Of several, this one.")]
KindOption = Annotated[str, typer.Option("--kind", help=f"{', '.join(KINDS)}.")]
PATIENCE_S = 30
"""Somebody waits for the answer; and a registry that sends what was changed sends it again and again."""
MARKS = {"passed": "[green]ok[/]", "failed": "[red]failed[/]", "broken": "[red]wrong[/]", "missing": "[red]missing[/]"}


def register(parent: typer.Typer) -> None:
    """Add the commands."""
    parent.add_typer(app, name="attest")


@app.command("verify")
def verify_command(
    image: ImageArgument,
    key: Annotated[str | None, typer.Option("--key", metavar="FILE", help="Signed with this key's other half.")] = None,
    identity: Annotated[
        str | None, typer.Option("--certificate-identity", metavar="ID", help="Signed by them, without a key.")
    ] = None,
    issuer: Annotated[
        str | None, typer.Option("--certificate-oidc-issuer", metavar="URL", help="Who vouches for that identity.")
    ] = None,
    no_tlog: Annotated[
        bool, typer.Option("--no-tlog", help="The signature need not be in the transparency log.")
    ] = False,
    require: Annotated[
        str, typer.Option("--require", metavar="KIND,…", help=f"What must be there: {', '.join(KINDS)}, signature.")
    ] = "sbom,provenance,verification",
    ignore_lock: Annotated[
        bool, typer.Option("--ignore-lock", help="Do not compare sources with this checkout's lock.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result.")] = None,
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """Check that what refers to an image is about it and says good things. Exit status 1 if not."""
    from imagebuild import signing  # noqa: PLC0415 - imports much
    from imagebuild.attest import command  # noqa: PLC0415 - as above

    reference = parse(image)
    trust = signing.Trust(key, identity, issuer, not no_tlog)
    asked = bool(key or identity or issuer)
    if asked:
        trust.check()
    wish = command.Wish(
        required=tuple(filter(None, (kind.strip() for kind in require.split(",")))),
        signed=(lambda named: signing.verify(named, trust)) if asked else None,
        checkout=_checkout(matrix, dockerfiles, lock, compare=not ignore_lock),
    )
    result = command.verify(reference, _connect(reference.host), wish)
    if json_file:
        files.write_text(json_file, result.model_dump_json(indent=1) + "\n")
    _show(result)
    if result.verdict == "failed":
        raise typer.Exit(1)


@app.command("show")
def show_command(
    image: ImageArgument,
    kind: KindOption,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to a file.")] = None,
    platform: PlatformOption = None,
) -> None:
    """Download what refers to an image: the newest of a kind."""
    from imagebuild.attest import command  # noqa: PLC0415 - imports much

    reference = parse(image)
    content = command.show(reference, _connect(reference.host), _kind(kind), platform).decode("utf-8", "replace")
    if output:
        files.write_text(output, content)
    else:
        sys.stdout.write(content)


@app.command("add")
def add_command(
    image: Annotated[str, typer.Argument(metavar="REF@DIGEST", help="An image of a registry, by digest.")],
    file: Annotated[Path, typer.Argument(help="What to attach.")],
    kind: KindOption,
    platform: PlatformOption = None,
) -> None:
    """Attach a file to an image that is published, such as results that were measured later."""
    from imagebuild.attest import command  # noqa: PLC0415 - imports much
    from imagebuild.registry.base import File  # noqa: PLC0415 - as above

    reference = parse(image)
    content = files.read_text(file).encode()
    digest = command.add(reference, _connect(reference.host), _kind(kind), File(str(file), "", content), platform)
    out.print(f"{reference.name}@{digest}", markup=False, highlight=False, soft_wrap=True)


def _connect(host: str) -> Client:
    from imagebuild.registry import client  # noqa: PLC0415 - imports much

    return client.connect(host, patience_s=PATIENCE_S)


def _kind(name: str) -> str:
    if name not in KINDS:
        raise ConfigError(f"--kind {name}: no such kind{suggestion(name, list(KINDS))}; one of {', '.join(KINDS)}")
    return name


def _checkout(matrix: Path, dockerfiles: Path, lock: Path, *, compare: bool) -> Checkout:
    """What provenances are compared with; nothing where no project is, for whoever only pulls images."""
    from imagebuild.attest.judge import Checkout  # noqa: PLC0415 - imports much
    from imagebuild.recipe import Recipe  # noqa: PLC0415 - as above

    if not compare:
        return Checkout(why_not="as --ignore-lock says")
    if matrix == cli.DEFAULT_MATRIX and not matrix.exists():
        return Checkout()
    work = cli.prepare(matrix, dockerfiles, lock)

    def recipe(name: str) -> Recipe | None:
        target = next((t for t in work.plan.targets if t.id == name), None)
        return work.renderer.recipe(target) if target else None

    return Checkout(recipe)


def _show(result: AttestResult) -> None:
    # Anybody may have written what is shown here.
    rows = [
        (
            escape(one_line(finding.subject)),
            escape(one_line(finding.kind)) + (" (required)" if finding.required else ""),
            MARKS.get(finding.outcome, "-"),
            escape(one_line(finding.detail)),
            (finding.attachment or "")[7:19],
        )
        for finding in result.findings
    ]
    out.print(f"{result.image} is {result.digest}", markup=False, highlight=False, soft_wrap=True)
    console.table(("for", "what", "", "what it says", "attachment"), rows)
    wrong = sum(finding.is_wrong for finding in result.findings)
    out.print(f"[red]{wrong} wrong or missing[/]" if wrong else "[green]all that is required is there and right[/]")
