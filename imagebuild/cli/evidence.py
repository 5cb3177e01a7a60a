"""Run `imagebuild sbom`, `scan`, `freshness`, `attest`, `diff` and `catalog`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from imagebuild.cli import options
from imagebuild.cli.options import argument, command_group, example, option, subcommand
from imagebuild.core.console import err, out, print_table
from imagebuild.core.errors import ConfigError, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagebuild.oci.reference import ImageReference
    from imagebuild.oci.registry import Registry
    from imagebuild.publish.attest import AttestResult

POLICY = Path("scan-policy.yaml")


@example(
    "imagebuild sbom quickstart-cuda13.5-debian13-runtime -o sbom.spdx.json",
    "imagebuild sbom ghcr.io/acme/open@sha256:… --platform linux/arm64",
)
def sbom(
    project: options.ProjectFiles,
    image: options.ImageArgument,
    output: options.OutputOption = None,
    platform: options.PlatformOption = None,
    folder: options.FolderOption = options.BUILDS,
) -> None:
    """List what is installed in an image, as SPDX."""
    from imagebuild.oci.attestation import encode_predicate
    from imagebuild.publish.sbom import make_sbom
    from imagebuild.verify.subject import ImageFinder

    workspace = project.open()
    # What comes along knows nothing of components in images of others.
    is_known = not project.is_shipped or any(target.id == image for target in workspace.plan.targets)
    known = {name: file.model for name, file in workspace.project.components.items()} if is_known else {}
    with ImageFinder(workspace.plan, folder).find(image) as found:
        document = make_sbom(found.image(platform), known)
    options.print_or_write(encode_predicate(document).decode(), output)


@example("imagebuild scan ghcr.io/acme/open@sha256:… --report grype.sarif --json scan.json")
def scan(
    project: options.ProjectFiles,
    image: options.ImageArgument,
    report: Annotated[
        Path, option("--report FILE", "A SARIF file of grype, Trivy or another scanner, or what debsecan printed.")
    ],
    policy: Annotated[Path, option("--policy FILE", "File that says what fails and what is ignored.")] = POLICY,
    platform: options.PlatformOption = None,
    json_file: options.JsonOption = None,
    folder: options.FolderOption = options.BUILDS,
) -> None:
    """Judge a scanner's report about an image by a policy, and keep the verdict with the image's digest.

    Reports: `grype -o sarif`, `trivy image --format sarif`, `debsecan --format detail`, and SARIF 2.1.0 of Docker Scout
    and Snyk. A SARIF report must name the image's digest.

    Exit status 1 if a finding fails the image.
    """
    from imagebuild.core.fields import YamlFile
    from imagebuild.core.yaml import read_yaml
    from imagebuild.publish.scan import Policy, print_scan, scan_result
    from imagebuild.publish.scan_reports import load_report
    from imagebuild.verify.subject import ImageFinder

    no_file = policy == POLICY and not policy.exists()
    rules = YamlFile(policy, Policy(), {}) if no_file else read_yaml(policy, Policy)
    written = load_report(report)
    with ImageFinder(project.open().plan, folder).find(image) as found:
        result = scan_result(found.image(platform), written, report, rules)
    options.print_result(json_file, result, lambda: print_scan(result))
    if result.verdict == "failed":
        raise typer.Exit(1)


@example("imagebuild freshness --registry ghcr.io/acme --archive URL --suite trixie-security --keyring FILE")
def freshness(
    project: options.ProjectFiles,
    archive: Annotated[str, option("--archive URL", "The distribution's archive of security updates.")],
    suite: Annotated[str, option("--suite NAME", "Suite of that archive, such as trixie-security.")],
    keyring: Annotated[Path, option("--keyring FILE", "File of the keys that sign the archive, as gpg exports them.")],
    select: options.SelectArgument = None,
    registry: options.RegistryOption = None,
    scans: Annotated[Path | None, option("--scans DIR", "Folder with newer scans: those that fail count too.")] = None,
    ca: options.CaOption = None,
    json_file: options.JsonOption = None,
) -> None:
    """Say which packages have a security update, by the SBOM of each published image that an alias names.

    Exit status 1 if a package has an update, if a scan fails that a new build cures, or if an image has no SBOM.
    """
    from functools import cache

    from imagebuild.core.errors import NothingSelected
    from imagebuild.core.run import run_program
    from imagebuild.lock.repositories import SignedSuite, read_suite
    from imagebuild.lock.resolve import network_upstream
    from imagebuild.oci.registry import connect_registry
    from imagebuild.project.records import ScanResult
    from imagebuild.project.select import select_targets
    from imagebuild.publish.evidence import read_evidence
    from imagebuild.publish.freshness import print_freshness, security_updates

    workspace = project.open(options.PlanChanges().parse(registry))
    newer = [scan.value for scan in read_evidence([scans]).of_type(ScanResult)] if scans else []
    if not keyring.is_file():
        raise ConfigError(f"--keyring {keyring}: no such file")
    signed, web = SignedSuite(archive, suite, keyring.read_bytes()), network_upstream(ca).web
    bases = workspace.project.matrix.model.bases
    releases = {name for name, base in bases.items() if base.release and base.release == suite.partition("-")[0]}
    targets = [t for t in select_targets(workspace.plan, select or ()) if t.axes.get("os") in releases]
    if not targets:
        raise NothingSelected(f"--suite {suite}: no selected target is of that release of a distribution")

    def newest(arch: str, packages: Iterable[str]) -> Mapping[str, list[str]]:
        return read_suite(run_program, web, signed, arch, packages).versions

    result = security_updates(targets, cache(connect_registry), newest, newer)
    options.print_result(json_file, result, lambda: print_freshness(result))
    if result.rebuild or any(image.problem for image in result.images):
        raise typer.Exit(1)


attest = command_group("Verify and add attestations of a published image.")

MARKS = {"passed": "[green]ok[/]", "failed": "[red]failed[/]", "broken": "[red]wrong[/]", "missing": "[red]missing[/]"}
PublishedArgument = Annotated[str, argument("IMAGE", "An image of a registry, by tag or digest.")]
KindOption = Annotated[
    Literal["sbom", "provenance", "verification", "benchmark", "scan"],
    option("--kind KIND", "Kind of attachment: sbom, provenance, verification, benchmark or scan."),
]


def _in_registry(image: str) -> tuple[ImageReference, Registry]:
    from imagebuild.oci.reference import parse_reference
    from imagebuild.oci.registry import connect_registry

    reference = parse_reference(image)
    return reference, connect_registry(reference.host)


@subcommand(attest, "verify", "imagebuild attest verify ghcr.io/acme/open:latest --key cosign.pub")
def verify_attachments_of(
    signers: options.TrustOptions,
    image: PublishedArgument,
    require: Annotated[
        str, option("--require KIND,…", "Kinds of attachments that must be there; `signature` is one, too.")
    ] = "sbom,provenance,verification",
    json_file: options.JsonOption = None,
) -> None:
    """Check that the attestations of an image are about it, and that they speak for the image.

    Exit status 1 if something required is missing or wrong.
    """
    from imagebuild.publish.attest import verify_attachments

    trust = signers.trusted()
    required = [kind.strip() for kind in require.split(",") if kind.strip()]
    result = verify_attachments(*_in_registry(image), required, trust)
    options.print_result(json_file, result, lambda: _show(result, signed=bool(trust)))
    if result.verdict == "failed":
        raise typer.Exit(1)


@subcommand(attest, "add", "imagebuild attest add ghcr.io/acme/open@sha256:… results.json --kind benchmark")
def add_attachment_to(
    signing: options.SignOptions,
    image: Annotated[str, argument("IMAGE@DIGEST", "An image of a registry, by digest.")],
    file: Annotated[Path, argument("FILE", "File to attach.")],
    kind: KindOption,
    platform: options.PlatformOption = None,
) -> None:
    """Attach a file to a published image, such as results that were measured later.

    With an index, the file is attached to the image of each platform that it is about, and to the index.
    """
    from imagebuild.core.files import read_text
    from imagebuild.publish.attest import add_attachment

    reference, registry = _in_registry(image)
    content, signer = read_text(file).encode(), signing.signer()
    digests = add_attachment(reference, registry, kind, content, file=file, platform=platform, signer=signer)
    for digest in digests:
        out.print(f"{reference.name}@{digest}", markup=False, highlight=False, soft_wrap=True)
    if not digests:
        out.print("it is attached already")


def _show(result: AttestResult, *, signed: bool) -> None:
    from rich.markup import escape

    from imagebuild.report.document import one_line

    rows = []
    for finding in result.findings:
        # Anybody may have written what is shown here.
        subject, kind, detail = (escape(one_line(text)) for text in (finding.subject, finding.kind, finding.detail))
        kind += " (required)" if finding.required else ""
        rows.append((subject, kind, MARKS.get(finding.outcome, "-"), detail, (finding.attachment or "")[7:19]))
    out.print(f"{result.image} is {result.digest}", markup=False, highlight=False, soft_wrap=True)
    print_table(("for", "what", "", "what it says", "attachment"), rows)
    wrong = sum(finding.is_wrong for finding in result.findings)
    out.print(f"[red]{wrong} wrong or missing[/]" if wrong else "[green]all that is required is there and right[/]")
    if not signed:
        out.print("[yellow]no signature was checked[/]: anybody who may push can have written all this; see --key")


@example("imagebuild diff ghcr.io/acme/open:old ghcr.io/acme/open:new")
def diff(
    project: options.ProjectFiles,
    a: options.ImageArgument,
    b: Annotated[str, argument("OTHER", "The image that the first one is compared with.")],
    platform: options.PlatformOption = None,
    json_file: options.JsonOption = None,
    exit_code: Annotated[bool, option("--exit-code", "End with exit status 1 if anything differs.")] = False,
    offline: options.OfflineOption = False,
    folder: options.FolderOption = options.BUILDS,
) -> None:
    """Say what differs between two images: components, packages, environment and layers."""
    from imagebuild.publish.diff import compare_images, print_comparison
    from imagebuild.verify.subject import ImageFinder

    comparison = compare_images((a, b), ImageFinder(project.open().plan, folder, offline), platform)
    options.print_result(json_file, comparison, lambda: print_comparison(comparison))
    if exit_code and comparison.differs:
        raise typer.Exit(1)


@example(
    "imagebuild catalog --registry ghcr.io/acme -o site",
    "imagebuild catalog --readme README.md",
)
def catalog(
    project: options.ProjectFiles,
    signers: options.TrustOptions,
    registry: options.RegistryOption = None,
    output: Annotated[Path | None, option("-o, --output DIR", "Write the page and images.json into a folder.")] = None,
    readme: Annotated[Path | None, option("--readme FILE", "Write the table of images between its markers.")] = None,
    freshness: Annotated[Path | None, option("--freshness FILE", "Result of `freshness --json`, for the page.")] = None,
) -> None:
    """Make a page of all published images, and the table in the README."""
    from datetime import UTC, datetime

    from rich.markup import escape

    from imagebuild.core.files import read_text, write_text
    from imagebuild.core.yaml import read_written
    from imagebuild.publish.catalog import CatalogReader, images_table, replace_table
    from imagebuild.publish.freshness import Freshness
    from imagebuild.publish.site import write_site

    if output is None and readme is None:
        raise ConfigError("catalog: give -o DIR for the page, or --readme FILE for the table of images")
    workspace = project.open(options.PlanChanges().parse(registry))
    if output:
        fresh = read_written(Freshness, read_text(freshness), str(freshness)) if freshness else None
        made = CatalogReader(workspace.project, workspace.plan, signers.trusted(), fresh).read(datetime.now(UTC))
        for problem in made.problems:
            err.print(f"[yellow]warning:[/] {escape(problem)}")
        out.print(f"{plural(len(made.images), 'image')} in {write_site(made, output)}", markup=False)
    if readme:
        table = images_table(workspace.project, workspace.plan)
        write_text(readme, replace_table(str(readme), read_text(readme), table))
