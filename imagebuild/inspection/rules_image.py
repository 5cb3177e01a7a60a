"""Rules about what an image says of itself, and about what the plan says of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch

from imagebuild import final
from imagebuild.inspection.context import Inspection, NotApplicable
from imagebuild.inspection.facts import Finding

OCI = "org.opencontainers.image."
REQUIRED = ("title", "description", "version", "licenses", "base.name", "base.digest")
ANOTHER_BASE = (f"{OCI}base.name", f"{OCI}base.digest")
"""Labels that `render --base` changes."""
MOUNTED = re.compile(r"^/usr/local/nvidia(/|$)")
"""Folders that the container runtime makes."""
USUAL = final.SYSTEM_PATH.split(":")
"""Folders of everybody's PATH, whether they exist or not."""
FOLDER_NAMES = re.compile(r"_(DIR|HOME|ROOT|PREFIX)$")
SECRET_NAMES = re.compile(
    r"(^|_)(PASSWORD|PASSWD|PASSPHRASE|TOKEN|SECRET|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)(_|$)", re.IGNORECASE
)
PROVIDED = re.compile(r"([\w.+-]+)(?: \(= ([^)]+)\))?(?:, |$)")
"""Name and version of what a package provides."""


def labels(about: Inspection) -> Iterator[Finding]:
    if not about.components:
        return
    has = about.image.labels
    wanted = [f"{OCI}{name}" for name in REQUIRED] + ["imagebuild.target", "imagebuild.lock"]
    yield from (Finding(label, "the label is missing") for label in wanted if not has.get(label))
    digest = has.get(f"{OCI}base.digest")
    if digest and not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        yield Finding(f"{OCI}base.digest", f"{digest!r} is no digest")


def plan(about: Inspection) -> Iterator[Finding]:
    target = about.target
    recipe = about.renderer.recipe(target)
    lock = final.lock_hash(recipe, about.renderer.project.lock)
    wanted = final.labels(recipe, lock, "")
    has = about.image.labels
    ours = {label for label in has if label.startswith(("imagebuild.component.", "imagebuild.axis."))}
    for label in sorted({*wanted, *ours} - set(ANOTHER_BASE)):
        if has.get(label) != wanted.get(label):
            yield Finding(label, f"is {has.get(label, 'absent')!r}, the plan says {wanted.get(label, 'absent')!r}")


def packages(about: Inspection) -> Iterator[Finding]:
    recipe = about.renderer.recipe(about.target)
    wanted = [text.strip("'") for text in final.packages(recipe, about.renderer.project.lock)]
    installed = dpkg(about)
    for text in wanted:
        name, _, version = text.partition("=")
        has = installed.get(name.partition(":")[0])
        if has is None:
            yield Finding(name, "the package is not installed")
        elif version and not fnmatch(has, version):
            yield Finding(name, f"version {has} is installed, the plan says {version}")


def dpkg(about: Inspection) -> dict[str, str]:
    """Package → version, also of packages that others provide. Raises NotApplicable if there are none of dpkg."""
    entry = about.tree.find("var/lib/dpkg/status")
    if entry is None or entry.text is None:
        raise NotApplicable("the image has no packages of dpkg")
    found: dict[str, str] = {}
    provided: dict[str, str] = {}
    for paragraph in entry.text.decode("utf-8", "replace").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        if fields.get("Status", "").endswith(" installed"):
            found[fields.get("Package", "")] = fields.get("Version", "")
            provided |= dict(PROVIDED.findall(fields.get("Provides", "")))
    return provided | found


def licenses(about: Inspection) -> Iterator[Finding]:
    for name, component in about.known():
        for pattern in component.license_files:
            if not about.tree.glob(pattern):
                yield Finding(pattern, f"the licence of {name} is not there")


def environment(about: Inspection) -> Iterator[Finding]:
    for name, value in about.image.env.items():
        if SECRET_NAMES.search(name) and value:
            yield Finding(name, "a variable with the name of a secret has a value")
        if name in final.LISTS:
            parts = value.split(":")
            if "" in parts:
                yield Finding(name, "an empty part means the current folder")
            yield from _absent(about, name, [part for part in parts if part])
        elif FOLDER_NAMES.search(name) and value.startswith("/"):
            yield from _absent(about, name, [value])


def _absent(about: Inspection, name: str, folders: list[str]) -> Iterator[Finding]:
    for folder in dict.fromkeys(folders):
        if not folder.startswith("/"):
            yield Finding(name, f"{folder!r} depends on the current folder")
        elif about.tree.resolve(folder) is None and not MOUNTED.search(folder) and folder not in USUAL:
            yield Finding(name, f"{folder} does not exist")


def user(about: Inspection) -> Iterator[Finding]:
    accounts = _accounts(about, "etc/passwd")
    hashes = _accounts(about, "etc/shadow")
    name = str(about.image.settings.get("User") or "").partition(":")[0]
    if name and not name.isdigit() and name not in accounts:
        yield Finding(name, "containers start as this user, whom /etc/passwd does not have")
    for account, fields in (*accounts.items(), *hashes.items()):
        password = fields[1] if len(fields) > 1 else ""
        if password == "":
            yield Finding(account, "needs no password")
        elif not password.startswith(("x", "*", "!")):
            yield Finding(account, "has a password, whose hash is in the image")
    if about.image.labels.get("imagebuild.target"):
        uid = {fields[2]: fields for fields in accounts.values() if len(fields) > 5}
        if "1000" not in uid:
            yield Finding("1000", "there is no normal user with this number")
        elif not about.tree.is_folder(uid["1000"][5]):
            yield Finding(uid["1000"][0], f"the home folder {uid['1000'][5]} does not exist")


def _accounts(about: Inspection, path: str) -> dict[str, list[str]]:
    entry = about.tree.find(path)
    lines = ((entry.text if entry else None) or b"").decode("utf-8", "replace").splitlines()
    return {line.partition(":")[0]: line.split(":") for line in lines if line and not line.startswith("#")}


def command(about: Inspection) -> Iterator[Finding]:
    settings = about.image.settings
    words = [*(settings.get("Entrypoint") or ()), *(settings.get("Cmd") or ())]
    if not words:
        yield Finding("command", "the image has neither an entrypoint nor a command")
        return
    program = str(words[0])
    folders = [""] if program.startswith("/") else about.image.env.get("PATH", final.SYSTEM_PATH).split(":")
    found = [entry for folder in folders if (entry := about.tree.find(f"{folder}/{program}"))]
    if not found:
        yield Finding(program, "what a container starts does not exist")
    elif not found[0].mode & 0o111:
        yield Finding(program, "what a container starts cannot be executed")


def size(about: Inspection) -> Iterator[Finding]:
    target = about.target
    limits = about.renderer.project.matrix.model.images[target.image].size_limit_mb
    limit = limits.get(target.axes.get("variant", "")) if isinstance(limits, dict) else limits
    if limit is None:
        raise NotApplicable("the matrix has no size-limit-mb for it")
    if not all(layer.compressed for layer in about.layers):
        raise NotApplicable("the engine saves layers unpacked; the limit is for what a registry keeps")
    has = sum(layer.stored for layer in about.layers) / 1e6
    yield Finding("size", f"{has:.0f} MB in {len(about.layers)} layers, at most {limit} MB", note=has <= limit)
