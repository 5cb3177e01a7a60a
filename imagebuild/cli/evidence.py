"""The commands `imagebuild sbom`, `scan`, `freshness`, `attest`, `diff` and `catalog`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagebuild.cli import options
from imagebuild.core.console import UNSIGNED, err, out, print_table, styled
from imagebuild.core.errors import ConfigError, plural

if TYPE_CHECKING:
    from imagebuild.oci.reference import ImageReference
    from imagebuild.oci.registry import Registry

POLICY = Path("scan-policy.yaml")
MARKS = {
    "passed": ("ok", "green"), "failed": ("failed", "red"), "broken": ("wrong", "red"), "missing": ("missing", "red"),
}  # fmt: skip


@options.command()
def sbom(project: options.ProjectFiles, image: str, output: str | None, platform: str | None, folder: Path) -> None:
    from imagebuild.oci.attestation import encode_predicate
    from imagebuild.publish.sbom import make_sbom
    from imagebuild.verify.subject import ImageFinder

    workspace = project.open()
    # The project that comes with imagebuild does not know the components of foreign images.
    is_known = not project.is_shipped or any(target.id == image for target in workspace.plan.targets)
    known = {name: file.model for name, file in workspace.project.components.items()} if is_known else {}
    with ImageFinder(workspace.plan, folder).find(image) as found:
        document = make_sbom(found.image(platform), known)
    options.print_or_write(encode_predicate(document).decode(), output)


@options.command()
def scan(
    project: options.ProjectFiles, image: str, report: Path, policy: Path, platform: str | None,
    json_file: str | None, folder: Path,
) -> None:  # fmt: skip
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
    options.print_result(json_file, result, lambda: print_scan(result), result.verdict == "failed")


@options.command()
def freshness(
    project: options.ProjectFiles, signers: options.TrustOptions, archive: str, suite: str, keyring: Path,
    select: tuple[str, ...], registry: str | None, scans: Path | None, ca: Path | None, json_file: str | None,
) -> None:  # fmt: skip
    from functools import cache, partial

    from imagebuild.core.errors import NothingSelected
    from imagebuild.core.files import read_bytes
    from imagebuild.core.run import run_program
    from imagebuild.lock.repositories import read_suite
    from imagebuild.lock.resolve import network_upstream
    from imagebuild.oci.registry import connect_registry
    from imagebuild.project.records import ScanResult
    from imagebuild.project.select import select_targets
    from imagebuild.publish.evidence import read_evidence
    from imagebuild.publish.freshness import print_freshness, security_updates

    workspace, trust = project.open(options.PlanChanges().parse(registry)), signers.trusted()
    newer = [scan.value for scan in read_evidence([scans]).of_type(ScanResult)] if scans else []
    signed, web = (f"{archive.rstrip('/')}/dists/{suite}/", read_bytes(keyring)), network_upstream(ca).web
    bases = workspace.project.matrix.model.bases
    releases = {name for name, base in bases.items() if base.release and base.release == suite.partition("-")[0]}
    targets = [t for t in select_targets(workspace.plan, select) if t.axes.get("os") in releases]
    if not targets:
        remedy = "select other targets, or name another suite"
        raise NothingSelected(f"--suite {suite}: no selected target uses this release; {remedy}")
    read = partial(read_suite, run_program, web, signed)
    connect = cache(connect_registry)
    result = security_updates(targets, connect, lambda arch, names: read(arch, names).versions, newer, trust)
    stale = bool(result.rebuild) or any(image.problem for image in result.images)
    options.print_result(json_file, result, lambda: print_freshness(result), stale)


@click.group(cls=options.Group)
def attest() -> None:
    """Verify and add attestations of a published image."""


def _in_registry(image: str) -> tuple[ImageReference, Registry]:
    from imagebuild.oci.reference import parse_reference
    from imagebuild.oci.registry import connect_registry

    if not image:
        raise ConfigError("IMAGE: the name is empty; name an image in a registry by tag or digest")
    if not re.search("[/:@]", image):
        raise ConfigError(f"{image}: has no registry; write the whole name, such as ghcr.io/acme/{image}:latest")
    reference = parse_reference(image)
    return reference, connect_registry(reference.host)


@options.command(attest, "verify")
def verify_attachments_of(
    signers: options.TrustOptions, image: str, require: str | None, scan_days: int, json_file: str | None
) -> None:
    """Verify that the attestations of an image are about this image, and that they report no problem.
    Exit status 1 if a required attachment is missing or wrong."""
    from imagebuild.oci.image import index_explained
    from imagebuild.publish.attest import INDEX, verify_attachments
    from imagebuild.report.document import one_line

    required = None if require is None else [kind.strip() for kind in require.split(",") if kind.strip()]
    result = verify_attachments(*_in_registry(image), required, signers.trusted(), scan_days)

    def show() -> None:
        rows = []
        for finding in result.findings:
            # These texts are untrusted: anyone who can push can have written them.
            subject, kind, detail = map(one_line, (finding.subject, finding.kind, finding.detail))
            kind += " (required)" if finding.required else ""
            rows.append((subject, kind, MARKS.get(finding.outcome, "-"), detail, (finding.attachment or "")[7:19]))
        out.print(f"{result.image} is {result.digest}")
        images = {finding.subject: finding.digest for finding in result.findings if finding.subject != INDEX}
        if images and (sentence := index_explained(result.digest, images)):
            out.print(sentence)
        print_table(("for", "what", "", "what it says", "attachment"), rows)
        wrong = sum(finding.is_wrong for finding in result.findings)
        good = ("all required attachments exist and are right", "green")
        out.print(styled((f"{wrong} wrong or missing", "red") if wrong else good))
        if result.verified_by is None:
            out.print(styled(*UNSIGNED))

    options.print_result(json_file, result, show, result.verdict == "failed")


@options.command(attest, "add")
def add_attachment_to(signing: options.SignOptions, image: str, file: Path, kind: str, platform: str | None) -> None:
    from imagebuild.core.files import read_text
    from imagebuild.publish.attest import add_attachment

    reference, registry = _in_registry(image)
    content, signer = read_text(file).encode(), signing.signer()
    digests = add_attachment(reference, registry, kind, content, file=file, platform=platform, signer=signer)
    for digest in digests:
        out.print(f"{reference.name}@{digest}")
    if not digests:
        out.print("the file is already attached")


@options.command()
def diff(
    project: options.ProjectFiles, signers: options.TrustOptions, image: str, other: str, platform: str | None,
    json_file: str | None, exit_code: bool, offline: bool, folder: Path,
) -> None:  # fmt: skip
    from imagebuild.publish.diff import compare_images, print_comparison
    from imagebuild.verify.subject import ImageFinder

    finder = ImageFinder(project.open().plan, folder, offline)
    comparison = compare_images((image, other), finder, platform, signers.trusted())
    options.print_result(json_file, comparison, lambda: print_comparison(comparison), exit_code and comparison.differs)


@options.command()
def catalog(
    project: options.ProjectFiles, signers: options.TrustOptions, registry: str | None, output: Path | None,
    readme: Path | None, freshness: Path | None,
) -> None:  # fmt: skip
    from datetime import UTC, datetime

    from imagebuild.core.files import read_text, write_text
    from imagebuild.core.yaml import read_written
    from imagebuild.publish.catalog import CatalogReader, images_table, replace_table
    from imagebuild.publish.freshness import Freshness
    from imagebuild.publish.site import write_site

    if output is None and readme is None:
        raise ConfigError("catalog: nothing to write; add -o DIR for the page, or --readme FILE for the table")
    workspace = project.open(options.PlanChanges().parse(registry))
    if output:
        fresh = read_written(Freshness, read_text(freshness), str(freshness)) if freshness else None
        trust = signers.trusted()
        made = CatalogReader(workspace.project, workspace.plan, trust, fresh).read(datetime.now(UTC))
        if not trust:
            err.print(styled(*UNSIGNED))
        for problem in made.problems:
            err.print(styled(("warning: ", "yellow"), problem))
        out.print(f"{plural(len(made.images), 'image')} in {write_site(made, output)}")
    if readme:
        table = images_table(workspace.project, workspace.plan)
        write_text(readme, replace_table(str(readme), read_text(readme), table), named=True)
