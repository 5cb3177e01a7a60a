"""Check an image by reading its files. Nothing is started, so images of any architecture can be checked."""

from __future__ import annotations

import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch, fnmatchcase
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from imagebuild.bench.verification import CheckResult
from imagebuild.core.errors import ResultError, plural
from imagebuild.core.fields import DIGEST, FOLDER_LISTS, axis_facts, matches, natural_order
from imagebuild.oci.image import FoundImage
from imagebuild.oci.layout import OPAQUE, WHITEOUT
from imagebuild.project.matrix import CheckWaiver
from imagebuild.project.plan import Plan, axes_of, components_of
from imagebuild.project.project import Project
from imagebuild.render.image import image_labels
from imagebuild.render.resolve import gpu_capabilities, resolve_recipe
from imagebuild.verify import layers
from imagebuild.verify.checks import IMAGE
from imagebuild.verify.elf import DRIVER, PATTERNS
from imagebuild.verify.facts import hash_of_readers
from imagebuild.verify.files import Elf, FileEntry, Finding, lines_of
from imagebuild.verify.inspection import Inspection, NotApplicable, merged
from imagebuild.verify.layers import is_a, read_layers
from imagebuild.verify.paths import base_kept, command, environment, for_every_user, startable
from imagebuild.verify.runtime import SITE, executable_stack, loaded_with, one_of_each, opened_files, plugins
from imagebuild.verify.subject import ImageFinder, room_explained
from imagebuild.verify.tables import check_tables
from imagebuild.verify.wheels import installed_wheels, is_public_test, wheels

DEVICES = {190: "CUDA", 224: "AMD GPU", 247: "BPF"}
"""ELF machine numbers of devices that are not CPUs. Programs load files for these devices as data."""


def architecture(inspection: Inspection) -> Iterator[Finding]:
    """Every ELF file is for the image's architecture."""
    for entry in inspection.tree:
        if entry.broken:
            yield Finding(f"/{entry.path}", f"begins like an ELF file, but cannot be read as one: {entry.broken}")
        elif entry.elf and entry.elf.machine not in (inspection.machine, *DEVICES):
            own = inspection.image.architecture
            yield Finding(f"/{entry.path}", f"is for ELF machine {entry.elf.machine}, not for {own}")


def closure(inspection: Inspection) -> Iterator[Finding]:
    """The loader finds every library that programs and libraries need, except those of the NVIDIA driver.

    A missing library is only a note if a program can load the library before it loads the file. This is possible if the
    image contains the library, no program is linked to the file, and the loader does not search the file's folder.
    Programs in a Python package that are not on PATH are only started by the package, which can set LD_LIBRARY_PATH.
    For plug-ins, providers and modules, the libraries that load them are known."""
    tree, folders = inspection.tree, set(inspection.loader.folders(inspection.machine))
    provided = {elf.soname or path.rpartition("/")[2]: path for path, elf in inspection.objects.items()}
    on_path = {tree.resolve(f"{folder}/{name}") for folder in inspection.searched for name in tree.names(folder)}
    programs = [
        loaded
        for elf, loaded in inspection.closures
        if elf.interpreter and (loaded.files[0] in on_path or not SITE.match(loaded.files[0]))
    ]
    used = {path for loaded in programs for path in loaded.libraries.values()}
    needed = {pair for loaded in programs for pair in loaded.missing}
    opened = {file.path: file for file in opened_files(inspection)}
    needed |= {pair for file in opened.values() for pair in loaded_with(inspection, file).missing}
    for who, name in dict.fromkeys(pair for _, loaded in inspection.closures for pair in loaded.missing):
        if DRIVER.search(name):
            continue
        loss = f"; {opened[who].loss}" if who in opened else ""
        folder, _, file = who.rpartition("/")
        # Alternatives of a Python module differ after the first dot, such as those of mpi4py for each MPI.
        if SITE.match(who) and sum(other.startswith(f"{file.partition('.')[0]}.") for other in tree.names(folder)) > 1:
            yield Finding(f"/{who}", f"needs {name}; there are alternatives of this module", note=True)
            continue
        where = "which the image lacks"
        if name in provided:
            where = f"which the loader does not find, although /{provided[name]} provides it"
        searched = tree.resolve(folder) in folders and who not in used
        if (who, name) in needed or name not in provided or searched:
            yield Finding(f"/{who}", f"needs {name}, {where}{loss}")
        else:
            yield Finding(f"/{who}", f"needs {name}, {where}; the program must load {name} first", note=True)


def symbol_versions(inspection: Inspection) -> Iterator[Finding]:
    """Libraries define all symbol versions that other files need from them."""
    for who, library, version in (row for _, loaded in inspection.closures for row in loaded.versions):
        yield Finding(f"/{who}", f"needs {version}, which /{library} does not define")


def one_provider(inspection: Inspection) -> Iterator[Finding]:
    """No library is in several files that the loader can find."""
    providers: dict[str, set[str]] = defaultdict(set)
    for folder, name in inspection.on_path:
        real = inspection.tree.resolve(f"{folder}/{name}")
        elf = inspection.objects.get(real or "")
        if real and elf and elf.soname and elf.machine == inspection.machine:
            providers[elf.soname].add(real)
    for soname, paths in sorted(providers.items()):
        if len(paths) > 1:
            files = ", ".join(f"/{path}" for path in sorted(paths))
            layer = max(entry.layer for path in paths if (entry := inspection.tree.get(path)))
            yield Finding(soname, f"the loader can find several files of this library: {files}", layer=layer)


def no_stubs(inspection: Inspection) -> Iterator[Finding]:
    """The loader does not find stubs or copies of the NVIDIA driver's libraries."""
    for folder in inspection.loader.folders(inspection.machine):
        if is_a("stubs", folder):
            yield Finding(f"/{folder}", "the loader searches this folder of stubs")
    for folder, name in inspection.on_path:
        real = inspection.tree.resolve(f"{folder}/{name}")
        if is_a("of-driver", name) and real and not is_a("stubs", folder):
            what = "a stub" if is_a("stubs", real) else "a copy"
            text = f"is {what} that the loader finds; the driver on the host provides the real library"
            yield Finding(f"/{folder}/{name}", text)
    for path, elf in inspection.objects.items():
        if any(is_a("stubs", part) for part in (*elf.rpath, *elf.runpath)):
            yield Finding(f"/{path}", "the RPATH or RUNPATH of this file names a folder of stubs")


PRIVILEGED = re.compile("{folders}({programs})$".format(**PATTERNS["privileged"]))
"""Paths of programs that distributions install with setuid, setgid or capabilities."""
CAPABILITIES_OF_DRIVER = frozenset({"all", "compute", "compat32", "display", "graphics", "utility", "video"})
"""Values that enroot's hook accepts in NVIDIA_DRIVER_CAPABILITIES."""

IDS_OF_ROOTLESS = 65536
"""Number of ids of users and groups that a rootless engine has."""


def no_keys(inspection: Inspection) -> Iterator[Finding]:
    """No layer contains a private key outside of programs, libraries and the tests of wheels, not even one that a later
    layer removes."""
    yield from _forbidden(inspection, "no-keys")
    kinds = ((entry, [kind for kind in entry.secrets if "private key" in kind]) for entry in inspection.contents)
    keys = [(entry, found[0]) for entry, found in kinds if found]
    installed = installed_wheels(inspection) if keys else []
    for entry, kind in keys:
        if not is_public_test(entry, installed):
            yield _in_layer(entry, f"contains a {kind}")


def no_tokens(inspection: Inspection) -> Iterator[Finding]:
    """No layer, label, environment variable or build step contains a token or a password."""
    yield from _forbidden(inspection, "no-tokens")
    for entry in inspection.contents:
        for kind in entry.secrets:
            if "private key" not in kind:
                yield _in_layer(entry, f"seems to contain a secret: {kind}")
    image = inspection.image
    for name, value in image.env.items():
        if value and re.search(PATTERNS["secret-variable"], name):
            yield Finding(f"environment {name}", "has a value, and the name is typical of a secret")
    settings = {f"environment {name}": value for name, value in image.env.items()}
    settings |= {f"label {name}": str(value) for name, value in image.labels.items()}
    # The history contains all commands with their build arguments.
    for number, step in enumerate(image.config.get("history") or (), 1):
        settings[f"history, step {number}"] = _texts(step)
    settings |= {name: _texts(value) for name, value in image.settings.items() if name not in ("Env", "Labels")}
    settings |= {name: _texts(value) for name, value in image.config.items() if name not in ("config", "history")}
    settings["manifest"] = _texts(image.manifest.document)
    for setting, value in settings.items():
        for kind in sorted(layers.secrets_in(value.encode(), settings=True)):
            yield Finding(setting, f"seems to contain a secret: {kind}")


def _texts(value: object) -> str:
    """Return all texts in a part of a JSON document, which may be nested deeply."""
    todo, texts = [value], list[str]()
    while todo:
        part = todo.pop()
        if isinstance(part, Mapping):
            todo += [*part.keys(), *part.values()]
        elif isinstance(part, list):
            todo += part
        else:
            texts.append(str(part))
    return "\n".join(texts)


def no_backdoors(inspection: Inspection) -> Iterator[Finding]:
    """No file lets somebody log in, become root, or run code in every program."""
    backdoors = [(text, re.compile(row["path"]), row) for text, row in PATTERNS["backdoors"].items()]
    for entry in inspection.tree:
        for text, path, row in backdoors:
            if entry.kind != "folder" and path.search(entry.path):
                if found := [line for line in lines_of(entry) if re.search(row["line"], line)]:
                    yield Finding(f"/{entry.path}", f"{text}: {found[0].strip()[:80]!r}; remove the line")
                elif entry.kind != "file" or (entry.sha256 and entry.text is None):
                    yield Finding(f"/{entry.path}", f"{text}, and cannot be read as text; remove the file")
    for number, (account, *fields) in enumerate(_accounts(inspection, "etc/passwd")):
        # As in C, a sign may precede an id.
        if (account != "root" or number) and len(fields) > 1 and re.fullmatch(r"\s*[+-]?0*\s*", fields[1]):
            yield Finding(account, "this account in /etc/passwd has the id 0, as root; give it another id")


def no_site_ca(inspection: Inspection) -> Iterator[Finding]:
    """No layer adds a trusted certificate to those of the distribution."""
    yield from _forbidden(inspection, "no-site-ca")
    trusted = {c for entry in inspection.contents if is_a("trusted", entry.path) for c in entry.certificates}
    for entry in inspection.contents:
        if is_a("site", entry.path) and (others := len(set(entry.certificates) - trusted)):
            yield _in_layer(entry, f"contains {plural(others, 'certificate')} that the distribution does not have")


def no_leftovers(inspection: Inspection) -> Iterator[Finding]:
    """No layer contains package lists, caches or temporary files."""
    return _forbidden(inspection, "no-leftovers")


def not_world_writable(inspection: Inspection) -> Iterator[Finding]:
    """No file or folder is world-writable, except folders with the sticky bit."""
    for entry in inspection.tree:
        sticky = entry.kind == "folder" and entry.mode & 0o1000
        if entry.kind in ("file", "folder", "hardlink") and entry.mode & 0o002 and not sticky:
            yield Finding(f"/{entry.path}", f"is world-writable (mode {entry.mode:o})")


def setuid(inspection: Inspection) -> Iterator[Finding]:
    """Only unchanged programs of the distribution have setuid, setgid or Linux capabilities."""
    packaged = inspection.packaged
    for entry in inspection.tree:
        if entry.kind != "file" or not (entry.mode & 0o6000 or entry.capabilities):
            continue
        if not PRIVILEGED.search(entry.path):
            what = f"is setuid or setgid (mode {entry.mode:o})" if entry.mode & 0o6000 else "has Linux capabilities"
            yield Finding(f"/{entry.path}", what)
        # Without a database of packages, as in images of other distributions, only the lowest layer is theirs.
        elif (merged(entry.path), entry.md5) not in packaged if packaged else entry.layer > 0:
            origin = "of a package in /var/lib/dpkg/info" if packaged else "in layer 1"
            yield Finding(f"/{entry.path}", f"is privileged, but its content is not that {origin}; keep the original")


def rootless(inspection: Inspection) -> Iterator[Finding]:
    """Users who are not root can unpack the image, and enroot gives its containers the GPUs.
    For what enroot does, see src/docker.sh and conf/hooks in its repository."""
    for number, layer in enumerate(inspection.layers):
        if layer.compression == "zstd":
            text = "is compressed with zstd, which old versions of enroot and umoci cannot read"
            yield Finding(f"layer {number + 1}", text, note=True, layer=number)
        paths = {entry.path for entry in layer.entries}
        for entry in layer.entries:
            if entry.kind == "device":
                yield _in_layer(entry, "is a device, which users without root's rights cannot unpack; remove the file")
            elif max(entry.uid, entry.gid) >= IDS_OF_ROOTLESS:
                text = (
                    f"belongs to {entry.uid}:{entry.gid}; rootless engines have only {IDS_OF_ROOTLESS} ids; use chown"
                )
                yield _in_layer(entry, text)
            folder, _, name = entry.path.rpartition("/")
            if name.startswith(f"{WHITEOUT}{WHITEOUT}") and name != OPAQUE:
                yield _in_layer(entry, "is a special file of aufs, not an OCI whiteout")
            elif name.startswith(WHITEOUT) and f"{folder}/{name.removeprefix(WHITEOUT)}".lstrip("/") in paths:
                yield _in_layer(entry, "is a whiteout of a file in the same layer")
    env = inspection.image.env
    capabilities = set(filter(None, env.get("NVIDIA_DRIVER_CAPABILITIES", "").split(",")))
    if any(elf.gpu for elf in inspection.objects.values()):
        if env.get("NVIDIA_VISIBLE_DEVICES", "") in ("", "none", "void"):
            yield Finding("NVIDIA_VISIBLE_DEVICES", "names no GPU, so enroot gives containers no GPU; set it to all")
        if not capabilities & {"all", "compute"}:
            yield Finding("NVIDIA_DRIVER_CAPABILITIES", "lacks compute, so enroot brings no libcuda.so.1; add it")
    if unknown := sorted(capabilities - CAPABILITIES_OF_DRIVER):
        yield Finding("NVIDIA_DRIVER_CAPABILITIES", f"contains {', '.join(unknown)}, which enroot's hook refuses")
    devices = env.get("MELLANOX_VISIBLE_DEVICES", "")
    if not re.fullmatch(r"(all|none|void|\d+(,\d+)*)?", devices):
        yield Finding("MELLANOX_VISIBLE_DEVICES", f"is {devices!r}; enroot's hook accepts all, none or numbers")


def _forbidden(inspection: Inspection, rule: str) -> Iterator[Finding]:
    """Yield a finding for each file, in any layer, whose path this rule forbids."""
    patterns = {text: re.compile(pattern) for text, pattern in PATTERNS["forbidden"][rule].items()}
    for entry in inspection.contents:
        for text, pattern in patterns.items():
            if pattern.search(entry.path):
                yield _in_layer(entry, text)


def _in_layer(entry: FileEntry, text: str) -> Finding:
    """Return a finding about a file; its text names the file's layer, counted from 1."""
    return Finding(f"/{entry.path}", f"{text}, in layer {entry.layer + 1}", layer=entry.layer)


def gpu_code(inspection: Inspection) -> Iterator[Finding]:
    """GPU code is for the GPU architectures that the matrix lists.

    Files that imagebuild compiled must contain code for exactly these architectures. Other files must run on all of
    them."""
    target = inspection.target
    if not inspection.project.matrix.model.gpu_architectures:
        raise NotApplicable("the matrix lists no GPU architectures")
    toolkit = resolve_recipe(inspection.project, target).toolkit
    if toolkit == "0":
        raise NotApplicable("the image contains no CUDA toolkit")
    wanted = gpu_capabilities(inspection.project, target, toolkit).get(inspection.image.architecture, ())
    own = [pattern.strip("/") for _, component in inspection.components() for pattern in component.gpu_code]
    seen: set[str] = set()
    for path, elf in inspection.objects.items():
        if not elf.gpu:
            continue
        patterns = [pattern for pattern in own if fnmatch(path, pattern)]
        seen.update(patterns)
        code = describe_code(elf)
        if patterns:
            exact = f"code for {', '.join(wanted)}" + (f"; PTX for {wanted[-1]}" if len(wanted) > 1 else "")
            if code != exact:
                yield Finding(f"/{path}", f"contains {code}; the matrix requires {exact}")
        elif lacking := [capability for capability in wanted if not runs(elf, capability)]:
            yield Finding(f"/{path}", f"does not run on {', '.join(lacking)}: contains only {code}")
        else:
            yield Finding(f"/{path}", f"contains {code}", note=True)
    for pattern in own:
        if pattern not in seen:
            yield Finding(f"/{pattern}", "no file with GPU code matches this pattern")


def describe_code(elf: Elf) -> str:
    """Return a description of a file's GPU code, such as `code for 80, 90; PTX for 90`."""
    parts = sorted(elf.gpu, key=lambda part: (part.kind, natural_order(part.capability)))
    kinds = (
        (kind, ", ".join(part.capability for part in of_kind)) for kind, of_kind in groupby(parts, attrgetter("kind"))
    )
    return "; ".join(f"{kind.replace('ptx', 'PTX')} for {listed}" for kind, listed in kinds)


def runs(elf: Elf, capability: str) -> bool:
    """Return whether a file's GPU code runs on a GPU with this compute capability.

    Code for X.y runs on X.z if z >= y; with the suffix `a`, it runs only on X.y. PTX for X.y runs on all later
    capabilities; with the suffix `f`, it runs only on those with the same X."""
    wanted = int(capability.rstrip("af"))
    for part in elf.gpu:
        compiled, suffix = int(part.capability.rstrip("af")), part.capability.lstrip("0123456789")
        in_family = compiled // 10 == wanted // 10 or (part.kind == "ptx" and suffix != "f")
        if compiled == wanted or (compiled < wanted and in_family and suffix != "a"):
            return True
    return False


BASE, BASE_DIGEST = "org.opencontainers.image.base.name", "org.opencontainers.image.base.digest"
"""Labels with the name and digest of the base image. `render --base-image` changes both labels."""


def plan(inspection: Inspection) -> Iterator[Finding]:
    """The labels agree with the plan: the target, its licences, component versions, axes, base image and lock."""
    planned = image_labels(resolve_recipe(inspection.project, inspection.target))
    present = inspection.image.labels
    ours = {label for label in present if label.startswith(("imagebuild.component.", "imagebuild.axis."))}
    theirs = {label for label in planned if label.startswith("org.")} if inspection.added_layers else set()
    for label in sorted({*planned, *ours} - {BASE, BASE_DIGEST} - theirs):
        if present.get(label) != planned.get(label):
            is_now, should_be = present.get(label, "absent"), planned.get(label, "absent")
            yield Finding(label, f"is {is_now!r}, but {should_be!r} in the plan")
    if not present.get(BASE):
        yield Finding(BASE, "the label is missing")
    if (digest := present.get(BASE_DIGEST)) and not re.fullmatch(DIGEST, digest):
        yield Finding(BASE_DIGEST, f"{digest!r} is not a digest")


def licenses(inspection: Inspection) -> Iterator[Finding]:
    """The licence texts of all components exist."""
    for name, component in inspection.components():
        for pattern in component.license_files:
            if not inspection.tree.glob(pattern):
                yield Finding(pattern, f"the licence text of {name} is missing")


def user(inspection: Inspection) -> Iterator[Finding]:
    """The default user is a number and exists, no account has a password or can log in without one.

    Kubelets cannot compare a name with `runAsNonRoot`, and refuse root in any spelling. Images of this project also
    have a user with id 1000."""
    accounts = _accounts(inspection, "etc/passwd")
    name, _, group = str(inspection.image.settings.get("User") or "").partition(":")
    if name and not name.isdigit() and name not in [row[0] for row in accounts]:
        yield Finding(name, "containers start as this user, but /etc/passwd does not contain it; write UID:GID")
    elif name != "root" and not (name + group).isdigit() and name + group:
        ids = next((":".join(row[2:4]) for row in accounts if name in (row[0], *row[2:3])), "UID:GID")
        yield Finding(name, f"containers start as a name, which kubelets cannot check (runAsNonRoot); write USER {ids}")
    for path in ACCOUNTS:
        if (entry := inspection.tree.find(path)) and entry.sha256 and entry.text is None:
            yield Finding(f"/{path}", "cannot be read as text, so its accounts are unknown; replace it by a short file")
        for account, *fields in _accounts(inspection, path):
            password = fields[0] if fields else ""
            if password == "" and not path.endswith("-"):
                yield Finding(account, "can log in without a password")
            elif not password.startswith(("x", "*", "!")) and password:
                yield Finding(account, "has a password; its hash is in the image")
    if inspection.image.labels.get("imagebuild.target"):
        normal = next((fields for fields in accounts if len(fields) > 5 and fields[2] == "1000"), None)
        if normal is None:
            yield Finding("1000", "no user has this id")
        elif (home := inspection.tree.find(normal[5])) is None or home.kind != "folder":
            yield Finding(normal[0], f"the home folder {normal[5]} does not exist")


ACCOUNTS = ("etc/passwd", "etc/shadow", "etc/passwd-", "etc/shadow-")
"""Files with accounts. Programs that change the first two keep the old content in the others."""


def _accounts(inspection: Inspection, path: str) -> list[list[str]]:
    """Return the fields of each line in a file with accounts. Programs use the first of several lines with a name."""
    lines = lines_of(inspection.tree.find(path))
    return [line.split(":") for line in lines if line and not line.startswith("#")]


def size(inspection: Inspection) -> Iterator[Finding]:
    """The compressed layers do not exceed the image's size limit in the matrix."""
    target = inspection.target
    limits = inspection.project.matrix.model.images[target.image].size_limit_mb
    limit = limits.get(target.axes["variant"]) if isinstance(limits, dict) else limits
    if limit is None:
        raise NotApplicable("the matrix has no size-limit-mb for the image")
    if inspection.added_layers:
        added = plural(inspection.added_layers, "layer")
        raise NotApplicable(f"the limit is that of {target.id}, to which the image adds {added}")
    if not all(layer.compression for layer in inspection.layers):
        raise NotApplicable("the engine saves layers uncompressed, but the limit is for compressed layers")
    megabytes, number = sum(layer.stored for layer in inspection.layers) / 1e6, plural(len(inspection.layers), "layer")
    yield Finding("size", f"{megabytes:.0f} MB in {number}; the limit is {limit} MB", note=megabytes <= limit)


ImageRule = Callable[[Inspection], Iterator[Finding]]
"""A function that tests a statement about images. The function's name is the name of the check. The first line of the
docstring is the statement, which users see. The function yields the findings that contradict the statement. It raises
NotApplicable if it cannot judge the image."""
RULES: tuple[ImageRule, ...] = (
    plan, licenses, environment, user, command, size, no_keys, no_tokens, no_backdoors, no_site_ca, no_leftovers,
    not_world_writable, setuid, rootless, base_kept, for_every_user, startable, architecture, closure, symbol_versions,
    one_provider, no_stubs, gpu_code, plugins, executable_stack, one_of_each, wheels,
)  # fmt: skip
INCLUDING_BASE = (no_keys, no_tokens)
"""Rules that also report findings in the base image as faults."""


def rule_name(rule: ImageRule) -> str:
    """Return the name under which users see the rule, such as `no-keys`."""
    return rule.__name__.replace("_", "-")


IMAGE_CHECKS = {
    "readable": "Every layer can be read",
    **{rule_name(rule): str(rule.__doc__).partition(".")[0] for rule in RULES},
}
"""Maps the name of each check of an image's files to the statement that it proves."""
UNJUDGED = "not judged, as the layers of the base image are unknown: "
"""Beginning of the reason of a rule that had findings, but could not tell whose they are. Such an image may not be
published."""
SHOWN = 100
"""Maximum number of findings of a rule in the output."""


def declared_waivers(project: Project, image: str, components: Iterable[str]) -> list[tuple[str, CheckWaiver]]:
    """Return the waivers (accepted findings) of an image and its components.
    Each waiver comes with the name of the component or image that declares it."""
    known = project.components
    waivers = [(name, waiver) for name in components if name in known for waiver in known[name].model.waivers]
    if entry := project.matrix.model.images.get(image):
        waivers += [(f"images.{image}", waiver) for waiver in entry.waivers]
    return waivers


@cache
def hash_of_rules() -> str:
    """Return the hash of the code and patterns that read and judge an image's files."""
    names = ("rules.py", "inspection.py", "paths.py", "runtime.py", "tables.py", "wheels.py")
    own = b"".join(Path(__file__).with_name(name).read_bytes() for name in names)
    return hashlib.sha256(own + hash_of_readers().encode()).hexdigest()


def hash_of_image_checks(project: Project, image: str, components: Iterable[str]) -> str:
    """Return the hash of the code, patterns and waivers that decide whether the checks of an image's files pass."""
    waivers = sorted(f"{owner} {waiver!r}" for owner, waiver in declared_waivers(project, image, components))
    return hashlib.sha256("\n".join([hash_of_rules(), *waivers]).encode()).hexdigest()


def judge_images(inspections: Sequence[Inspection]) -> Iterator[CheckResult]:
    """Yield the results of all checks of an image's files for each of its platforms, beginning with `readable`.
    If there are several platforms, the names of checks end with the platform."""
    for read in inspections:
        project, labels, image = read.project, read.image.labels, read.image
        name, components = labels.get("org.opencontainers.image.title", ""), components_of(labels)
        conditions = {**axis_facts(axes_of(labels)), "arch": image.architecture, "image": name}
        declared = declared_waivers(project, name, components) if components else ()
        waivers = [(owner, waiver) for owner, waiver in declared if matches(waiver.when, conditions)]
        seconds, total = round(read.seconds, 3), plural(len(read.layers), "layer")
        cached = "; the facts about the others are from the cache" if read.read < len(read.layers) else ""
        says = f"read {read.read} of {total}{cached}"
        judged = [CheckResult(component=IMAGE, check="readable", outcome="passed", output=says, seconds=seconds)]
        judged += [_judge_rule(rule, read, [w for w in waivers if w[1].rule == rule_name(rule)]) for rule in RULES]
        sha256, suffix = hash_of_image_checks(project, name, components), f" {image.platform}" * (len(inspections) > 1)
        for result in judged:
            yield result.model_copy(update={"sha256": sha256, "check": f"{result.check}{suffix}"})


def _judge_rule(rule: ImageRule, inspection: Inspection, waivers: Sequence[tuple[str, CheckWaiver]]) -> CheckResult:
    """Return the result of a rule.
    `waivers` are the waivers of this rule, each with the component or image that declares it."""
    began = time.monotonic()
    result = CheckResult(component=IMAGE, check=rule_name(rule), outcome="skipped")
    try:
        findings = list(dict.fromkeys(rule(inspection)))
    except NotApplicable as reason:
        return result.model_copy(update={"reason": str(reason)})
    faults, unjudged, accepted, unknown = list[str](), list[str](), list[str](), ""
    unused = {waiver.subject: f"the waiver of {owner} matches no finding; remove it" for owner, waiver in waivers}
    for finding in findings:
        fitting = next((w for w in waivers if fnmatchcase(finding.subject, w[1].subject)), None)
        if finding.note:
            accepted.append(f"{finding} (note)")
        elif fitting:
            owner, waiver = fitting
            unused.pop(waiver.subject, None)
            accepted.append(f"{finding} (waived: {owner}: {waiver.reason})")
        elif rule not in INCLUDING_BASE and inspection.is_of_base(finding):
            is_known = inspection.base[0] is not None
            (accepted if is_known else unjudged).append(f"{finding} ({'base image' if is_known else 'not judged'})")
        else:
            faults.append(f"{finding}{_declared_by(inspection, finding)}")
            if rule not in INCLUDING_BASE and inspection.layer_of(finding) is not None and inspection.base[0] == 0:
                unknown = inspection.base[1]
    lines = [*faults, *unjudged, *(f"{subject}: {text}" for subject, text in unused.items()), *accepted]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"… and {len(lines) - SHOWN} more"]
    lines += [f"all layers were judged, as those of the base image are unknown: {unknown}"] if unknown else []
    first = faults[0] if faults else ""
    if unjudged and not faults:
        first = f"{UNJUDGED}{inspection.base[1]}; this may be of the base image: {unjudged[0]}"
    more = f", and {len(faults or unjudged) - 1} more" if len(faults or unjudged) > 1 else ""
    return result.model_copy(
        update={
            "outcome": "failed" if faults else "skipped" if unjudged else "passed", "reason": f"{first}{more}",
            "output": "\n".join(lines),
            "seconds": round(time.monotonic() - began, 3),
        }
    )  # fmt: skip


def _declared_by(inspection: Inspection, finding: Finding) -> str:
    """Return the end of a message: the component that declares a variable or a folder in /opt or brought the layer, or
    the key of the image that declares a variable; empty if it is unknown."""
    subject, labels = finding.subject, inspection.image.labels
    for name in components_of(labels):
        file = inspection.project.components.get(name)
        env = [pair for row in file.model.env for pair in row.values.items()] if file else []
        declared = ":".join((*(value for _, value in env), *(file.model.libraries if file else ())))
        folders = re.findall(r"(?:^|:)(/opt/[^/:]+)", declared)
        if (subject in dict(env) and subject not in FOLDER_LISTS) or any(
            f"{subject}/".startswith(f"{folder}/") for folder in folders
        ):
            return f" (component {name})"
    if component := inspection.components_of_layers.get(inspection.layer_of(finding)):
        return f" (component {component})"
    title = labels.get("org.opencontainers.image.title", "")
    entry = inspection.project.matrix.model.images.get(title)
    return f" (images.{title}.env)" if entry and subject in entry.env else ""


def read_images(found: FoundImage, project: Project, plan: Plan, finder: ImageFinder | None = None) -> list[Inspection]:
    """Read the files of an image, and return an inspection for each of the image's platforms. `finder` finds its base.
    Raises CommandError if an engine or a registry fails, ResultError if the image cannot be read."""
    inspections = []
    recipe_of = partial(resolve_recipe, project)
    finder = finder or ImageFinder()
    with room_explained(found.name):
        for image in map(found.image, found.platforms):
            began = time.monotonic()
            facts, read = read_layers(image)
            check_tables(image)
            seconds = time.monotonic() - began
            inspection = Inspection(
                image, facts, project, plan, seconds, read, find_base=finder.find_base,
                base_of=lambda target: recipe_of(target).base, copied_of=lambda target: recipe_of(target).copied,
            )  # fmt: skip
            try:
                inspection.tree  # noqa: B018  # an image that engines refuse has no tree
            except ResultError as error:
                raise ResultError(f"{found.name}: {error}") from None
            inspections.append(inspection)
    return inspections
