"""A project whose images are staged in an in-memory registry, with the result files that publishing needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from string import Template
from typing import Any

from imagebuild.bench.verification import CheckResult, Outcome, Surroundings, VerifyResult
from imagebuild.core.errors import ResultError
from imagebuild.oci.layout import MANIFEST, Descriptor
from imagebuild.oci.registry import Registry
from imagebuild.project.plan import Plan, Target, make_plan
from imagebuild.project.records import BuildResult, Published, PublishResult
from imagebuild.publish.decide import rules_of
from imagebuild.publish.publish import PublishRequest, publish_targets
from imagebuild.render.renderer import Renderer
from imagebuild.verify.rules import IMAGE_CHECKS
from tests.attached import scan, spdx
from tests.conftest import LIBRARY, ROOT, TOOL, Files
from tests.registry_fake import FakeRegistry, index, put_image

HOST = "registry.test"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ORIGIN = {"source": "https://git.example/acme/images", "revision": COMMIT}
"""What the checkout that publishes says of itself."""
AMD64, ARM64 = "linux/amd64", "linux/arm64"
MATRIX, CHECKS = ((ROOT / f"tests/data/publish/{name}.yaml").read_text() for name in ("matrix", "checks"))
OLD, NEW = "tiny-cuda12.9-debian13-runtime", "tiny-cuda13.0-debian13-runtime"

RENDERERS: dict[tuple[str, str], Renderer] = {}
"""Maps host and policy of a site to the renderer of its unchanged project, because a renderer starts a process."""


@dataclass
class Site:
    """A project, a registry, and a folder with result files."""

    root: Path
    fake: FakeRegistry = field(default_factory=lambda: FakeRegistry(HOST))
    policy: str = ""
    """Lines to append to the matrix, beginning with `publish:`."""
    host: str = HOST

    def __post_init__(self) -> None:
        self.files = self.written("project")
        self.evidence = self.root / "evidence"
        self.evidence.mkdir(parents=True, exist_ok=True)
        key = (self.host, self.policy)
        if key not in RENDERERS:
            RENDERERS[key] = Renderer(self.written("unchanged").load())
        self.use(RENDERERS[key])

    def written(self, name: str) -> Files:
        """Write the files of the project to a folder."""
        files = Files(self.root / name)
        files.write("matrix.yaml", MATRIX.replace(HOST, self.host) + self.policy)
        files.component("library", LIBRARY + CHECKS, build="FROM {{ base }} AS library\nRUN true\n")
        files.component("tool", TOOL, build="FROM {{ base }} AS tool\nRUN make\n")
        return files

    def read(self) -> None:
        """Read the project again, after its files changed."""
        self.use(Renderer(self.files.load()))

    def use(self, renderer: Renderer) -> None:
        self.renderer, self.project = renderer, renderer.project
        self.plan: Plan = make_plan(self.project)

    def target(self, name: str = NEW) -> Target:
        return next(target for target in self.plan.targets if target.id == name)

    def stage(
        self, name: str, platform: str, content: bytes = b"layer", registry: Registry | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Push an image for a platform to the staging repository; return its digest."""
        target = self.target(name)
        message = {"imagebuild.target": name, "org.opencontainers.image.version": name}
        message |= {f"imagebuild.component.{c}": version for c, version in target.components.items()}
        message |= {f"imagebuild.axis.{axis}": value for axis, value in target.axes.items()} | dict(labels or {})
        repository = f"acme/{target.image}-staging"
        return put_image(registry or self.fake, repository, content, platform=platform, Labels=message).digest

    def built(self, name: str, manifests: Mapping[str, str], file: str = "", **more: Any) -> BuildResult:
        """Write the result of a build of the Dockerfile that this checkout renders."""
        text = self.renderer.dockerfile(self.target(name)).text
        values = {
            "dockerfile": hashlib.sha256(text.encode()).hexdigest(),
            "target": name, "digest": next(iter(manifests.values())), "tags": (), "platforms": tuple(manifests),
            "size_bytes": None, "seconds": 1.0, "steps": (), "manifests": dict(manifests), "revision": COMMIT,
            "repository": f"{self.host}/acme/tiny-staging", "started": "2026-11-21T10:00:00Z", "builder": "test",
            "source": ORIGIN["source"],
        }  # fmt: skip
        result = BuildResult.model_validate(values | more)
        self.leave(file or f"{name}/{'-'.join(manifests).replace('/', '-')}/result.json", result.model_dump_json())
        return result

    def verified(
        self, digest: str, platform: str = AMD64, file: str = "", outcomes: Mapping[str, Outcome] | None = None,
        name: str = NEW, checks: Iterable[CheckResult] | None = None, runner: str = "docker",
    ) -> VerifyResult:  # fmt: skip
        """Write the result of a verification. `outcomes` are the exceptions from `passing`."""
        stated = {**passing(name), **(outcomes or {})}
        hashes = {rule.name: rule.sha256 for rule in rules_of(self.project, self.target(name))}
        found = [
            CheckResult(
                component=key.split("/")[0], check=key.split("/")[1], outcome=outcome, sha256=hashes.get(key, ""),
                reason="" if outcome == "passed" else f"it was {outcome}",
            )
            for key, outcome in stated.items()
        ]  # fmt: skip
        result = VerifyResult(
            image=f"{self.host}/acme/tiny-staging@{digest}", digest=digest, target=name, platform=platform,
            checks=tuple(found if checks is None else checks), started="2026-11-21T10:30:00+00:00",
            surroundings=Surroundings(
                runner=runner, user="secret-user", facts={"host": "secret-host", "kernel": "6.1"},
                environment={"NCCL_DEBUG": "secret-value"},
            ),
        )  # fmt: skip
        self.leave(file or f"{digest[7:19]}/verify.json", result.model_dump_json())
        return result

    def edit(self, **changed: object) -> dict[str, Any]:
        """Change the result of amd64's verification; return the result before the change."""
        path = next(path for path in self.evidence.rglob("verify.json") if AMD64 in path.read_text())
        document: dict[str, Any] = json.loads(path.read_text())
        path.write_text(json.dumps(document | changed))
        return document

    def refusal(self, row: Mapping[str, Any], connect: Callable[[str], Registry]) -> str:
        """Edit results as a row of tests/data/publish/edited.yaml says; return why nothing is published."""
        self.arrange_edited(row, connect)
        try:
            return self.publish(NEW, connect=connect).reasons
        except ResultError as error:
            return str(error)

    def arrange_edited(self, row: Mapping[str, Any], connect: Callable[[str], Registry]) -> None:
        registry = connect(self.host)
        digests = self.ready(NEW, registry=registry)
        amd, arm, evil = digests[NEW, AMD64], digests[NEW, ARM64], self.stage(NEW, AMD64, b"evil", registry)
        self.scanned(amd)
        put_image(registry, "acme/evil", b"evil")
        one, two, other = (Descriptor(MANIFEST, d, 1, p) for d, p in ((amd, AMD64), (arm, ARM64), (evil, AMD64)))
        hidden = replace(other, annotations={"vnd.docker.reference.type": "attestation-manifest"})
        put = {"BOTH": [one, two], "DOUBLE": [other, one], "HIDDEN": [hidden, one]}
        words = {name: index(registry, "acme/tiny-staging", items) for name, items in put.items()}
        words |= {"AMD": amd, "ARM": arm, "EVIL": evil, "ABSENT": f"sha256:{'7' * 64}", "HOST": self.host, "NEW": NEW}
        for path in sorted(self.evidence.rglob(f"{row['edit']}.json")):
            document = json.loads(path.read_text())
            if AMD64 not in document.get("platforms", document.get("platform")) and "all" not in row:
                continue
            document.pop(row.get("drop"), None)
            for key, value in json.loads(Template(json.dumps(row.get("set", {}))).substitute(words)).items():
                *parents, last = (int(part) if part.isdecimal() else part for part in key.split("."))
                reduce(getitem, parents, document)[last] = value
            path.with_stem("copy" if "copy" in row else path.stem).write_text(json.dumps(document))

    def scanned(self, digest: str, verdict: str = "passed", platform: str = AMD64) -> None:
        self.leave(f"{digest[7:19]}/scan.json", json.dumps(scan(digest, verdict, platform)))

    def listed(self, digest: str) -> None:
        """Write an SBOM."""
        self.leave(f"{digest[7:19]}/sbom.spdx.json", json.dumps(spdx(digest)))

    def leave(self, file: str, text: str) -> Path:
        path = self.evidence / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def ready(
        self, *names: str, content: bytes = b"layer", registry: Registry | None = None,
        outcomes: Mapping[str, Outcome] | None = None, **build: Any,
    ) -> dict[tuple[str, str], str]:  # fmt: skip
        """Stage, build and verify targets for both platforms; map each pair of target and platform to its digest."""
        digests = {}
        for name in names or (NEW,):
            for platform in (AMD64, ARM64):
                digest = self.stage(name, platform, content + platform.encode() + name.encode(), registry)
                self.built(name, {platform: digest}, **build)
                self.verified(digest, platform, name=name, outcomes=outcomes)
                digests[name, platform] = digest
        return digests

    def publish(self, *select: str, connect: Callable[[str], Registry] | None = None, **more: Any) -> Done:
        request = PublishRequest(select=select, folders=[self.evidence], **{"origin": ORIGIN} | more)
        return Done(publish_targets(self.renderer, self.plan, request, connect or (lambda _: self.fake)))

    def tags(self, repository: str = "acme/tiny") -> dict[str, str]:
        """Map the published tags to their digests."""
        held = self.fake.repositories.get(repository)
        return {} if held is None else dict(held.tags)


@dataclass(frozen=True)
class Done:
    """The result of publishing."""

    result: PublishResult

    @property
    def only(self) -> Published:
        (target,) = self.result.targets
        return target

    @property
    def reasons(self) -> str:
        return "\n".join(reason for target in self.result.targets for reason in target.reasons)

    @property
    def states(self) -> list[str]:
        return [target.state for target in self.result.targets]


def passing(name: str) -> dict[str, Outcome]:
    """Return the outcomes of a target's checks on a machine without GPUs: passed, or skipped if they need a GPU."""
    found: dict[str, Outcome] = {f"image/{check}": "passed" for check in IMAGE_CHECKS}
    found |= {"library/works": "passed", "library/on-gpu": "skipped", "library/on-two": "passed"}
    found["library/newest"] = "passed" if name == NEW else "skipped"
    return found
