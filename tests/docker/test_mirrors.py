"""A build can download from mirrors, without a trace of the mirror in the image."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from docker import DockerClient

from tests.conftest import LOCK, ROOT
from tests.docker.conftest import COMPONENT, TINY_TARGET, Tiny, own_cache
from tests.docker.site import PASSWORD, Content, Site, served
from tests.docker.test_quickstart import files

pytestmark = pytest.mark.docker

NOWHERE = "http://nowhere.invalid"


def fetch_all(tiny: Tiny, content: Content, address: str) -> None:
    """Let `library` install a package, `tool` use a Git repository, and `plugin` use an archive."""
    host = address.partition("://")[2].partition(":")[0]
    text = (ROOT / "tests/data/install.j2").read_text().replace("ADDRESS", address).replace("HOST", host)
    tiny.write("dockerfiles/components/library/build.j2", text.replace("NONCE", tiny.nonce))
    use_sources(tiny, content, address)


def use_sources(tiny: Tiny, content: Content, address: str, repository: str = "main") -> None:
    more = "/src/third/sub/sub.c" if repository == "main" else ""
    tiny.component("tool", COMPONENT.format(name="tool") + f"git: {address}/{repository}.git\n", build=(
        "{{ source(name, git, commit) }}\n\nFROM {{ base }} AS tool\n"
        "RUN --mount=type=bind,from=tool-source,target=/src "
        f"cat /src/{repository}.c /src/.dockerignore {more} && test -x /src/{repository}.sh && "
        "mkdir -p /out/runtime && cp /proc/sys/kernel/random/uuid /out/runtime/tool\n"
    ))  # fmt: skip
    tiny.component("plugin", COMPONENT.format(name="plugin") + f"archive: {address}/tool.tar\n", build=(
        "{{ archive(name, archives) }}\n\nFROM {{ base }} AS plugin\n"
        "RUN --mount=type=bind,from=plugin-source,target=/src cat /src/tool.tar && "
        "mkdir -p /out/runtime && cp /proc/sys/kernel/random/uuid /out/runtime/plugin\n"
    ))  # fmt: skip
    git = {f"{address}/{repository}.git 2.{tiny.nonce}": content.commits[repository]}
    tiny.lock({**LOCK, "git": git, "archives": {f"{address}/tool.tar": content.sha256}})


def configuration(tiny: Tiny, site: Site, address: str, login: str = "") -> dict[str, str]:
    """Return environment variables for a configuration with a mirror, and for a new cache that has only the bases."""
    settings: dict[str, object] = {"mirrors": {"downloads": {f"{address}/": f"{site.url}/"}}}
    if login:
        user, _, password = login.partition(":")
        # apt sends passwords to servers without TLS only if the machine's name in netrc begins with http://.
        machines = [site.url, site.host.partition(":")[0]]
        tiny.write("netrc", "".join(f"machine {name} login {user} password {password}\n" for name in machines))
        settings["netrc"] = str(tiny.root / "netrc")
    tiny.write("config.yaml", json.dumps(settings))
    return {"IMAGEBUILD_CONFIG": str(tiny.root / "config.yaml"), **own_cache(tiny.root)}


@pytest.fixture
def content(tiny: Tiny) -> Content:
    return Content(tiny.root / "site", tiny.nonce)


def test_everything_comes_from_the_mirror(tiny: Tiny, content: Content, client: DockerClient, tmp_path: Path) -> None:
    fetch_all(tiny, content, NOWHERE)
    login = f"me:{PASSWORD}"
    with served(content.folder, login) as site:
        tiny.build(TINY_TARGET, expect=0, **configuration(tiny, site, NOWHERE, login))
    assert {"/tool.tar", "/repo/Packages", "/repo/mirrored_1_all.deb"} <= set(site.asked)
    found = list(files(client, tiny.result().tags[0], tmp_path))
    assert dict(found)["mirrored"].decode() == tiny.nonce
    assert dict(found)["preferences.d/test"].decode().splitlines()[1] == "Pin: origin nowhere.invalid"
    found += [(str(p), p.read_bytes()) for p in (tiny.root / "build").rglob("*") if p.is_file()]
    secrets = [site.host.encode(), PASSWORD.encode()]
    # The log may name the mirror, but contains no password.
    named = [name for name, data in found for secret in secrets if secret in data]
    assert not [name for name in named if not name.endswith("/build.log")]
    assert not [name for name, data in found if PASSWORD.encode() in data]


def test_the_step_leaves_no_trace_of_the_program(tiny: Tiny, content: Content, tmp_path: Path) -> None:
    """The file system of the build stage contains no file of the package proxy."""
    fetch_all(tiny, content, NOWHERE)
    with served(content.folder) as site:
        tiny.build(TINY_TARGET, "--stage", "library", expect=0, **configuration(tiny, site, NOWHERE))
        bake = json.loads((tiny.root / "build" / "bake.json").read_text())
        given = bake["target"][TINY_TARGET.replace(".", "_")]["contexts"].items()
        contexts = [f"--build-context={name}={value}" for name, value in given if not value.startswith("target:")]
        text = (tiny.root / "build" / TINY_TARGET / "Dockerfile").read_text()
        text += "\nFROM scratch\nCOPY --from=library / /\n"
        command = ["docker", "buildx", "build", "--output", f"type=local,dest={tmp_path}/out", *contexts, "-"]
        own = {**tiny.environ, "TMPDIR": str(tmp_path)}  # buildx leaves temporary files there
        subprocess.run(command, input=text, text=True, check=True, capture_output=True, env=own)
    root = tmp_path / "out"
    assert (root / "out/runtime/mirrored").read_text() == tiny.nonce
    assert not list((root / "usr/local/sbin").iterdir())
    assert not list((root / "dev").iterdir())
    assert not [
        p for p in root.rglob("*") if p.is_file() and not p.is_symlink() and site.host.encode() in p.read_bytes()
    ]


def test_who_uses_a_mirror_shares_the_cache(tiny: Tiny, content: Content) -> None:
    """For sources without submodules; see docs/lock.md."""
    with served(content.folder) as public:
        use_sources(tiny, content, public.url, "sub")
        tiny.build(TINY_TARGET)
        with served(content.folder) as mirror:
            tiny.build(TINY_TARGET, expect=0, **configuration(tiny, mirror, public.url))
    assert {"/tool.tar", "/sub.git/info/refs?service=git-upload-pack"} <= set(mirror.asked)
    assert not [step.name for step in tiny.result().steps if not step.cached]


def test_a_mirror_that_has_something_else(tiny: Tiny, content: Content) -> None:
    use_sources(tiny, content, NOWHERE)
    (content.folder / "tool.tar").write_text("another")
    with served(content.folder) as site:
        done = tiny.build(TINY_TARGET, expect=5, **configuration(tiny, site, NOWHERE))
    assert f"{NOWHERE}/tool.tar: the sha256 is" in done.err
    assert content.sha256 in done.err


def test_a_folder_replaces_a_source_in_git(tiny: Tiny, tmp_path: Path) -> None:
    """Only the content of the folder changes the cache, not its path or the times of its files."""
    address = "https://nowhere.invalid/tool.git"
    tiny.component("tool", COMPONENT.format(name="tool") + f"git: {address}\n", build=(
        "{{ source(name, git, commit) }}\nFROM {{ base }} AS tool\n"
        "COPY --from=tool-source / /src\nRUN mkdir -p /out/runtime && cat /src/* > /out/runtime/tool\n"
    ))  # fmt: skip
    tiny.lock({**LOCK, "git": {f"{address} 2.{tiny.nonce}": "b" * 40}})

    def build(folder: str, content: str) -> set[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "main.c").write_text(f"{content} of {tiny.nonce}\n")
        tiny.build(TINY_TARGET, "--source", f"tool={tmp_path / folder}")
        return {step.stage for step in tiny.result().steps if not step.cached} - {"image"}

    assert build("one", "first") == {"library", "tool"}
    assert build("two", "first") == set()
    assert build("two", "second") == {"tool"}
    assert "/nowhere.invalid" not in str(tiny.result().steps)
