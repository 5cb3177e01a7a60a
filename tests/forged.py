"""An image that we signed, attachments that others forge, and what people read about the image (tests/data/publish)."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from imagebuild.oci.attestation import BUNDLE_MEDIA, KINDS, STATEMENT_MEDIA, attestation_of, encode_predicate
from imagebuild.oci.layout import Attachment, Descriptor
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import Repository
from imagebuild.project.plan import make_plan
from imagebuild.project.project import Project
from imagebuild.project.records import ScanResult
from imagebuild.publish.attest import verify_attachments
from imagebuild.publish.catalog import CatalogReader
from imagebuild.publish.evidence import attached_packages, read_attached
from imagebuild.publish.signatures import GITHUB_ISSUER, Signer
from tests import attached

NOW = datetime(2026, 11, 27, tzinfo=UTC)
SHARED = "https://github.com/acme/ci/.github/workflows/project.yml@refs/tags/v1"
FRESH = "https://github.com/acme/images/.github/workflows/fresh.yml@refs/heads/main"
MAIN, SOURCE = "refs/heads/main", "acme/images"
OURS = (SHARED, GITHUB_ISSUER, SOURCE, MAIN)
Claims = tuple[str, str, str, str]
SIGNERS: Mapping[str, Claims] = {
    "ours": OURS,
    "fresh": (FRESH, *OURS[1:]),
    "stranger": ("https://github.com/evil/x/.github/workflows/x.yml@refs/heads/main", GITHUB_ISSUER, "evil/x", MAIN),
    "fork": (SHARED, GITHUB_ISSUER, "evil/images", MAIN),
    "longer": (SHARED, GITHUB_ISSUER, "acme/images2", MAIN),
    "prefixed": (SHARED, GITHUB_ISSUER, "evil/acme/images", MAIN),
    "branch": (SHARED, GITHUB_ISSUER, SOURCE, "refs/heads/evil"),
    "workflow": (FRESH.replace("fresh.yml", "docs.yml"), *OURS[1:]),
    "containing": (f"{SHARED}.evil", *OURS[1:]),
    "dot": (SHARED.replace("github.com", "githubxcom"), *OURS[1:]),
    "issuer": (SHARED, "https://issuer.evil.test", SOURCE, MAIN),
}
"""The identity, issuer, repository and ref of each signer."""
TRUST = Signer(None, (SHARED, FRESH), GITHUB_ISSUER, SOURCE, MAIN)
MEDIA = {"bundle": BUNDLE_MEDIA, "statement": STATEMENT_MEDIA}
Sign = Callable[[Claims, str, bytes, bytes], bytes]
"""Returns the bundle of a signer for a kind, a content and a manifest."""


@dataclass(frozen=True)
class Victim:
    """An image of one platform with our SBOM, provenance, verification, and a scan that failed."""

    place: Repository
    image: Descriptor
    project: Project
    trust: Signer
    sign: Sign

    def attach_ours(self) -> None:
        for kind in ("sbom", "provenance", "verification", "scan"):
            self.forge({"by": "ours", "kind": kind, "set": {} if kind != "scan" else {
                "verdict": "failed", "started": "2026-11-20T08:00:00Z",
            }})  # fmt: skip

    def forge(self, row: Mapping[str, Any]) -> str:
        """Attach what a row describes; return its digest."""
        kind, manifest = row.get("kind", "scan"), self.place.manifest(self.image.digest).content
        digest = f"sha256:{'9' * 64}" if "about" in row else self.image.digest
        documents: dict[str, dict[str, Any]] = {
            "scan": attached.scan(digest, image=str(row)),  # no two are equal
            "verification": attached.verification(digest, started="2026-11-20T08:00:00Z"),
            "sbom": attached.spdx(digest, **({} if row.get("by") == "ours" else {"nothing": "1"})),
            "provenance": attached.provenance(),
        }
        content = encode_predicate(documents[kind] | row.get("set", {}))
        if day := row.get("copy"):
            read = read_attached(self.place, self.image.digest, self.trust, kind)
            ours = next(a.item for a in read if isinstance(a.value, ScanResult) and a.value.verdict == "failed")
            made = attestation_of(kind, ours.content, self.image, "open", created=day, bundle=ours.bundle)
            return self.place.attach(self.image, made)
        bundle = b""
        if by := row.get("by"):
            signed = b"{}" if row.get("about") == "other" else manifest
            bundle = self.sign(SIGNERS[by], kind, content, signed)
        if row.get("tamper") or "json" in row:
            bundle = self._tampered(bundle, row)
        made = attestation_of(kind, content, self.image, "open", created="2026-11-25T00:00:00Z", bundle=bundle)
        raw = (row["raw"] * row.get("times", 1)).encode("latin-1") if "raw" in row else made.content
        media = MEDIA.get(row.get("media", ""), row.get("media", made.media_type))
        return self.place.attach(self.image, Attachment("f", media, raw, {**made.annotations, **row.get("note", {})}))

    @staticmethod
    def _tampered(bundle: bytes, row: Mapping[str, Any]) -> bytes:
        document, more = json.loads(bundle), dict(row.get("json", {}))
        envelope = document["dsseEnvelope"]
        if row.get("tamper"):
            statement = json.loads(base64.b64decode(envelope["payload"]))
            statement["predicate"]["scanner"] = "grype 9, which found nothing"
            payload = base64.b64encode(json.dumps(statement).encode()).decode()
            document["dsseEnvelope"] = {**envelope, "payload": payload}
        if "dsse_envelope" in more:
            more["dsse_envelope"] = envelope
        if "signatures" in more:
            document["dsseEnvelope"] = {**envelope, **more}
            more = {}
        return json.dumps({**more, **document}).encode()

    def withstands(self, *rows: Mapping[str, Any]) -> None:
        """Attach what the rows describe. Only what we signed may change what people read."""
        before, _ = self.read({})
        forged = {self.forge(row): row for row in rows}
        after, ends = self.read(forged)
        wrong = [(row, ends[digest]) for digest, row in forged.items()
                 if ends[digest][0] != row["ends"] or row.get("says", "") not in ends[digest][1]]  # fmt: skip
        assert not wrong
        changed = {name for name in before if before[name] != after[name]}
        is_trusted = any(row["ends"] == "trusted" for row in rows)
        assert changed == ({"catalogue", "findings"} if is_trusted else set()), (before, after)

    def read(self, forged: Collection[str]) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
        """Return what every reader says about the image, and how each forged attachment ended, with the reason.

        What is said leaves out the list of attachments and of problems, which must name the forged ones."""
        plan, name = make_plan(self.project), ImageReference(self.place.registry.host, self.place.name)
        made = CatalogReader(self.project, plan, self.trust, connect=lambda _: self.place.registry).read(NOW)
        ((platform,),) = (image.platforms for image in made.images)
        found = verify_attachments(name.at(self.image.digest), self.place.registry, KINDS, self.trust).findings
        ours = sorted((f for f in found if f.attachment not in forged or f.outcome == "failed"), key=lambda f: f.kind)
        said = {
            "catalogue": platform.model_dump(exclude={"evidence"}),
            "findings": [finding.model_dump(exclude={"attachment"}) for finding in ours],
            "packages": attached_packages(self.place, self.image.digest, self.trust),
        }
        ends = {}
        for digest in forged:
            (reason,) = [file.distrust for file in platform.evidence if file.digest == digest] or ["dropped"]
            problem = next((problem for problem in made.problems if digest in problem), "")
            (outcome,) = [str(finding.outcome) for finding in found if finding.attachment == digest] or ["none"]
            known = "of this kind" not in reason
            possible = {
                "dropped": reason == "dropped" and outcome == "none",
                "ignored": bool(reason) and not known and outcome in ("none", "broken"),
                "broken": bool(problem) and (outcome == "broken" or bool(reason)),
                "distrusted": bool(reason) and known and outcome == "skipped",
                "trusted": not reason and outcome == "passed",
                "copied": not reason and outcome == "failed",
            }
            end = next((end for end, is_so in possible.items() if is_so), outcome)
            ends[digest] = end, f"{reason}; {problem}"
        return said, ends
