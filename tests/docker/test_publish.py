"""From the build to a pull by tag, with real builds, a real registry, and a faulty network."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.oci.layout import Manifest, blobs_of, digest_of, encode_json, manifests_of
from imagebuild.oci.registry import Registry, connect_registry
from imagebuild.project.records import BuildResult, Catalog, Published, PublishResult
from tests.conftest import git, ran
from tests.docker.conftest import REPOSITORY, Services, Tiny, finish, install, until, watched
from tests.faulty import Faulty, in_front_of

pytestmark = pytest.mark.docker

OLD, NEW = "tiny-cuda12.9-debian13-runtime", "tiny-cuda13.0-debian13-runtime"
ALIASES = '    aliases: [{tag: "{repository}/{image}:latest", when: {variant: runtime}}]\n'
CHECK = 'checks: [{name: made, description: It is there, run: "cat /library"}]\n'


@dataclass
class Shop:
    """A project with two targets that are built, pushed and verified, and a registry behind a proxy."""

    tiny: Tiny
    faulty: Faulty
    registry: Registry
    evidence: Path

    def args(self, name: str, *more: str | Path, host: str = "") -> list[str | Path]:
        """Return the arguments of `imagebuild` to publish to repositories with this name."""
        place = f"{host or self.faulty.address}/{REPOSITORY}/{name}"
        return ["publish", "--registry", place, "--results", self.evidence, *more]

    def publish(self, name: str, host: str = "") -> dict[str, Published]:
        out = self.tiny.root.parent / f"{name}.json"
        self.tiny.imagebuild(*self.args(name, "--json", out, host=host))
        done = {target.target: target for target in PublishResult.model_validate_json(out.read_text()).targets}
        assert {target.state for target in done.values()} == {"published"}
        return done

    def tags(self, name: str) -> dict[str, str]:
        """Map tags to digests. This registry also stores attestations under tags; they are left out."""
        place = self.registry.at(f"{REPOSITORY}/{name}/tiny")
        return {tag: str(place.digest(tag)) for tag in place.tags() if not tag.startswith("sha256-")}

    def complete(self, name: str) -> None:
        """Assert that all manifests and blobs of all tags exist."""
        place = self.registry.at(f"{REPOSITORY}/{name}/tiny")
        for digest in self.tags(name).values():
            for child in manifests_of(place.manifest(digest).document):
                assert all(place.has_blob(blob.digest) for blob in blobs_of(place.manifest(child.digest).document))

    def result(self, target: str) -> BuildResult:
        return BuildResult.model_validate_json((self.evidence / target / "result.json").read_text())


@pytest.fixture(scope="module")
def shops(
    services: Services, client: DockerClient, host: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("publish")
    faulty = services.emptied().proxy
    with watched(client, host) as environ:
        (folder / "project").mkdir()
        tiny = Tiny(folder / "project", environ)
        tiny.replace("matrix.yaml", '{variant}"]\n', '{variant}-{revision}"]\n' + ALIASES)
        tiny.replace("matrix.yaml", "linux/amd64, linux/arm64", f"linux/{client.version()['Arch']}")
        tiny.add("library", tiny.new + CHECK)
        place = f"{faulty.address}/{REPOSITORY}"
        matrix = tiny.root / "matrix.yaml"
        matrix.write_text(matrix.read_text() + f'publish: {{staging: "{place}/{{image}}-staging"}}\n')
        for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "x"]):
            git(tiny.root, *command)
        made = Shop(tiny, faulty, connect_registry(services.registry, environ={}), folder / "evidence")
        tiny.build(OLD, NEW, "--push", "--registry", place, "--folder", made.evidence)
        for target in (OLD, NEW):
            image = f"{made.result(target).repository}@{made.result(target).digest}"
            tiny.imagebuild("verify", image, "--pull", "--json", made.evidence / target / "verify.json")
        yield made


@pytest.fixture
def shop(shops: Shop) -> Shop:
    shops.faulty.clear()
    return shops


def test_from_build_to_pull_over_a_bad_network(shop: Shop, client: DockerClient) -> None:
    faulty = shop.faulty
    faulty.rule("busy", "POST", "mount=", seconds=1)
    faulty.rule("drop-after", "POST", "mount=")
    faulty.rule("lose", "PUT", "/blobs/uploads/")
    faulty.rule("broken", "PUT", "/manifests/", times=2)
    faulty.rule("drop-after", "PUT", "/manifests/sha256:")
    faulty.rule("lose", "PUT", "/manifests/1")  # a tag
    faulty.rule("drop-after", "PUT", "/manifests/latest")
    faulty.rule("drop-before", "HEAD", times=3)
    done = shop.publish("shop")
    assert not [rule for rule in faulty.rules if rule.times], "a fault was not met"
    revision = str(shop.result(NEW).revision)[:7]
    assert shop.tags("shop") == {
        f"12.9-runtime-{revision}": done[OLD].digest,
        f"13.0-runtime-{revision}": done[NEW].digest,
        "latest": done[NEW].digest,
    }
    shop.complete("shop")

    assert done[NEW].attached == {"provenance": 2, "sbom": 2, "verification": 2}  # for the platform and the index

    # The tag names the image that was built and verified, and the image runs.
    name = f"{faulty.address}/{REPOSITORY}/shop/tiny:latest"
    image = client.images.pull(name)
    assert client.containers.run(image, "cat /library", remove=True).startswith(b"1.")
    verified = json.loads((shop.evidence / NEW / "verify.json").read_text())
    assert list(done[NEW].platforms.values()) == [verified["digest"]] == [shop.result(NEW).digest]
    shop.tiny.imagebuild("verify", name, "--only", "image/plan", "--only", "library/made")
    shop.tiny.imagebuild("attest", "verify", name, "--require", "provenance,verification")


def test_to_another_registry_blobs_pass_through(shop: Shop) -> None:
    """Blobs cannot be mounted across registries, so each is uploaded once, despite faults.

    The other registry is the same registry behind a second proxy.
    """
    with in_front_of(shop.faulty.upstream) as other:
        other.rule("cut", "PUT", "/blobs/uploads/")
        other.rule("forget", "PUT", "/blobs/uploads/")
        shop.publish("away", host=other.address)
        assert sum(r.bytes for r in other.requests if r.kind == "upload") > (shop.result(NEW).size_bytes or 0)
    shop.complete("away")


def test_killed_in_the_middle_it_goes_on_from_there(shop: Shop) -> None:
    """The command ends at once, although the registry does not answer. The next run continues."""
    slow = shop.faulty.rule("slow", "PUT", "/manifests/sha256:", seconds=600)
    for how, status in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        slow.times = 9
        process = shop.tiny.imagebuild.start(*shop.args("killed"))
        assert until(lambda: slow.times < 9)  # blobs are copied, and manifests are being sent
        process.send_signal(how)
        assert finish(process).status == status
        assert shop.tags("killed") == {}
    shop.faulty.clear()
    shop.publish("killed")
    assert sum("mount=" in r.path for r in shop.faulty.requests) < 10, "blobs that were there were mounted again"
    shop.complete("killed")


def other_build(shop: Shop, folder: Path) -> Path:
    """Stage another image of the same commit with a different digest; return the folder with its results."""
    result = shop.result(NEW)
    place = shop.registry.at(f"{REPOSITORY}/tiny-staging")
    manifest = place.manifest(str(result.digest))
    config = json.loads(place.blob(manifest.document["config"]["digest"]))
    config["config"]["Labels"]["org.opencontainers.image.created"] = "later"
    content = encode_json(config)
    place.put_blob(content, digest_of(content))
    named = {**manifest.document["config"], "digest": digest_of(content), "size": len(content)}
    digest = place.put_manifest(Manifest(encode_json({**manifest.document, "config": named}), manifest.media_type))
    for name in ("result.json", "verify.json"):
        text = (shop.evidence / NEW / name).read_text().replace(str(result.digest), digest)
        (folder / NEW).mkdir(parents=True, exist_ok=True)
        (folder / NEW / name).write_text(text)
    return folder


def test_two_publishers_of_one_tag(shop: Shop, tmp_path: Path) -> None:
    shops = (shop, replace(shop, evidence=other_build(shop, tmp_path / "other")))
    commands = [own.args("two", NEW, "--json", tmp_path / f"{i}.json") for i, own in enumerate(shops)]
    ended = [finish(process) for process in [shop.tiny.imagebuild.start(*command) for command in commands]]
    results = [PublishResult.model_validate_json((tmp_path / f"{i}.json").read_text()).targets[0] for i in (0, 1)]
    assert results[0].digest != results[1].digest
    revision = str(shop.result(NEW).revision)[:7]
    tags = shop.tags("two")
    assert set(tags) == {f"13.0-runtime-{revision}", "latest"}
    shop.complete("two")
    for done, result in zip(ended, results, strict=True):
        assert done.status in (0, 1, 4)
        assert "Traceback" not in done.err
        if done.status:
            assert tags[f"13.0-runtime-{revision}"] in "".join(result.reasons)
    assert any(done.status for done in ended), "both say that the tag is theirs"


def test_publishers_of_two_targets_at_once(shop: Shop) -> None:
    started = [shop.tiny.imagebuild.start(*shop.args("apart", target)) for target in (OLD, NEW)]
    for done in map(finish, started):
        assert (done.status, "Traceback" in done.err) == (0, False), done.out + done.err
    assert len(shop.tags("apart")) == 3
    shop.complete("apart")


# The catalogue of published images


def test_what_was_published_is_in_the_catalogue(shop: Shop, client: DockerClient, tmp_path: Path) -> None:
    shop.publish("catalogue")
    site, place = tmp_path / "site", f"{shop.faulty.address}/{REPOSITORY}/catalogue"
    shop.faulty.rule("busy", "GET", "/manifests/", seconds=1)
    shop.tiny.imagebuild("catalog", "--registry", place, "-o", site)
    catalog = Catalog.model_validate_json((site / "images.json").read_text())
    assert (catalog.repository, catalog.problems) == (place, ())
    assert [image.target for image in catalog.images] == [NEW, OLD]
    named = shop.tags("catalogue")
    for image in catalog.images:
        result = shop.result(image.target)
        assert {named[tag] for tag in (*image.tags, *image.aliases)} == {image.digest}
        assert image.tags == (f"{image.axes['cuda']}-runtime-{str(result.revision)[:7]}",)
        assert image.versions == {"library": f"1.{shop.tiny.nonce}", "tool": f"2.{shop.tiny.nonce}"}
        (platform,) = image.platforms
        assert (platform.digest, platform.size_bytes) == (*result.manifests.values(), result.size_bytes)
        (checks,) = platform.checks
        assert (checks.failed, checks.runner) == (0, "docker")
        assert checks.passed >= 1
        assert "verification" in {entry.kind for entry in platform.evidence}
    assert [image.aliases for image in catalog.images] == [("latest",), ()]
    # An image's article has commands by tag and by digest.
    image = catalog.images[0]
    by_tag, by_digest = (f"docker pull {image.repository}:{image.tag}", f"docker pull {image.reference}")
    assert {by_tag, by_digest} <= set(re.findall(r">(docker pull [^<]+)<", (site / "index.html").read_text()))
    verify = ("verify", image.reference, "--only", "library/*")
    assert "--pull" in shop.tiny.imagebuild(*verify, expect=2).err
    shop.tiny.imagebuild(*verify, "--pull")

    def is_there() -> bool:
        # Not `images.list()`, which fails if another client removes an image meanwhile.
        return image.reference in {name for stored in client.api.images() for name in stored["RepoDigests"] or ()}

    assert not is_there(), "what was pulled stayed"
    killed = shop.tiny.imagebuild.start(*verify, "--pull")
    assert until(is_there)
    killed.kill()
    killed.communicate()
    shop.tiny.imagebuild(*verify, "--pull")
    assert not is_there(), "the next run did not remove what a killed run had pulled"


# Other programs that pull and run published images


OTHERS = {"skopeo": "skopeo", "umoci": "umoci", "runc": "runc", "ctr": "containerd"}
"""Maps each program to its package."""


def call(*command: str | Path) -> str:
    """Run a program; return its output."""
    install(OTHERS)
    done = ran(*command, env=os.environ | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"))
    assert not done.returncode, done.stderr
    return done.stdout


def test_skopeo_copies_it_umoci_unpacks_it_without_root_and_runc_runs_it(shop: Shop, tmp_path: Path) -> None:
    """Apptainer also unpacks images with umoci's code."""
    result, bundle = shop.result(NEW), tmp_path / "bundle"
    image = f"docker://{result.repository}@{result.digest}"
    call("skopeo", "copy", "--src-tls-verify=false", image, f"oci:{tmp_path}/copy:it")
    call("umoci", "unpack", "--rootless", "--image", f"{tmp_path}/copy:it", bundle)
    config = json.loads((bundle / "config.json").read_text())
    assert {"imagebuild.target": NEW}.items() <= config["annotations"].items()
    config["process"] |= {"terminal": False, "args": ["sh", "-c", "cat /library /tool"]}
    (bundle / "config.json").write_text(json.dumps(config))
    printed = call("runc", "--root", tmp_path / "state", "run", "--bundle", bundle, f"{REPOSITORY}-umoci")
    assert [line.split()[0] for line in printed.splitlines()] == [f"1.{shop.tiny.nonce}", f"2.{shop.tiny.nonce}"]


def test_containerd_pulls_and_runs_it(shop: Shop) -> None:
    result = shop.result(NEW)
    image = f"{result.repository}@{result.digest}"
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        place, socket = Path(folder), Path(folder, "socket")
        (place / "config.toml").write_text(
            f'version = 2\nroot = "{place}/root"\nstate = "{place}/state"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{socket}"\n'
        )
        call("containerd", "--version")
        with (
            (place / "log").open("w") as log,
            subprocess.Popen(["containerd", "--config", place / "config.toml"], stdout=log, stderr=log) as server,
        ):
            try:
                assert until(socket.exists), (place / "log").read_text()
                call("ctr", "--address", socket, "image", "pull", "--plain-http", image)
                printed = call("ctr", "--address", socket, "run", "--rm", image, "it", "cat", "/library")
            finally:
                server.terminate()
    assert printed.startswith(f"1.{shop.tiny.nonce} ")
