"""The "worlds": archives and repositories that differ from the published facts, and what imagebuild does with them.

Each row of tests/data/worlds changes the stand-in of tests/upstream. imagebuild adapts to the difference, notes the
difference, or stops with a message. `--update-golden` writes the table in tests/golden/hpcx-worlds.md.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard

from imagebuild.core.errors import ImagebuildError
from imagebuild.core.fields import Arch
from imagebuild.core.http import Patience
from imagebuild.core.run import run_program
from imagebuild.core.settings import Mirrors
from imagebuild.lock.facts import Contents, image_facts, tree_facts, unpack
from imagebuild.lock.report import write_report
from imagebuild.lock.repositories import choose
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import LockedRepository, PackageSource, TreeFacts, Unpacked, key_of, lacks
from imagebuild.project.plan import Plan
from imagebuild.project.project import Project
from imagebuild.project.select import select_one
from imagebuild.render.image import adaptations
from imagebuild.render.renderer import Renderer
from tests.conftest import ROOT, data, ran
from tests.unit.image_files import elf
from tests.unit.lock.lock_fakes import lock_of
from tests.upstream import bases, hpcx, packages
from tests.upstream.hpcx import File, Release, Tree
from tests.upstream.keys import Keys
from tests.upstream.server import Server

CASES = data("cases/worlds")

pytestmark = pytest.mark.programs
HPCX = "/opt/hpcx"
PAGE = ROOT / "tests/golden/hpcx-worlds.md"
REMEDY = re.compile("[;,] (so )?(try again|set|if the owner)|\\(404\\)")
"""The remedy at the end of each error message. For a missing file (404), the command `lock` prints the remedy."""
Row = dict[str, Any]
ARCHIVES: list[Row] = data("worlds/archives")
WORLDS: list[Row] = [*ARCHIVES, *data("worlds/repositories")]
Facts = tuple[dict[str, str], tuple[str, ...], TreeFacts]
"""The environment variables of an image, the notes about them, and the facts of the archive for amd64."""


def line(row: Row, verdict: str, sentence: str) -> str:
    """Return a row of the table: the world, the result and the message."""
    return f"| {row['says']} | {verdict} | {sentence} |"


@pytest.fixture(scope="module")
def unpacked(project: Project) -> Unpacked:
    found = project.components["hpcx"].model.unpacked
    assert found
    return found


Shown = Callable[[str], Facts]
"""A function that returns what is read from a release as it was published."""


@pytest.fixture(scope="module")
def shown(unpacked: Unpacked, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    folder = tmp_path_factory.mktemp("shown")
    return cache(lambda version: read({"version": version}, unpacked, folder / version))


@pytest.mark.parametrize("row", WORLDS, ids=lambda row: row["says"])
def test_what_becomes_of_each_world(
    row: Row, unpacked: Unpacked, shown: Shown, keys: Keys, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    is_archive = row in ARCHIVES
    found = archive_line(row, unpacked, shown, tmp_path) if is_archive else repository_line(row, keys, tmp_path / "r")
    if request.config.getoption("--update-golden"):
        others = (known for known in PAGE.read_text().splitlines() if not known.startswith(f"| {row['says']} |"))
        PAGE.write_text("\n".join([*others, found, ""]))
    assert found in PAGE.read_text().splitlines(), f"{PAGE} is stale; run `make golden` and review the diff"


def test_the_table_has_each_world_once(request: pytest.FixtureRequest) -> None:
    head, rule, *lines = PAGE.read_text().splitlines()
    if request.config.getoption("--update-golden"):
        known = {found.split(" | ")[0]: found for found in lines}
        lines = [known[f"| {row['says']}"] for row in WORLDS]
        PAGE.write_text("\n".join([head, rule, *lines, ""]))
    assert [found.split(" | ")[0] for found in lines] == [f"| {row['says']}" for row in WORLDS]


# Archives


def changed_release(known: Release, row: Row) -> Release:
    """Return the facts of a release with the changes of a row."""
    lists: dict[str, Any] = dict(known["lists"])
    match row.get("lists"):
        case "reversed":
            lists = {name: parts[::-1] for name, parts in lists.items()}
        case "first again":
            lists = {name: (*parts, parts[0]) for name, parts in lists.items()}
        case dict() as others:
            lists |= others
    lists = {n: tuple(p for p in parts if p != row.get("not-in-lists")) for n, parts in lists.items() if parts}
    variables = {name: v for name, v in {**known["variables"], **row.get("variables", {})}.items() if v is not None}
    mpi = {"default": row["mpi"]} if "mpi" in row else known["mpi"]
    links = {} if row.get("no-links") else known["links"]
    built_in = {"folder": row["built-in"]} if "built-in" in row else known["built-in"]
    return known | {"lists": lists, "variables": variables, "mpi": mpi, "links": links, "built-in": built_in}


def changed_tree(tree: Tree, row: Row) -> Tree:
    """Return the tree of an archive with the changes of a row."""
    tree = {path: file for path, file in tree.items() if not path.startswith(tuple(row.get("without", ())))}
    for old, new, paths in row.get("texts", ()):
        for path in [path for path in tree if re.match(paths, path)]:
            tree[path] = replace(tree[path], content=tree[path].content.replace(old.encode(), new.encode()))
    for path, what in row.get("add", {}).items():
        match what:
            case {"link": target}:
                tree[path] = File(link=target)
            case {"needed": _}:
                tree[path] = File(elf(**row["add"][path]))
            case text:
                tree[path] = File(text.encode("latin-1"))
    return tree


def carry_out(message: str, row: Row, unpacked: Unpacked, shown: Shown, folder: Path) -> None:
    """Carry out each remedy that a message about an archive proposes. An archive must be read afterwards."""
    changes = [row["adapted"]] if "adapt `unpacked`" in message else []
    if found := re.search(r"add (\S+) to `unpacked.(left-out|replaced)`", message):
        replaced = {"ompi": (*unpacked.replaced["ompi"], found[1])}
        changes.append(
            {"left-out": {"left_out": (*unpacked.left_out, found[1])}, "replaced": {"replaced": replaced}}[found[2]]
        )
    for i, change in enumerate(changes):
        assert read(row, unpacked.model_copy(update=change), folder / f"remedy{i}")[0]
    assert changes or "choose another version" in message
    if "choose another version" in message:
        assert shown("2.25.1")[0]


def read(row: Row, unpacked: Unpacked, folder: Path) -> Facts:
    """Return what `lock` reads from an archive. The archive is ours, so its script is not isolated."""
    found: dict[Arch, TreeFacts] = {}
    version = row.get("version", hpcx.NEWEST)
    sides: dict[Arch, tuple[str, Row | None]] = {"amd64": ("x86_64", row), "arm64": ("aarch64", row.get("aarch64"))}
    for arch, (cpu, change) in sides.items():
        if change is not None:
            which = hpcx.Distribution("ubuntu24.04", 13, cpu, version)
            tree = changed_tree(hpcx.files(changed_release(hpcx.release(version), change), which), change)
            top = hpcx.unpack(tree, folder / which.name)
            if "packed" in row:
                top = repacked(top, row["packed"], unpacked)
            found[arch] = tree_facts(run_program, top, unpacked, isolated=False)
    return *unpacked.environment(found), found["amd64"]


def repacked(top: Path, how: Row, unpacked: Unpacked) -> Path:
    """Pack a tree in another form, and unpack it as `lock` does."""
    return unpack(pack(top, how), top.parent / "unpacked", unpacked.needs)


def pack(top: Path, how: Row) -> Path:
    path = top.parent / "archive"
    if "holes" in how:
        with (top / how["holes"]).open("wb") as file:
            file.truncate(1 << 20)
        plain = path.with_suffix(".tar")
        ran("tar", "--sparse", f"--format={how['tar']}", "-cf", plain, "-C", top.parent, top.name, check=True)
        path.write_bytes(bz2.compress(plain.read_bytes()))  # a minimal Debian has no bzip2
        return path

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.mtime = how.get("owner", member.uid), how.get("mtime", member.mtime)
        return member

    mode: Any = f"w:{how.get('compression', 'bz2')}"
    with tarfile.open(path, mode, format=how.get("format", tarfile.PAX_FORMAT)) as archive:
        for name in how.get("names", [f"{how.get('prefix', '')}{top.name}"]):
            archive.add(top, name, filter=owned)
        for name, target in how.get("hard-links", {}).items():
            member = tarfile.TarInfo(name.format(top=top.name))
            member.type, member.linkname = tarfile.LNKTYPE, target.format(top=top.name)
            archive.addfile(member)
    return path


def differing(before: TreeFacts, after: TreeFacts) -> Iterator[str]:
    """Yield the names of facts that differ, such as `sources` or `environment.PATH`."""
    old, new = before.model_dump(by_alias=True), after.model_dump(by_alias=True)
    for name, value in new.items():
        if isinstance(value, dict):
            for part in sorted({*old[name], *value}):
                if old[name].get(part) != value.get(part):
                    yield f"{name}.{part}"
        elif old[name] != value:
            yield name


def archive_line(row: Row, unpacked: Unpacked, shown: Shown, folder: Path) -> str:
    if row.get("stops"):
        with pytest.raises(ImagebuildError) as stopped:
            read(row, unpacked, folder)
        carry_out(str(stopped.value), row, unpacked, shown, folder)
        return line(row, "stops", str(stopped.value))
    env, notes, tree = read(row, unpacked, folder)
    for name, wanted in row.get("env", {}).items():
        assert env.get(name) == wanted, name
    for name, folders in row.get("begins", {}).items():
        assert env[name].split(":")[: len(folders.split())] == [f"{HPCX}/{folder}" for folder in folders.split()]
    assert all(chain.from_iterable(value.split(":") for name, value in env.items() if name.endswith("PATH")))
    facts = tree.model_dump()
    for name, wanted in row.get("facts", {}).items():
        held: Any = [plugin for _, plugin in facts[name]] if name == "plugins" else facts[name]
        match wanted:
            case str():
                assert wanted in held
            case dict():
                assert {part: held.get(part) for part in wanted} == wanted
            case _:
                assert list(held) == wanted
    if row["says"].endswith("as shown"):
        return line(row, "adapted", "<br>".join(notes))
    _, known, before = shown(hpcx.NEWEST)
    if new := [note for note in notes if note not in known]:
        return line(row, "adapted", "<br>".join(new))
    changed = list(differing(before, tree))
    return line(row, "noted" if changed else "taken as it is", ", ".join(changed))


KINDS = {
    "fifo": tarfile.FIFOTYPE,
    "device": tarfile.CHRTYPE,
    "global": tarfile.XGLTYPE,
    "file": tarfile.REGTYPE,
    "folder": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "hardlink": tarfile.LNKTYPE,
}


def made_from(report: Any, path: Path) -> Path:
    """Write an archive with what a report says about another archive."""
    with tarfile.open(path, "w") as archive:
        for kind, mode, _, name, target in report["members"]:
            member, inner = tarfile.TarInfo(name), name.removeprefix("./").partition("/")[2]
            member.type, member.mode, member.linkname = KINDS[kind], mode, target
            content = report["texts"].get(inner, "").encode()
            if inner in report["libraries"]:
                content = elf(**report["libraries"][inner])
            member.size = len(content) if kind == "file" else 0
            archive.addfile(member, io.BytesIO(content))
    return path


def outcome(path: Path, unpacked: Unpacked, folder: Path) -> tuple[object, Any]:
    """Return the facts of an archive or the message of the stop, and the report about the archive as JSON."""
    report = Contents()
    found: object
    try:
        top = unpack(path, folder, unpacked.needs, report)
        found = tree_facts(run_program, top, unpacked, isolated=False, contents=report)
    except ImagebuildError as stopped:
        found = str(stopped)
    written = write_report(folder.parent, [], [], {"a": report}, [])
    return found, json.loads(written.read_text())["archives"]["a"]


TRIED = [row for row in ARCHIVES if {"stops", "packed"} & row.keys() or "facts" in row]
# The reader stops at the header of this format, so the report has only the message, which names the file.
TRIED = [row for row in TRIED if row.get("packed", {}).get("tar") != "gnu"]


@pytest.mark.parametrize("row", TRIED, ids=lambda row: row["says"])
def test_a_report_is_enough_to_make_the_archive_again(row: Row, unpacked: Unpacked, tmp_path: Path) -> None:
    which = hpcx.Distribution("ubuntu24.04", 13)
    tree = changed_tree(hpcx.files(changed_release(hpcx.release(hpcx.NEWEST), row), which), row)
    path = pack(hpcx.unpack(tree, tmp_path / which.name), row.get("packed", {}))
    first, report = outcome(path, unpacked, tmp_path / "first")
    assert isinstance(first, str) or len(report["members"]) >= len(tree)
    again, _ = outcome(made_from(report, tmp_path / "again.tar"), unpacked, tmp_path / "second")
    assert first == again


def test_archives_that_are_none(tmp_path: Path) -> None:
    which = hpcx.Distribution("ubuntu24.04", 13)
    whole, short = tmp_path / "whole", tmp_path / "short"
    hpcx.pack(hpcx.files(hpcx.release(hpcx.NEWEST), which), which, whole)
    short.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert unpack(whole, tmp_path / "a").name == which.name
    with pytest.raises(ImagebuildError, match="expected a tar archive, but it cannot be unpacked"):
        unpack(short, tmp_path / "b")
    (tmp_path / "page").write_text("<html>")
    with pytest.raises(ImagebuildError, match="expected a tar archive"):
        unpack(tmp_path / "page", tmp_path / "c")


# Repositories

VERSIONS = ("libnccl2 2.30.7-1+cuda13.3", "libnccl2 2.32.3-1+cuda12.9", "libnccl2 2.32.3-1+cuda13.4", "libxpmem0 1")
PARAGRAPH = f"Package: {{0}}\nVersion: {{1}}\nFilename: {{0}}.deb\nSHA256: {0:064}\n\n"
INDEX = "".join(PARAGRAPH.format(*version.split()) for version in VERSIONS)
WANTED = ("libnccl2=2.32.3-1+cuda13.4", "libxpmem0")
KEYRING = yaml.safe_load(packages.EVIDENCE.read_text())["keyring"]


def substituted(change: Sequence[str] | None, text: str) -> str:
    """Replace a regular expression in a text, if there is a change."""
    return re.sub(change[0], change[1], text) if change else text


def repository(row: Row, shown: packages.Repository, keys: Keys) -> dict[str, bytes]:
    """Return the files of a signed repository with the changes of a row."""
    keyring = row.get("keyring", {"usr/share/keyrings/cuda-archive-keyring.gpg": KEYRING["keys"]})
    held = {name: b"".join((keys.public / f"{key}.gpg").read_bytes() for key in of) for name, of in keyring.items()}
    deb = packages.package_with(held)
    about = f"Package: {KEYRING['package']}\nVersion: {KEYRING['version']}\nFilename: ./keyring.deb\n"
    index = substituted(row.get("index"), f"{INDEX}{about}SHA256: {hashlib.sha256(deb).hexdigest()}\n\n")
    packed = index.encode() if row.get("mislabelled") else gzip.compress(index.encode())
    indexes = {"Packages": index.encode(), "Packages.gz": packed}
    if "indexes" in row:
        indexes = {name: zstandard.compress(index.encode()) for name in row["indexes"]}
    hashed = {f"by-hash/SHA256/{hashlib.sha256(data).hexdigest()}": data for data in indexes.values()}
    lines = [f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}" for name, data in indexes.items()]
    release = substituted(row.get("release"), "\n".join(["Origin: shown", "SHA256:", *lines, ""])).encode()
    signed = {"Release": release, **keys.sign(release, *row.get("by", shown.key).split())}
    named = {name: (row.get("beside", [Path(key).stem]), Path(key).suffix) for name, key in shown.files.items()}
    published = {
        name: b"".join((keys.public / f"{key}{form}").read_bytes() for key in of) for name, (of, form) in named.items()
    }
    files = {"keyring.deb": deb, **indexes, **(hashed if row.get("by-hash") else {}), **signed, **published}
    there = {n: data for n, data in files.items() if not any(fnmatchcase(n, p) for p in row.get("gone", ()))}
    return {**there, **{name: text.encode() for name, text in row.get("content", {}).items()}}


def repository_line(row: Row, keys: Keys, root: Path) -> str:
    shown = next(r for r in packages.REPOSITORIES if row.get("of", "ubuntu2404") in r.path)
    (root / shown.path).mkdir(parents=True)
    for name, content in repository(row, shown, keys).items():
        (root / shown.path / name).parent.mkdir(parents=True, exist_ok=True)
        (root / shown.path / name).write_bytes(content)
    url = f"https://{shown.path}/"
    key = f"package:{KEYRING['package']}" if shown.of == "cuda" else f"{url}doca_keyring.gpg"
    source = PackageSource(url, "/", key, WANTED, ("amd64",))
    locked = keys.fingerprint(row.get("known", shown.key))
    known = LockedRepository(fingerprint=locked, hashes=row.get("hashes")) if {*row} & {"known", "hashes"} else None
    with Server(root, moved=row.get("moved", False)).running() as server:
        upstream = Upstream(
            Mirrors(downloads={url: f"http://127.0.0.1:{server.port}/{shown.path}/"}), patience=Patience(0.1, 0.001)
        )
        if "stops" in row:
            by, trusted = (keys.fingerprint(row.get(of, shown.key).split()[-1]) for of in ("by", "known"))
            with pytest.raises(ImagebuildError, match=row["stops"].format(by=by, known=trusted)) as stopped:
                upstream.resolve(source, known, lambda *_: None)
            message, own = str(stopped.value), f"http://127.0.0.1:{server.port}/own.gpg"
            shutil.copy(keys.public / f"{row.get('by', shown.key).split()[-1]}.gpg", root / "own.gpg")
            for name, content in repository({}, shown, keys).items():
                (root / "mirror" / name).parent.mkdir(parents=True, exist_ok=True)
                (root / "mirror" / name).write_bytes(content)
            mirror = Mirrors(downloads={url: f"http://127.0.0.1:{server.port}/mirror/"})
            for remedy, again in {
                "set `key`": (upstream, replace(source, key=own), known),
                "lock --update": (upstream, source, None),
                "mirror": (Upstream(mirror), source, known),
                "try again": (Upstream(mirror), source, known),
                "(404)": (Upstream(mirror), source, known),
            }.items():
                # No key helps if the signature is by a key that has expired.
                if remedy in message and not (remedy == "set `key`" and "EXPKEYSIG" in message):
                    assert again[0].resolve(again[1], again[2], lambda *_: None)
            assert REMEDY.search(message)
            secret = r"\b([0-9A-F]{16}|[0-9A-F]{40}|[0-9a-f]{64})\b| \(as http://[^)]*\)"
            text = re.sub(secret, lambda match: "…" if match[1] else "", str(stopped.value))
            return line(row, "stops", text.removeprefix(f"{url}: ").replace(url, "ADDRESS/"))
        entry = upstream.resolve(source, known, lambda *_: None)
    assert isinstance(entry, LockedRepository)
    assert entry.fingerprint == keys.fingerprint(row.get("key", shown.key))
    absent = [package for package in WANTED if package not in entry.packages]
    assert bool(lacks(lock_of({key_of(source): entry}), source)) == bool(absent) == ("lacks" in row)
    assert {**entry.packages, **row.get("versions", {})} == entry.packages
    why = "; ".join(choose(entry.candidates, absent, upstream.providers[url])[1])
    assert why.startswith(row.get("lacks", ""))
    if other := re.search(r"request a package that provides it: (\S+)", why):
        with Server(root).running() as server:
            mirrors = Mirrors(downloads={url: f"http://127.0.0.1:{server.port}/{shown.path}/"})
            found = Upstream(mirrors).resolve(replace(source, packages=(other[1],)), None, lambda *_: None)
        assert isinstance(found, LockedRepository)
        assert other[1] in found.packages
    return line(row, "stops what needs it" if absent else "taken as it is", why)


# The image


@pytest.mark.parametrize(
    ("folders", "says"), CASES["what-is-found-first"], ids=["as they are", "another first", "not there"]
)
def test_what_is_found_first(folders: str, says: str, project: Project, tmp_path: Path) -> None:
    """The script of HPC-X's check finds libraries and programs in the order of the search paths."""
    script = (project.folder("hpcx") / "checks" / "first-found.sh").read_text()
    library = next(Path("/lib", platform.machine() + "-linux-gnu").glob("libm.so.*"))
    for name in ("hpcx/net/lib/libnccl-net.so", "hpcx/ucx/lib/libucp.so.0", "mine/libucp.so.0", "hpcx/ucx/lib/tool"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, tmp_path / name)
        (tmp_path / name).chmod(0o755)
    script = script.replace("/opt/hpcx", f"{tmp_path}/hpcx").replace(" -u LD_LIBRARY_PATH", "")
    env = {
        "PATH": f"{tmp_path}/hpcx/ucx/lib:/usr/bin:/bin", "NAMES": "libnccl-net.so libucp.so.0", "PROGRAMS": "tool",
        "LD_LIBRARY_PATH": ":".join(f"{tmp_path}/{folder}" for folder in folders.split()),
    }  # fmt: skip
    done = ran("bash", "-euo", "pipefail", "-c", script, env=env, stderr=subprocess.STDOUT)
    assert says.format(root=tmp_path) in done.stdout
    assert done.returncode == (0 if says.startswith("tool") else 1)


CUDA = bases.Cuda("13.2.1", "ubuntu24.04", "2.28.9-1+cuda13.0")
HOLD = "RUN /bin/sh -c apt-mark hold ${NV_LIBCUBLAS_PACKAGE_NAME} ${NV_LIBNCCL_PACKAGE_NAME} # buildkit"


@pytest.mark.parametrize("row", data("worlds/images"), ids=lambda row: row["says"])
def test_images(row: Row, project: Project, full_plan: Plan) -> None:
    env = {n: v for n, v in {**CUDA.environment("runtime"), **row.get("env", {})}.items() if v is not None}
    own = {"Env": [f"{name}={value}" for name, value in env.items()], **(row.get("config") or {})}
    config = {"config": own if row.get("config", {}) is not None else None}
    config["history"] = row.get("history", [{"created_by": HOLD}, {}])
    if row.get("stops"):
        with pytest.raises(ImagebuildError, match="cannot be read: .*; choose another tag"):
            image_facts(config)
        return
    facts = image_facts(config)
    assert {**facts.model_dump(mode="json"), **row.get("facts", {})} == facts.model_dump(mode="json")
    target = select_one(full_plan, "hpcx-cuda13.2.1-ubuntu24.04-runtime")
    recipe = replace(Renderer(project).recipe(target), base_facts=dict.fromkeys(target.platforms, facts))
    for note in row.get("notes", ()):
        assert [line for line in adaptations(recipe) if line.startswith("nvidia/cuda") and note in line]
    final = Renderer(project).dockerfile(target).text.rpartition("\nFROM ")[2]
    assert "\nUSER root\n" in final, "whatever the base's user is"
    assert "--allow-change-held-packages \\\n" in final, "whatever the base holds"


def test_texts_and_links_of_an_archive_name_the_folders_of_the_image(tmp_path: Path) -> None:
    for version in hpcx.VERSIONS:
        which = hpcx.Distribution("ubuntu24.04", 13, version=version)
        tree = hpcx.files(hpcx.release(version), which)
        built = hpcx.release(version)["built-in"]["folder"].format(archive=which.name)
        spellings = "a=ompi5 $HPCX_DIR/ompi4/lib ${HPCX_DIR}/ompi${mpi_version}/bin $hpcx_dir/ompi$v"
        tree["hpcx-odd-init.sh"] = File(f"{spellings} {built}/ucx https://a.example/hpcx-v9/ompi5 libompi5\n".encode())
        tree["utils/again.sh"] = File(b"cd $HPCX_DIR/sources\n")
        tree["mpi/other-5.0/bin/mpirun"] = File(b"x", 0o755)
        tree["utils/other.sh"] = File(b"$HPCX_DIR/mpi/other-5.0/lib mpi/other-5.01\n")
        tree["ucx/link"] = File(link=f"{built}/ucx/lib")
        folder = hpcx.unpack(tree, tmp_path / version)
        subprocess.run(["perl", ROOT / "dockerfiles/components/hpcx/files/relocate", folder], check=True)
        assert (folder / "hpcx-odd-init.sh").read_text() == (
            "a=ompi $HPCX_DIR/ompi/lib ${HPCX_DIR}/ompi/bin $hpcx_dir/ompi "
            f"{folder}/ucx https://a.example/hpcx-v9/ompi5 libompi5\n"
        )
        assert str((folder / "ucx/link").readlink()) == f"{folder}/ucx/lib"
        assert (folder / "utils/other.sh").read_text() == "$HPCX_DIR/ompi/lib mpi/other-5.01\n"
        assert not list(folder.rglob("mpirun"))
        assert not list(folder.glob("ompi*")) + list(folder.glob("sources")) + list(folder.glob("utils/again.sh"))
        texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "hpcx-odd-init.sh"]
        assert not [text for text in texts if re.search(rb"ompi[0-9$]|build-result|" + which.name.encode(), text)]
