"""Check an image by reading it: nothing of it is started, so its architecture does not matter."""

from __future__ import annotations

import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch, fnmatchcase
from functools import cached_property
from pathlib import Path

from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.fields import axis_facts, matches
from imagebuild.oci import layout
from imagebuild.oci.layout import LayoutImage
from imagebuild.project.component import Component
from imagebuild.project.load import Project
from imagebuild.project.matrix import CheckWaiver, Plan, Target
from imagebuild.project.plan import Changes, Pins, versions_with
from imagebuild.project.records import CheckResult
from imagebuild.render import renderer
from imagebuild.render.renderer import Renderer
from imagebuild.verify import layers
from imagebuild.verify.checks import axes_of, components_of
from imagebuild.verify.elf import DRIVER, DRIVER_SYMBOL, Closure, Loader
from imagebuild.verify.files import Elf, Entry, Finding, Layer, Tree
from imagebuild.verify.layers import scan_all

MACHINES = {"amd64": 62, "arm64": 183, "386": 3, "arm": 40, "ppc64le": 21, "s390x": 22, "riscv64": 243}
"""Architecture of an image → `e_machine` of its ELF files."""


class NotApplicable(Exception):
    """The rule says nothing about this image; the text says why."""


@dataclass(frozen=True)
class Inspection:
    """An image, read."""

    image: LayoutImage
    layers: tuple[Layer, ...]
    project: Project | None = None
    plan: Plan | None = None
    versions: Pins | None = None
    """The pins that the plan was made with; by default the matrix's."""

    @cached_property
    def tree(self) -> Tree:
        return Tree(self.layers)

    @property
    def arch(self) -> str:
        return self.image.platform.split("/")[1]

    @cached_property
    def machine(self) -> int:
        """Raises NotApplicable for an architecture that is not in the table."""
        if self.arch not in MACHINES:
            raise NotApplicable(f"what ELF files of {self.image.platform} say is not known here")
        return MACHINES[self.arch]

    @cached_property
    def components(self) -> dict[str, str]:
        """Component → version, as the labels say. Raises NotApplicable if they name none."""
        found = components_of(self.image.labels)
        if not found:
            raise NotApplicable("the image has no labels imagebuild.component.*: it was not built here")
        return found

    @property
    def axes(self) -> dict[str, str]:
        return axes_of(self.image.labels)

    def known(self) -> Iterator[tuple[str, Component]]:
        """The image's components that the project has. Raises NotApplicable without a project or labels."""
        if self.project is None:
            raise NotApplicable("there is no matrix to compare with")
        for name in self.components:
            if name in self.project.components:
                yield name, self.project.components[name].model

    @property
    def target(self) -> Target:
        """The target that the labels name, as the plan has it. Raises NotApplicable."""
        name = self.image.labels.get("imagebuild.target")
        if not name:
            raise NotApplicable("the image has no label imagebuild.target: it was not built here")
        if self.plan is None or self.project is None:
            raise NotApplicable("there is no plan to compare with")
        found = next((target for target in self.plan.targets if target.id == name), None)
        if found is None:
            raise NotApplicable(f"the plan has no target {name}")
        return found

    def files(self) -> Iterator[Entry]:
        """Everything in any layer, also what a later one hides."""
        for layer in self.layers:
            yield from layer.entries

    @cached_property
    def loader(self) -> Loader:
        return Loader(self.tree, self.image.env)

    @cached_property
    def renderer(self) -> Renderer:
        """Raises NotApplicable without a project."""
        if self.project is None:
            raise NotApplicable("there is no matrix to compare with")
        return Renderer(self.project, self.versions or versions_with(self.project, Changes()))

    def closure(self, path: str) -> Closure:
        """What the loader loads for a program or library."""
        if path not in self._closures:
            self._closures[path] = self.loader.closure(path, self.objects[path])
        return self._closures[path]

    @cached_property
    def _closures(self) -> dict[str, Closure]:
        return {}

    @cached_property
    def objects(self) -> dict[str, Elf]:
        """Path → what is in it, of all ELF files that a container sees."""
        return {entry.path: entry.elf for entry in self.tree if entry.elf}


DEVICES = {190: "CUDA", 224: "AMD GPU", 247: "BPF"}
"""Machines that are not the CPU: their code is data of programs."""
HIDING = re.compile(r"^lib(cuda|cudadebugger|nvcuvid|nvidia-ml|nvidia-ptxjitcompiler)\.so(\.|$)")
"""Libraries that are right only in the driver's own version."""
STUBS = re.compile(r"(^|/)stubs(/|$)")


def architecture(about: Inspection) -> Iterator[Finding]:
    for entry in about.tree:
        if entry.broken:
            yield Finding(f"/{entry.path}", f"begins like an ELF file and is none: {entry.broken}")
        elif entry.elf and entry.elf.machine not in (about.machine, *DEVICES):
            yield Finding(f"/{entry.path}", f"is for ELF machine {entry.elf.machine}, not for {about.arch}")


def closures(about: Inspection) -> Iterator[tuple[str, Elf, Closure]]:
    """Path, content and closure of all programs and libraries for the image's machine."""
    for path, elf in about.objects.items():
        if elf.machine == about.machine and elf.type in (2, 3):
            yield path, elf, about.closure(path)


def closure(about: Inspection) -> Iterator[Finding]:
    """A library that no loader path names may rely on what its program has loaded; a program may not."""
    for_program: set[tuple[str, str]] = set()
    alone: dict[tuple[str, str], None] = {}
    used: set[str] = set()
    for _, elf, found in closures(about):
        missing = [(who, name) for who, name in found.missing if not DRIVER.search(name)]
        if elf.interpreter:
            for_program.update(missing)
            used.update(path for path in found.libraries.values() if path)
        alone.update(dict.fromkeys(missing))
    folders = set(about.loader.folders(about.machine))
    provided = {elf.soname or path.rpartition("/")[2]: path for path, elf in about.objects.items()}
    for who, name in alone:
        elsewhere = provided.get(name)
        if (who, name) in for_program or not elsewhere:
            where = f"which the loader does not find in /{elsewhere}" if elsewhere else "which is nowhere in the image"
            yield Finding(f"/{who}", f"needs {name}, {where}")
            continue
        text = f"needs {name}, which the loader does not find in /{elsewhere}"
        if about.tree.resolve(who.rpartition("/")[0]) in folders and who not in used:
            yield Finding(f"/{who}", text)
        else:
            yield Finding(f"/{who}", f"{text}; whatever loads it must have loaded that before", note=True)


def symbol_versions(about: Inspection) -> Iterator[Finding]:
    for who, library, version in dict.fromkeys(row for _, _, found in closures(about) for row in found.versions):
        yield Finding(f"/{who}", f"needs {version}, which /{library} does not define")


def symbols(about: Inspection) -> Iterator[Finding]:
    """Of programs only: a plug-in's symbols may come from whatever opens it."""
    for path, elf, found in closures(about):
        if not elf.interpreter or any(not DRIVER.search(name) for _, name in found.missing):
            continue  # what is missing is said by another rule
        for who, name in about.loader.undefined(found):
            if not (found.missing and DRIVER_SYMBOL.search(name)):
                yield Finding(f"/{who}", f"needs the symbol {name}, which nothing defines that /{path} loads")


def one_provider(about: Inspection) -> Iterator[Finding]:
    found: dict[str, set[str]] = defaultdict(set)
    for folder, name in _on_path(about):
        real = about.tree.resolve(f"{folder}/{name}")
        elf = about.objects.get(real or "")
        if real and elf and elf.soname and elf.machine == about.machine:
            found[elf.soname].add(real)
    for soname, paths in sorted(found.items()):
        if len(paths) > 1:
            files = ", ".join(f"/{path}" for path in sorted(paths))
            yield Finding(soname, f"is in several files where the loader looks: {files}")


def no_stubs(about: Inspection) -> Iterator[Finding]:
    for folder in about.loader.folders(about.machine):
        if STUBS.search(folder):
            yield Finding(f"/{folder}", "the loader looks in a folder of stubs")
    for folder, name in _on_path(about):
        real = about.tree.resolve(f"{folder}/{name}")
        if HIDING.search(name) and real and not STUBS.search(folder):
            what = "a stub" if STUBS.search(real) else "a copy"
            yield Finding(f"/{folder}/{name}", f"is {what} that the loader finds; the driver brings the library itself")
    for path, elf in about.objects.items():
        if any(STUBS.search(part) for part in (*elf.rpath, *elf.runpath)):
            yield Finding(f"/{path}", "its run path names a folder of stubs")


def _on_path(about: Inspection) -> Iterator[tuple[str, str]]:
    for folder in about.loader.folders(about.machine):
        yield from ((folder, name) for name in about.tree.names(folder))


KEY_NAME = re.compile(r"(^|/)(ssh_host_\w+_key|\.ssh/id_\w+)$")
SECRET_NAME = re.compile(
    r"""(^|/)(\.netrc | \.pgpass | \.pypirc | \.git-credentials | \.docker/config\.json | \.aws/credentials
    | \.kube/config | \.config/(gh/hosts\.yml | gcloud/.*credentials.*) | \.cache/huggingface/token
    | \.(bash|zsh|python|sh)_history)$ | ^run/secrets/. | ^kaniko/""",
    re.VERBOSE,
)
"""Files that hold secrets by their purpose."""
LEFTOVERS = (
    (re.compile(r"^var/lib/apt/lists/(?!lock$).*[^/]$"), "a package list of apt"),
    (re.compile(r"^var/cache/apt/(.*\.deb|(src)?pkgcache\.bin)$"), "a cache of apt"),
    (re.compile(r"^var/cache/(yum|dnf|libdnf5|zypp|apk|pacman)/."), "a cache of the package manager"),
    (re.compile(r"^lib/apk/db/.*APKINDEX|^var/lib/(yum|dnf)/repos/"), "a package list"),
    (re.compile(r"(^|/)\.cache/(pip|uv|pypoetry|conda|ccache|go-build|npm|yarn)/."), "a cache of what built it"),
    (re.compile(r"(^|/)\.(npm/_cacache|cargo/registry|conda/pkgs)/."), "a cache of what built it"),
    (re.compile(r"^(var/)?tmp/."), "a temporary file"),
)
ANCHORS = re.compile(
    r"^(usr/local/share/ca-certificates|etc/pki/ca-trust/source/anchors|usr/share/pki/trust/anchors|etc/ca-certificates/trust-source/anchors)/."
)
"""Where sites put certificates of their own."""
TRUSTED = re.compile(r"^usr/share/(ca-certificates|pki/ca-trust-source)/")
"""Where distributions keep what they trust."""
SITE = re.compile(r"^(etc|root|home|tmp|run|srv|usr/local/share|usr/local/etc)/")
"""Where certificates are a site's, unless the distribution has them; elsewhere packages have test data."""
BY_DISTRIBUTION = re.compile(r"^(etc/ssl/certs/ssl-cert-snakeoil\.pem)$")
SETUID = frozenset(
    f"usr/{folder}/{name}"
    for folder in ("bin", "sbin", "lib", "libexec")
    for name in (
        "chage", "chfn", "chsh", "crontab", "dbus-1.0/dbus-daemon-launch-helper", "dbus-daemon-launch-helper",
        "expiry", "fusermount", "fusermount3", "gpasswd", "grub2-set-bootflag", "mount", "newgrp",
        "openssh/ssh-keysign", "pam_extrausers_chkpwd", "pam_timestamp_check", "passwd", "pkexec",
        "polkit-1/polkit-agent-helper-1", "ssh-agent", "ssh-keysign", "su", "sudo", "umount", "unix_chkpwd",
        "utempter/utempter", "wall", "write",
    )
)  # fmt: skip
"""Programs that distributions install setuid or setgid."""
CAPABLE = frozenset({"usr/bin/ping", "usr/bin/newgidmap", "usr/bin/newuidmap", "usr/bin/arping", "usr/bin/clockdiff"})
"""Programs that distributions give capabilities."""


def no_keys(about: Inspection) -> Iterator[Finding]:
    for entry in _contents(about):
        if KEY_NAME.search(entry.path):
            yield _in_layer(entry, "is a private key of ssh")
        elif found := [kind for kind in entry.secrets if "private key" in kind]:
            yield _in_layer(entry, f"holds a {found[0]}")


def no_tokens(about: Inspection) -> Iterator[Finding]:
    for entry in _contents(about):
        if SECRET_NAME.search(entry.path):
            yield _in_layer(entry, "is a file for secrets")
        for kind in entry.secrets:
            if "private key" not in kind:
                yield _in_layer(entry, f"holds what looks like a {kind}")
    for place, text in _settings(about):
        for kind in sorted(layers.in_text(text)):
            yield Finding(place, f"holds what looks like a {kind}")
        if layers.CREDENTIALS.search(text):
            yield Finding(place, "holds an address with a password")


def _settings(about: Inspection) -> Iterator[tuple[str, bytes]]:
    """What the configuration says: commands with build arguments are in its history."""
    config = about.image.config
    yield from ((f"environment {name}", value.encode()) for name, value in about.image.env.items())
    yield from ((f"label {name}", str(value).encode()) for name, value in about.image.labels.items())
    for number, step in enumerate(config.get("history") or (), 1):
        yield f"history, step {number}", str(step.get("created_by", "")).encode()


def no_site_ca(about: Inspection) -> Iterator[Finding]:
    trusted = {c for entry in about.files() if TRUSTED.search(entry.path) for c in entry.certificates}
    for entry in _contents(about):
        if ANCHORS.search(entry.path):
            yield _in_layer(entry, "is a certificate that a site trusts")
        elif (
            SITE.search(entry.path)
            and not BY_DISTRIBUTION.search(entry.path)
            and (others := len(set(entry.certificates) - trusted))
        ):
            yield _in_layer(entry, f"holds {others} certificates that the distribution does not have")


def no_leftovers(about: Inspection) -> Iterator[Finding]:
    for entry in _contents(about):
        if kind := next((kind for pattern, kind in LEFTOVERS if pattern.search(entry.path)), None):
            yield _in_layer(entry, f"is {kind}")


def not_world_writable(about: Inspection) -> Iterator[Finding]:
    for entry in about.tree:
        sticky = entry.kind == "folder" and entry.mode & 0o1000
        if entry.kind in ("file", "folder", "hardlink") and entry.mode & 0o002 and not sticky:
            yield Finding(f"/{entry.path}", f"everybody can write to it (mode {entry.mode:o})")


def setuid(about: Inspection) -> Iterator[Finding]:
    for entry in about.tree:
        if entry.kind not in ("file", "hardlink"):
            continue
        place = re.sub(r"^(s?bin|lib)/", r"usr/\1/", entry.path)
        if entry.mode & 0o6000 and place not in SETUID:
            yield Finding(f"/{entry.path}", f"runs with the rights of its owner or group (mode {entry.mode:o})")
        elif entry.capabilities and place not in CAPABLE | SETUID:
            yield Finding(f"/{entry.path}", "runs with capabilities of the kernel")


def _contents(about: Inspection) -> Iterable[Entry]:
    return (e for e in about.files() if e.kind in ("file", "hardlink") and "/.wh." not in f"/{e.path}")


def _in_layer(entry: Entry, text: str) -> Finding:
    return Finding(f"/{entry.path}", f"{text}, in layer {entry.layer + 1}")


def gpu_code(about: Inspection) -> Iterator[Finding]:
    """What was compiled here is for exactly the GPUs of the matrix; what others compiled runs on all of them."""
    wanted = wanted_capabilities(about)
    own = [pattern.strip("/") for _, component in about.known() for pattern in component.gpu_code]
    seen: set[str] = set()
    for path, elf in about.objects.items():
        if not elf.gpu:
            continue
        patterns = [pattern for pattern in own if fnmatch(path, pattern)]
        seen.update(patterns)
        has = describe_code(elf)
        if patterns:
            exact = f"code for {', '.join(wanted)}; PTX for {wanted[-1]}"
            if has != exact:
                yield Finding(f"/{path}", f"has {has}; the matrix wants {exact}")
        elif lacking := [capability for capability in wanted if not runs(elf, capability)]:
            yield Finding(f"/{path}", f"does not run on {', '.join(lacking)}: it has {has}")
        else:
            yield Finding(f"/{path}", f"has {has}", note=True)
    for pattern in own:
        if pattern not in seen:
            yield Finding(f"/{pattern}", "holds no GPU code")


def wanted_capabilities(about: Inspection) -> list[str]:
    """Compute capabilities, ascending. Raises NotApplicable if the image's labels name no target of the plan."""
    target = about.target
    if not about.renderer.project.matrix.model.gpu_architectures:
        raise NotApplicable("the matrix lists no GPU architectures")
    return list(about.renderer.capabilities(target).get(about.arch, ()))


def describe_code(elf: Elf) -> str:
    kinds = {"code": "code", "ptx": "PTX"}
    parts = []
    for kind, name in kinds.items():
        if found := sorted({part.capability for part in elf.gpu if part.kind == kind}, key=number):
            parts.append(f"{name} for {', '.join(found)}")
    return "; ".join(parts)


def number(capability: str) -> tuple[int, str]:
    digits = re.sub(r"\D", "", capability)
    return int(digits), capability


def runs(elf: Elf, capability: str) -> bool:
    """Code of X.y runs on X.z from z = y on, with `a` on X.y only; PTX is compiled for all later ones."""
    wanted, _ = number(capability)
    for part in elf.gpu:
        has, _ = number(part.capability)
        if has == wanted:
            return True
        if part.capability.endswith("a") or has > wanted:
            continue
        if has // 10 == wanted // 10 or (part.kind == "ptx" and not part.capability.endswith("f")):
            return True
    return False


OCI = "org.opencontainers.image."
REQUIRED = ("title", "description", "version", "licenses", "base.name", "base.digest")
ANOTHER_BASE = (f"{OCI}base.name", f"{OCI}base.digest")
"""Labels that `render --base-image` changes."""
MOUNTED = re.compile(r"^/usr/local/nvidia(/|$)")
"""Folders that the container runtime makes."""
USUAL = renderer.SYSTEM_PATH.split(":")
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
    lock = renderer.hash_of_lock(recipe, about.renderer.project.lock)
    wanted = renderer.image_labels(recipe, lock, "")
    has = about.image.labels
    ours = {label for label in has if label.startswith(("imagebuild.component.", "imagebuild.axis."))}
    for label in sorted({*wanted, *ours} - set(ANOTHER_BASE)):
        if has.get(label) != wanted.get(label):
            yield Finding(label, f"is {has.get(label, 'absent')!r}, the plan says {wanted.get(label, 'absent')!r}")


def packages(about: Inspection) -> Iterator[Finding]:
    recipe = about.renderer.recipe(about.target)
    wanted = [text.strip("'") for text in renderer.package_arguments(recipe, about.renderer.project.lock)]
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
        if name in renderer.FOLDER_LISTS:
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
    folders = [""] if program.startswith("/") else about.image.env.get("PATH", renderer.SYSTEM_PATH).split(":")
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


@dataclass(frozen=True)
class ImageRule:
    """A statement about images that reading them can refute."""

    name: str
    description: str
    """What passing proves, in one line."""
    find: Callable[[Inspection], Iterator[Finding]]
    """Raises NotApplicable if it says nothing about the image."""


RULES = (
    ImageRule("labels", "The labels say what it is, from what it was built, and under which licences", labels),
    ImageRule("plan", "Versions, axes and lock in the labels are what the plan says now", plan),
    ImageRule("packages", "Packages that the plan names are installed, in its versions", packages),
    ImageRule("licenses", "The licence texts of all components are there", licenses),
    ImageRule("environment", "Folders in variables exist, and no variable holds a secret", environment),
    ImageRule("user", "Users exist, have no passwords, and one is a normal user", user),
    ImageRule("command", "What a container starts exists and is executable", command),
    ImageRule("size", "The compressed layers keep within the budget of the matrix", size),
    ImageRule("no-keys", "No layer holds a private key, not even below another", no_keys),
    ImageRule("no-tokens", "No layer, label, variable or build step holds a token or a password", no_tokens),
    ImageRule("no-site-ca", "No layer trusts a certificate that the distribution does not", no_site_ca),
    ImageRule("no-leftovers", "No layer holds package lists, caches or temporary files", no_leftovers),
    ImageRule("not-world-writable", "Nobody but owners can write to files and folders", not_world_writable),
    ImageRule("setuid", "Only the distribution's programs run with rights of others", setuid),
    ImageRule("architecture", "Every ELF file is for the image's architecture", architecture),
    ImageRule("closure", "The loader finds every library that is needed, but the driver's", closure),
    ImageRule("symbol-versions", "Libraries define every version of symbols that is needed", symbol_versions),
    ImageRule("symbols", "What programs load defines every symbol that is needed", symbols),
    ImageRule("one-provider", "For each library the loader can find only one file", one_provider),
    ImageRule("no-stubs", "The loader finds no stub and no copy of a driver's library", no_stubs),
    ImageRule("gpu-code", "Fat binaries run on the GPUs that the matrix lists", gpu_code),
)


COMPONENT = "image"
SHOWN = 100
"""Findings of a rule that are listed."""


@dataclass
class Declared:
    """A waiver, whose it is, and what it was used for."""

    owner: str
    waiver: CheckWaiver
    used: list[str] = field(default_factory=list)


def judge(about: Inspection) -> tuple[CheckResult, ...]:
    """What every rule says about the image, and at last whether all waivers were needed."""
    declared = waivers(about)
    results = [_one(rule, about, [d for d in declared if d.waiver.rule == rule.name]) for rule in RULES]
    skipped = {result.check for result in results if result.outcome == "skipped"}
    needless = [
        f"{d.owner}: {d.waiver.rule} {d.waiver.subject}: nothing to waive; remove it"
        for d in declared
        if not d.used and d.waiver.rule not in skipped
    ]
    return (*results, _result("waivers", needless, needless, 0.0))


def waivers(about: Inspection) -> list[Declared]:
    """What the image's components and its entry in the matrix declare, as far as it is for this image."""
    try:
        owned = [(name, waiver) for name, component in about.known() for waiver in component.waivers]
    except NotApplicable:
        return []
    name = about.image.labels.get("org.opencontainers.image.title", "")
    assert about.project
    if image := about.project.matrix.model.images.get(name):
        owned += [(f"images.{name}", waiver) for waiver in image.waivers]
    known = {**axis_facts(about.axes), "arch": about.arch, "image": name}
    return [Declared(owner, waiver) for owner, waiver in owned if matches(waiver.when, known)]


def _one(rule: ImageRule, about: Inspection, declared: Sequence[Declared]) -> CheckResult:
    began = time.monotonic()
    try:
        findings = list(dict.fromkeys(rule.find(about)))
    except NotApplicable as reason:
        return CheckResult(component=COMPONENT, check=rule.name, outcome="skipped", reason=str(reason))
    faults, waived = [], []
    for finding in findings:
        if finding.note:
            continue
        if why := _waived(finding, declared):
            waived.append(f"{finding} (waived: {why})")
        else:
            faults.append(str(finding))
    notes = [f"{finding} (no fault)" for finding in findings if finding.note]
    return _result(rule.name, faults, [*faults, *waived, *notes], time.monotonic() - began)


def _waived(finding: Finding, declared: Iterable[Declared]) -> str:
    for one in declared:
        if fnmatchcase(finding.subject, one.waiver.subject):
            one.used.append(finding.subject)
            return f"{one.owner}: {one.waiver.reason}"
    return ""


def _result(name: str, faults: Sequence[str], lines: Sequence[str], seconds: float) -> CheckResult:
    shown = [*lines[:SHOWN], *([f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return CheckResult(
        component=COMPONENT,
        check=name,
        outcome="failed" if faults else "passed",
        reason=f"{faults[0]}{more}" if faults else "",
        output="\n".join(shown),
        seconds=round(seconds, 3),
    )


def inspect(
    source: Path | Iterable[bytes],
    project: Project | None = None,
    plan: Plan | None = None,
    *,
    versions: Pins | None = None,
    platform: str | None = None,
    workers: int | None = None,
) -> tuple[CheckResult, ...]:
    """What every rule says about an image, as results of the component `image`.

    `source` is a folder with an OCI layout, a tar of one, an archive of `docker save`, or the chunks that an engine
    saves. Without `project` and `plan`, rules about what the image should be are skipped; `versions` are the pins that
    the plan was made with, by default the matrix's. Of several platforms, `platform` chooses one; else all are checked,
    and results are named after theirs. Layers are read by `workers` processes, by default as many as there are CPUs.
    Raises ConfigError if the source is no image or lacks the platform, ResultError if it cannot be read.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            found = layout.images_in(source, Path(folder))
            chosen = [image for image in found if platform in (None, image.platform)]
            if not chosen:
                has = ", ".join(image.platform for image in found)
                raise ConfigError(f"the image is not for {platform}, but for {has}")
            results: list[CheckResult] = []
            for image in chosen:
                began = time.monotonic()
                layers = scan_all(image.layers, workers)
                read = CheckResult(
                    component=COMPONENT, check="readable", outcome="passed", seconds=round(time.monotonic() - began, 3)
                )
                every = (read, *judge(Inspection(image, layers, project, plan, versions)))
                suffix = f" {image.platform}" if len(chosen) > 1 else ""
                results += [result.model_copy(update={"check": f"{result.check}{suffix}"}) for result in every]
            return tuple(results)
    except OSError as error:
        room = "TMPDIR may name a folder with more room"
        raise ResultError(f"the image cannot be unpacked to be read: {error.strerror or error}; {room}") from None


def describe_images(source: Path) -> tuple[layout.LayoutImage, ...]:
    """The images in a layout or archive, one a platform: digest, labels, settings. Raises as `inspect`."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        return layout.images_in(source, Path(folder))
