"""Run `imagebuild sbom`, `scan` and `attest`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from imagebuild.cli.options import (
    BESIDE_MATRIX,
    BUILDS,
    DOCKERFILES,
    MATRIX,
    DockerfilesOption,
    FolderOption,
    ImageArgument,
    JsonOption,
    LockOption,
    MatrixOption,
    OfflineOption,
    OutputOption,
    PlatformOption,
    SigningKeyOption,
    SignOption,
    UnloggedOption,
    command_group,
    example,
    examples,
    open_if_there,
    print_or_write,
    print_result,
    signer_of,
)
from imagebuild.core.console import err, out, print_table
from imagebuild.core.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from imagebuild.oci.registry import RegistryClient
    from imagebuild.publish.attest import AttestResult

POLICY = Path("scan-policy.yaml")


@example(
    "imagebuild sbom quickstart-cuda13.5-debian13-runtime -o sbom.spdx.json",
    "imagebuild sbom ghcr.io/acme/open@sha256:… --platform linux/arm64",
)
def sbom(
    image: ImageArgument,
    output: OutputOption = None,
    platform: PlatformOption = None,
    folder: FolderOption = BUILDS,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """List all that is in an image, as SPDX: packages, components, and what those were made from."""
    from imagebuild.publish.sbom import encode_document, make_sbom
    from imagebuild.verify.subject import NO_PLAN, ImageFinder

    workspace = open_if_there(matrix, dockerfiles, lock)
    plan = workspace.plan if workspace else NO_PLAN
    with ImageFinder(plan, folder).built(image) as found:
        document = make_sbom(found.image(platform), plan, workspace.renderer if workspace else None)
    if "comment" in document:
        err.print(document["comment"], markup=False)
    print_or_write(encode_document(document).decode(), output)


@example(
    "imagebuild scan ghcr.io/acme/quickstart:latest",
    "imagebuild scan --sbom sbom.spdx.json --scanner debsecan --database trixie.json --offline",
)
def scan(
    image: Annotated[
        str | None,
        typer.Argument(
            metavar="IMAGE", help="A target's id, a tag or digest in the engine or a registry, a layout or archive."
        ),
    ] = None,
    sbom_file: Annotated[
        Path | None, typer.Option("--sbom", metavar="FILE", help="Scan what this SBOM lists, instead of an image.")
    ] = None,
    scanner: Annotated[
        str, typer.Option("--scanner", metavar="auto|grype|trivy|debsecan", help="Program that looks for them.")
    ] = "auto",
    database: Annotated[
        Path | None, typer.Option("--database", metavar="PATH", help="Database of the scanner to compare with.")
    ] = None,
    offline: OfflineOption = False,
    policy: Annotated[
        Path, typer.Option("--policy", metavar="FILE", help="File that says what fails and what is waived.")
    ] = POLICY,
    platform: PlatformOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also list vulnerabilities that are less than high and fail nothing.")
    ] = False,
    json_file: JsonOption = None,
    folder: FolderOption = BUILDS,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Look for known vulnerabilities in an image, and judge them by a policy.

    Exit status 1 if one fails the image.
    """
    from imagebuild.core.yaml import YamlFile
    from imagebuild.publish.scan import (
        Policy,
        ScanRequest,
        load_policy,
        print_scan,
        scan_image,
        scan_subject_of_image,
        scan_subject_of_sbom,
    )
    from imagebuild.verify.subject import NO_PLAN, ImageFinder

    if (image is None) == (sbom_file is None):
        raise ConfigError("scan: name an image, or give --sbom FILE")
    workspace = open_if_there(matrix, dockerfiles, lock)
    plan = workspace.plan if workspace else None
    axes = {name: () for target in plan.targets for name in target.axes} if plan else None
    no_file = policy == POLICY and not policy.exists()
    rules = YamlFile(policy, Policy(), {}) if no_file else load_policy(policy, axes)
    request = ScanRequest(scanner, database, offline)
    if sbom_file:
        result = scan_image(scan_subject_of_sbom(sbom_file, plan), rules, request)
    else:
        with ImageFinder(plan or NO_PLAN, folder, offline).built(str(image)) as found:
            result = scan_image(scan_subject_of_image(found.image(platform)), rules, request)
    print_result(json_file, lambda: result.model_dump_json(indent=1), lambda: print_scan(result, every=every))
    if result.verdict == "failed":
        raise typer.Exit(1)


attest = command_group("Verify, show and add what refers to a published image.")

PATIENCE_S = 30
"""Seconds to repeat requests: somebody waits for the answer, and a registry whose content was changed sends it again
and again."""
MARKS = {"passed": "[green]ok[/]", "failed": "[red]failed[/]", "broken": "[red]wrong[/]", "missing": "[red]missing[/]"}
PublishedArgument = Annotated[str, typer.Argument(metavar="IMAGE", help="An image of a registry, by tag or digest.")]
KindOption = Annotated[
    str,
    typer.Option("--kind", metavar="KIND", help="What the file is: sbom, provenance, verification, benchmark or scan."),
]


@attest.command(
    "verify",
    epilog=examples("imagebuild attest verify ghcr.io/acme/open:latest --key cosign.pub"),
)
def verify_attachments_of(
    image: PublishedArgument,
    key: Annotated[
        str | None, typer.Option("--key", metavar="FILE", help="Public key that a signature has to be made with.")
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option("--certificate-identity", metavar="ID", help="Who has to have signed without a key."),
    ] = None,
    issuer: Annotated[
        str | None,
        typer.Option("--certificate-oidc-issuer", metavar="URL", help="Who has to vouch for that identity."),
    ] = None,
    no_tlog: Annotated[
        bool, typer.Option("--no-tlog", help="Accept signatures that are not in the transparency log.")
    ] = False,
    require: Annotated[
        str,
        typer.Option("--require", metavar="KIND,…", help="Kinds that have to be there; `signature` is one, too."),
    ] = "sbom,provenance,verification",
    json_file: JsonOption = None,
) -> None:
    """Check that what refers to an image is about it, and that it speaks for the image.

    Exit status 1 if something required is missing or wrong.
    """
    from imagebuild.oci.reference import parse_reference
    from imagebuild.publish.attest import AttestRequest, Trust, verify_attachments

    reference = parse_reference(image)
    request = AttestRequest(
        required=tuple(filter(None, (kind.strip() for kind in require.split(",")))),
        trust=Trust(key, identity, issuer, not no_tlog) if key or identity or issuer else None,
    )
    result = verify_attachments(reference, _connect(reference.host), request)
    print_result(json_file, lambda: result.model_dump_json(indent=1), lambda: _show(result, signed=bool(request.trust)))
    if result.verdict == "failed":
        raise typer.Exit(1)


@attest.command(
    "show", epilog=examples("imagebuild attest show ghcr.io/acme/open:latest --kind sbom -o sbom.spdx.json")
)
def show_attachment_of(
    image: PublishedArgument,
    kind: KindOption,
    output: OutputOption = None,
    platform: PlatformOption = None,
) -> None:
    """Print a file that refers to an image: the newest of its kind."""
    from imagebuild.oci.reference import parse_reference
    from imagebuild.publish.attest import show_attachment

    reference = parse_reference(image)
    content = show_attachment(reference, _connect(reference.host), _kind(kind), platform)
    print_or_write(content.decode("utf-8", "replace"), output)


@attest.command(
    "add",
    epilog=examples("imagebuild attest add ghcr.io/acme/open@sha256:… results.json --kind benchmark"),
)
def add_attachment_to(
    image: Annotated[str, typer.Argument(metavar="IMAGE@DIGEST", help="An image of a registry, by digest.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to attach.")],
    kind: KindOption,
    platform: PlatformOption = None,
    sign: SignOption = False,
    key: SigningKeyOption = None,
    no_tlog: UnloggedOption = False,
) -> None:
    """Attach a file to a published image, such as results that were measured later."""
    from imagebuild.core.files import read_text
    from imagebuild.oci.reference import parse_reference
    from imagebuild.publish.attest import add_attachment

    reference = parse_reference(image)
    signer = signer_of(key, sign=sign, log=not no_tlog)
    content = read_text(file).encode()
    digest = add_attachment(
        reference, _connect(reference.host), _kind(kind), content, file=file, platform=platform, signer=signer
    )
    out.print(f"{reference.name}@{digest}", markup=False, highlight=False, soft_wrap=True)


def _connect(host: str) -> RegistryClient:
    from imagebuild.oci.registry import connect_registry

    return connect_registry(host, patience_s=PATIENCE_S)


def _kind(name: str) -> str:
    """Return a kind of attachment. Raises ConfigError for an unknown one."""
    from imagebuild.oci.attestation import KINDS

    if name not in KINDS:
        raise ConfigError(f"--kind {name}: unknown kind{suggestion(name, list(KINDS))}; one of {', '.join(KINDS)}")
    return name


def _show(result: AttestResult, *, signed: bool) -> None:
    from rich.markup import escape

    from imagebuild.report.document import one_line

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
    print_table(("for", "what", "", "what it says", "attachment"), rows)
    wrong = sum(finding.is_wrong for finding in result.findings)
    out.print(f"[red]{wrong} wrong or missing[/]" if wrong else "[green]all that is required is there and right[/]")
    if not signed:
        out.print("[yellow]nobody's signature was checked[/]: whoever may push can have written all this; see --key")
