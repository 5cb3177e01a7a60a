"""Results of builds, verifications, scans and benchmarks: read from files or attachments, and matched with images."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

from pydantic import BaseModel, Field

from imagebuild.bench.verification import CheckResult, VerifyResult
from imagebuild.core import files
from imagebuild.core.console import redacted_text
from imagebuild.core.debian import Package
from imagebuild.core.errors import ConfigError, NothingSelected, ResultError, plural
from imagebuild.core.fields import Model, in_utc
from imagebuild.core.yaml import read_written
from imagebuild.oci.attestation import Attestation, encode_predicate, read_attestations
from imagebuild.oci.layout import INDEX_FILE, MARK_FILE, Manifest, digest_of
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import Repository
from imagebuild.project.records import BuildResult, ScanResult
from imagebuild.publish.provenance import Provenance
from imagebuild.publish.sbom import SpdxDocument
from imagebuild.publish.signatures import Signer
from imagebuild.report.document import Report
from imagebuild.verify.checks import IMAGE, SAME_FILES
from imagebuild.verify.runner import EXEC

T_co = TypeVar("T_co", covariant=True)

PREDICATES: Mapping[str, type[BaseModel]] = {
    "sbom": SpdxDocument, "provenance": Provenance, "verification": VerifyResult, "benchmark": Report,
    "scan": ScanResult,
}  # fmt: skip
"""Maps each kind of attachment (a file that is attached to an image in a registry) to the Python type of its
content."""
FILES: Mapping[type[BaseModel], frozenset[str]] = {
    BuildResult: frozenset({"target", "digest", "platforms", "steps"}),
    SpdxDocument: frozenset({"spdxVersion"}),
    VerifyResult: frozenset({"image", "digest", "platform", "checks"}),
    Report: frozenset({"about", "runs", "sources"}),
    ScanResult: frozenset({"digest", "scanner", "findings", "verdict"}),
}
"""Maps the Python type of each result file to the JSON keys by which imagebuild recognises the file. Provenance is left
out, because `publish` creates the provenance itself."""
UNNAMED = "an image without a digest"
PUBLICATION = "imagebuild.publication"
"""Annotation of an index with a `Publication` as JSON. Whoever signs the index also signs the annotation."""
MAX_SCAN_DAYS = 14
"""Maximum age of a scan that counts. If a newer scan that failed is deleted, an older one that passed takes its place;
nothing but the age shows this."""
STRICT = ("--only ", "--profile ", "--nodes ", "--hosts ")
"""Options of `verify` after which a check that passed proves at least as much as without them."""
BUILD_FILE = re.compile(r"((bake|bake-caches|bake-stages|metadata)(-[\w.-]+)?|lock-report)\.json")
"""Matches the names of JSON files that are not results, and that `build` and `lock` write beside the results."""


def latest_time() -> str:
    """Return the latest time, in UTC, that does not count as the future. The clocks of two machines differ a little."""
    return in_utc((datetime.now(UTC) + timedelta(minutes=10)).isoformat())


@dataclass(frozen=True)
class Attached:
    """An attachment of an image in a registry, and whether it counts."""

    item: Attestation
    value: BaseModel | None = None
    """The content. None if the attachment does not count, or if the kind is not in `PREDICATES`."""
    problem: str = ""
    """Why the attachment cannot be used: it is damaged, about another image, or not of the stated kind."""
    distrust: str = ""
    """Why an attachment that was read does not count: the signer did not sign it, or its time is in the future."""


def read_attached(place: Repository, digest: str, trust: Signer | None, kind: str | None = None) -> Iterator[Attached]:
    """Yield the attachments of an image, the newest first. Copies of an attachment that counts are left out.

    Everybody who may push can attach files, so only attachments that `trust` signed count. If `trust` is None, all
    attachments count that can be used. Raises CommandError if the registry fails."""
    manifest = place.manifest(digest).content if trust else b""
    known = set[tuple[str, str]]()
    for item in read_attestations(place, digest, kind):
        name, model = f"the {item.kind} {item.digest}", PREDICATES.get(item.kind)
        value, problem = None, item.problem
        unknown = "signatures of this kind of attachment are not verified"
        distrust = (trust.attestation_problem(item, manifest) if model else unknown) if trust else ""
        try:
            value = read_written(model, item.content, name) if model and not problem and not distrust else None
        except ResultError as error:
            problem = str(error).removeprefix(f"{name}: ")
        if value and (late := _time_problem(value)):
            value, distrust = None, late
        same = (item.kind, digest_of(item.content))
        if not value or same not in known:
            yield Attached(item, value, problem, distrust)
        known |= {same} if value else set()


def _time_problem(value: BaseModel) -> str:
    """Return what is wrong with the time in a result. A result from the future would hide all later results."""
    stated = value.about.created if isinstance(value, Report) else getattr(value, "started", "")
    try:
        return f"its time {stated} is in the future" if stated and in_utc(stated) > latest_time() else ""
    except ValueError as error:
        return f"its time {error}"


def attached_packages(place: Repository, digest: str, trust: Signer | None) -> tuple[Package, ...]:
    """Return the distribution's packages in an image, as listed in the newest SBOM that counts and lists such packages.
    Return an empty tuple if no SBOM of the image lists such packages in a form that can be read."""
    for attached in read_attached(place, digest, trust, "sbom"):
        document = attached.value
        if isinstance(document, SpdxDocument) and not mismatch(document, digest, "", ()):
            with suppress(ResultError):
                if packages := document.debian_packages:
                    return packages
    return ()


class Publication(Model):
    """The names that `publish` gave to an index, and what it required of the images."""

    names: tuple[str, ...]
    """All tags and aliases, with registry and repository."""
    attachments: tuple[str, ...] = ()
    """Kinds of attachments that were required."""
    checks: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Maps each platform to the checks that were required."""


def publication_of(index: Manifest) -> Publication | None:
    """Return what publishing stated in an index; None if it stated nothing. Raises ResultError if it is not valid."""
    notes = index.document.get("annotations")
    if not isinstance(notes, dict) or PUBLICATION not in notes:
        return None
    return read_written(Publication, str(notes[PUBLICATION]), f"annotation {PUBLICATION} of {index.digest}")


def tag_problem(name: ImageReference, index: Manifest) -> str:
    """Return why an index does not state that publishing gave it this tag; empty if it does, or for a digest.
    A signature is about a digest, so everybody who may push can move a tag to another image with a signature."""
    try:
        stated = publication_of(index)
    except ResultError as error:
        return str(error)
    if name.digest or (stated and str(replace(name, tag=name.wanted)) in stated.names):
        return ""
    others = f"was published as {', '.join(stated.names) or 'nothing'}" if stated else "does not state its tags"
    return f"the index {others}, so somebody may have moved this tag; name the image by its digest"


def scan_problem(scan: ScanResult, days: int = MAX_SCAN_DAYS) -> str:
    """Return why a scan does not allow an image: its verdict, or its age. Return an empty string if it does."""
    if scan.verdict == "failed":
        return scan.reason or "the policy does not allow the findings"
    age = datetime.fromisoformat(latest_time()) - datetime.fromisoformat(in_utc(scan.started))
    return f"the scan is older than {plural(days, 'day')}; scan the image again" if age > timedelta(days) else ""


def unproven(result: VerifyResult) -> str:
    """Return the reason why the checks may have run in another image, or with other variables than those of the image.

    The reason is empty if the checks certainly ran in this image, without options that ease them, such as `--env` or
    `--gpus`. A runner `exec:PREFIX` (a command prefix such as `ssh node`) may run the checks in any image, so the
    results count only if the check `image/same-files` passed."""
    if others := ", ".join(option for option in result.options if not option.startswith(STRICT)):
        return f"the check ran with {others}; run `imagebuild verify` again without this option"
    runner = result.surroundings.runner if result.surroundings else ""
    proof = next((check for check in result.checks if check.component == IMAGE and check.check == SAME_FILES), None)
    if not runner.startswith(EXEC) or (proof and proof.outcome == "passed"):
        return ""
    why = f"was {proof.outcome}: {proof.reason}" if proof else "was not run"
    return f"the check ran through {runner}, but {IMAGE}/{SAME_FILES}, which proves that the image is the same, {why}"


def passes(result: VerifyResult) -> list[CheckResult]:
    """Return the checks that passed and count: rules about the image's files, and what certainly ran in this image."""
    doubt = unproven(result)
    return [c for c in result.checks if c.outcome == "passed" and (c.component == IMAGE or not doubt)]


def mismatch(value: BaseModel, digest: str, platform: str, indexes: Collection[str]) -> str:
    """Return the reason why a result is not about an image. Return an empty string if the result is about the image.

    `digest` and `platform` identify the image. `indexes` are the digests of the indexes that list the image. If the
    result names such an index, or no digest at all, the platform in the result must be the platform of the image."""
    digests, platforms = about(value)
    if others := digests - {digest, *(indexes if platforms else ())}:
        return f"is about another image: {', '.join(sorted(others))}"
    if len(platforms) > 1 or (platforms - {platform} and digest not in digests):
        return f"is about {', '.join(sorted(platforms))} instead of only {platform}"
    return ""


def about(value: BaseModel) -> tuple[frozenset[str], frozenset[str]]:
    """Return the set of digests and the set of platforms that a result names.
    Provenance and some reports do not name a digest."""
    match value:
        case ScanResult():
            return frozenset({value.digest}), frozenset({value.platform})
        case SpdxDocument():
            return value.digests or frozenset({UNNAMED}), frozenset()
        case Provenance():
            return frozenset(), frozenset({value.platform} if value.platform else ())
        case VerifyResult() | Report():
            results = [value] if isinstance(value, VerifyResult) else value.verifications
            platforms = {platform.strip() for result in results for platform in result.platform.split(",")}
            return frozenset(result.digest or UNNAMED for result in results), frozenset(platforms)
    return frozenset(), frozenset()


@dataclass(frozen=True)
class EvidenceFile(Generic[T_co]):
    """A result file: the path, the JSON document, and the result as a Python object."""

    path: Path
    document: Mapping[str, Any]
    value: T_co


@dataclass(frozen=True)
class Evidence:
    """All results that were read from files."""

    files: Sequence[EvidenceFile[BaseModel]] = ()
    unused: Sequence[str] = ()
    """A message for each result that cannot be matched with exactly one image: the file and the reason."""

    def of_image(self, digest: str, platform: str, indexes: Collection[str]) -> Evidence:
        """Return the results about one image. `indexes` are the digests of the indexes that list the image."""
        files = [file for file in self.files if about(file.value)[0] & {digest, *indexes}]
        return Evidence([file for file in files if not mismatch(file.value, digest, platform, indexes)])

    def of_type(self, kind: type[T_co]) -> Sequence[EvidenceFile[T_co]]:
        return [cast(EvidenceFile[T_co], file) for file in self.files if isinstance(file.value, kind)]


def _json_files(folder: Path) -> Iterator[Path]:
    """Yield the JSON files below a folder, sorted. Raises ConfigError if a file or a folder cannot be read."""

    def refuse(error: OSError) -> NoReturn:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}; check its permissions")

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        other = {INDEX_FILE} if MARK_FILE in names else set()
        for name in sorted(name for name in {*names} - other if not BUILD_FILE.fullmatch(name)):
            if name.endswith(".json") and not name.startswith("."):
                if not Path(place, name).is_file():
                    raise ConfigError(f"{place}/{name}: is not a file; remove it")
                yield Path(place, name)


def read_evidence(paths: Iterable[Path]) -> Evidence:
    """Read the given JSON files, and all JSON files in the given folders except hidden ones. Return the results.

    The files of a build itself (bake file, metadata, OCI layout) are ignored. Raises ConfigError if a path does not
    exist or cannot be read, and NothingSelected if a path contains no result. Raises ResultError for any other file,
    because it could contain a failed check: not valid JSON, incomplete, or not a result of imagebuild."""
    distinct: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: does not exist; name a folder with results of build, verify or scan")
        found = list(_json_files(path)) if path.is_dir() else [path]
        if not found:
            raise NothingSelected(f"--results {path}: contains no result; run `imagebuild build` first")
        for file in found:
            distinct.setdefault(file.resolve(), file)

    read, unused = [], []
    for file in distinct.values():
        try:
            document = json.loads(files.read_text(file))
            encode_predicate(document)  # others could not read NaN or a text that is not Unicode
        except (ValueError, RecursionError) as error:
            why = f"is not valid JSON: {error}; copy the file again, or remove it"
            raise ResultError(f"{file}: {why}") from None
        keys = document.keys() if isinstance(document, dict) else set()
        model = next((model for model, wanted in FILES.items() if wanted <= keys), None)
        if model is None:
            what = "is not a result of build, verify, sbom, scan or report"
            raise ResultError(f"{file}: {what}; move the file to another folder")
        value = read_written(model, document, str(file))
        read.append(EvidenceFile(file, document, value))
        digests, platforms = about(value)
        if len(platforms) > 1:
            listed = ", ".join(sorted(platforms))
            unused.append(f"{file}: is about several platforms: {listed}; verify each platform separately")
        elif UNNAMED in digests or not (digests or model is BuildResult):
            unused.append(f"{file}: does not name the digest of an image; verify the image again as NAME@DIGEST")
    return Evidence(read, unused)


@dataclass(frozen=True, order=True)
class NewAttachment:
    """A predicate (the content of an attestation) that will be attached to an image in a registry."""

    kind: str
    content: bytes
    created: str = ""


def attachment_of(value: BaseModel, document: object, digest: str, platform: str) -> NewAttachment:
    """Return a result as an attachment for an image.

    Private facts, such as the name of the host, are removed from the result. The attachment contains the time of the
    result if the result states a time."""
    created = ""
    match value:
        case VerifyResult():
            document, created = _plain(without_private_facts(value, digest, platform)), value.started
        case Report():
            kept = tuple(without_private_facts(v, digest, platform) for v in value.verifications)
            public = value.without_hosts().model_copy(update={"verifications": kept})
            document, created = _plain(public), value.about.created
        case ScanResult():
            created = value.started
    kind = next(kind for kind, model in PREDICATES.items() if isinstance(value, model))
    return NewAttachment(kind, encode_predicate(document), created)


def _plain(model: Model) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_defaults=True)


def without_private_facts(result: VerifyResult, digest: str, platform: str) -> VerifyResult:
    """Return a copy of a verification without private facts: host, user, environment variables, commands, logs, and
    what looks like a secret in outputs."""
    if place := result.surroundings:
        facts = {name: value for name, value in place.facts.items() if name != "host"}
        place = place.model_copy(update={"environment": {}, "reports": {}, "user": "", "facts": facts})
    private: dict[str, object] = {"environment": {}, "command": (), "log": None}
    checks = tuple(
        check.model_copy(
            update=private
            | {"reason": redacted_text(check.reason), "output": redacted_text(check.output)}
            | {"results": check.results and check.results.without_hosts()}
        )
        for check in result.checks
    )
    return result.model_copy(update={"digest": digest, "platform": platform, "surroundings": place, "checks": checks})
