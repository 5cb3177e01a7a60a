"""Check an image by reading its files: nothing is started, so its architecture does not matter."""

from __future__ import annotations

import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch, fnmatchcase
from functools import cache, cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from imagebuild.bench.verification import CheckResult
from imagebuild.core.errors import plural
from imagebuild.core.fields import DIGEST, axis_facts, matches, natural_order
from imagebuild.oci.image import FoundImage, PlatformImage
from imagebuild.oci.layout import OPAQUE, WHITEOUT
from imagebuild.project.component import Component
from imagebuild.project.matrix import CheckWaiver, Plan, Target, axes_of, components_of
from imagebuild.project.plan import Project
from imagebuild.render import renderer
from imagebuild.render.recipe import SYSTEM_PATH
from imagebuild.render.renderer import Renderer
from imagebuild.verify import layers
from imagebuild.verify.checks import IMAGE
from imagebuild.verify.elf import DRIVER, MACHINES, Closure, Loader
from imagebuild.verify.files import Elf, FileEntry, Finding, Layer, Tree
from imagebuild.verify.layers import PATTERNS, is_a, scan_all
from imagebuild.verify.subject import room_explained


class NotApplicable(Exception):
    """Report that a rule cannot judge this image, and why."""


@dataclass(frozen=True)
class Inspection:
    """Hold an image that was read; `renderer` and `plan` are of the project to which it should belong."""

    image: PlatformImage
    layers: tuple[Layer, ...]
    renderer: Renderer
    plan: Plan
    seconds: float = 0.0
    """How long reading took."""

    @cached_property
    def tree(self) -> Tree:
        return Tree(self.layers)

    @cached_property
    def objects(self) -> dict[str, Elf]:
        """Return path → content of all ELF files that a container sees."""
        return {entry.path: entry.elf for entry in self.tree if entry.elf}

    @cached_property
    def loader(self) -> Loader:
        return Loader(self.tree, self.image.env)

    @cached_property
    def closures(self) -> list[tuple[Elf, Closure]]:
        """Return what programs and libraries for the image's machine load."""
        files = [(path, elf) for path, elf in self.objects.items() if elf.machine == self.machine and elf.loadable]
        return [(elf, self.loader.closure(path)) for path, elf in files]

    @cached_property
    def on_path(self) -> list[tuple[str, str]]:
        """Return folder and name of everything that the loader can find by name."""
        return [(folder, name) for folder in self.loader.folders(self.machine) for name in self.tree.names(folder)]

    @cached_property
    def contents(self) -> list[FileEntry]:
        """Return the files of all layers, without the marks of what a layer removes."""
        entries = (entry for layer in self.layers for entry in layer.entries)
        return [e for e in entries if e.kind in ("file", "hardlink") and "/.wh." not in f"/{e.path}"]

    @cached_property
    def base_layers(self) -> int:
        """Return how many layers are below our first step; 0 if the history does not show it, or not every layer."""
        steps = [step for step in self.image.config.get("history") or () if not step.get("empty_layer")]
        ours = [number for number, step in enumerate(steps) if FIRST_STEP in str(step.get("created_by", ""))]
        return ours[-1] if ours and len(steps) == len(self.layers) else 0

    def is_of_base(self, finding: Finding) -> bool:
        """Return whether a finding is about a file that the base image brings."""
        entry = self.tree.get(finding.subject[1:]) if finding.subject.startswith("/") else None
        layer = entry.layer if finding.layer is None and entry else finding.layer
        return layer is not None and layer < self.base_layers

    @property
    def machine(self) -> int:
        """Return `e_machine` of the image's ELF files. Raises NotApplicable if it is not known."""
        if machine := MACHINES.get(self.image.architecture):
            return machine
        raise NotApplicable(f"the machine of ELF files for {self.image.platform} is not known here")

    def components(self) -> list[tuple[str, Component]]:
        """Return the components that the labels name and the project has. Raises NotApplicable without such labels."""
        names = components_of(self.image.labels)
        if not names:
            raise NotApplicable("the image has no label imagebuild.component.*: it was not built here")
        known = self.renderer.project.components
        return [(name, known[name].model) for name in names if name in known]

    @property
    def target(self) -> Target:
        """Return the target that the labels name. Raises NotApplicable if they name none or the plan lacks it."""
        name = self.image.labels.get("imagebuild.target")
        for target in self.plan.targets:
            if target.id == name:
                return target
        unknown = "the image has no label imagebuild.target: it was not built here"
        raise NotApplicable(f"the plan has no target {name}" if name else unknown)


FIRST_STEP = "cat > /etc/profile.d/imagebuild.sh"
"""Text by which our first step is recognised in the history."""
DEVICES = {190: "CUDA", 224: "AMD GPU", 247: "BPF"}
"""ELF machines other than CPUs: files of theirs are data of programs."""


def architecture(inspection: Inspection) -> Iterator[Finding]:
    """Every ELF file is for the image's architecture."""
    for entry in inspection.tree:
        if entry.broken:
            yield Finding(f"/{entry.path}", f"begins like an ELF file, but cannot be read: {entry.broken}")
        elif entry.elf and entry.elf.machine not in (inspection.machine, *DEVICES):
            own = inspection.image.architecture
            yield Finding(f"/{entry.path}", f"is for ELF machine {entry.elf.machine}, not for {own}")


def closure(inspection: Inspection) -> Iterator[Finding]:
    """The loader finds every library that is needed, except the driver's.

    A library in no folder of the loader may rely on what its program has loaded; a program may not.
    """
    tree, folders = inspection.tree, set(inspection.loader.folders(inspection.machine))
    provided = {elf.soname or path.rpartition("/")[2]: path for path, elf in inspection.objects.items()}
    programs = [loaded for elf, loaded in inspection.closures if elf.interpreter]
    used = {path for loaded in programs for path in loaded.libraries.values()}
    needed = {pair for loaded in programs for pair in loaded.missing}
    for who, name in dict.fromkeys(pair for _, loaded in inspection.closures for pair in loaded.missing):
        if DRIVER.search(name):
            continue
        where = f"which the loader does not find in /{provided[name]}" if name in provided else "which is nowhere"
        on_path = tree.resolve(who.rpartition("/")[0]) in folders and who not in used
        if (who, name) in needed or name not in provided or on_path:
            yield Finding(f"/{who}", f"needs {name}, {where}")
        else:
            yield Finding(f"/{who}", f"needs {name}, {where}; what loads it must have loaded that before", note=True)


def symbol_versions(inspection: Inspection) -> Iterator[Finding]:
    """Libraries define every version of symbols that is needed."""
    for who, library, version in (row for _, loaded in inspection.closures for row in loaded.versions):
        yield Finding(f"/{who}", f"needs {version}, which /{library} does not define")


def one_provider(inspection: Inspection) -> Iterator[Finding]:
    """For each library the loader can find only one file."""
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
            yield Finding(soname, f"is in several files where the loader looks: {files}", layer=layer)


def no_stubs(inspection: Inspection) -> Iterator[Finding]:
    """The loader finds no stub and no copy of a driver's library."""
    for folder in inspection.loader.folders(inspection.machine):
        if is_a("stubs", folder):
            yield Finding(f"/{folder}", "the loader looks in a folder of stubs")
    for folder, name in inspection.on_path:
        real = inspection.tree.resolve(f"{folder}/{name}")
        if is_a("of-driver", name) and real and not is_a("stubs", folder):
            what = "a stub" if is_a("stubs", real) else "a copy"
            yield Finding(f"/{folder}/{name}", f"is {what} that the loader finds; the driver brings the library itself")
    for path, elf in inspection.objects.items():
        if any(is_a("stubs", part) for part in (*elf.rpath, *elf.runpath)):
            yield Finding(f"/{path}", "its run path names a folder of stubs")


PRIVILEGED = re.compile("{folders}({programs})$".format(**PATTERNS["privileged"]))
"""Programs that distributions install setuid, setgid or with capabilities."""
CAPABILITIES_OF_DRIVER = frozenset({"all", "compute", "compat32", "display", "graphics", "utility", "video"})
"""Values of NVIDIA_DRIVER_CAPABILITIES that enroot's hook knows."""


def no_keys(inspection: Inspection) -> Iterator[Finding]:
    """No layer holds a private key outside of programs and libraries, not even if a later layer removes it."""
    yield from _forbidden(inspection, "no-keys")
    for entry in inspection.contents:
        if keys := [kind for kind in entry.secrets if "private key" in kind]:
            yield _in_layer(entry, f"holds a {keys[0]}")


def no_tokens(inspection: Inspection) -> Iterator[Finding]:
    """No layer, label, variable or build step holds a token or a password."""
    yield from _forbidden(inspection, "no-tokens")
    for entry in inspection.contents:
        for kind in entry.secrets:
            if "private key" not in kind:
                yield _in_layer(entry, f"holds what looks like a secret: {kind}")
    image = inspection.image
    for name, value in image.env.items():
        if value and re.search(PATTERNS["secret-variable"], name):
            yield Finding(f"environment {name}", "has the name of a secret, and a value")
    settings = {f"environment {name}": value for name, value in image.env.items()}
    settings |= {f"label {name}": str(value) for name, value in image.labels.items()}
    # Commands with their build arguments are in the history.
    for number, step in enumerate(image.config.get("history") or (), 1):
        settings[f"history, step {number}"] = str(step.get("created_by", ""))
    for setting, value in settings.items():
        for kind in sorted(layers.secrets_in(value.encode(), settings=True)):
            yield Finding(setting, f"holds what looks like a secret: {kind}")


def no_site_ca(inspection: Inspection) -> Iterator[Finding]:
    """No layer trusts a certificate that the distribution does not."""
    yield from _forbidden(inspection, "no-site-ca")
    trusted = {c for entry in inspection.contents if is_a("trusted", entry.path) for c in entry.certificates}
    for entry in inspection.contents:
        if is_a("site", entry.path) and (others := len(set(entry.certificates) - trusted)):
            yield _in_layer(entry, f"holds {plural(others, 'certificate')} that the distribution does not have")


def no_leftovers(inspection: Inspection) -> Iterator[Finding]:
    """No layer holds package lists, caches or temporary files."""
    return _forbidden(inspection, "no-leftovers")


def not_world_writable(inspection: Inspection) -> Iterator[Finding]:
    """Only owners and groups can write to files and folders."""
    for entry in inspection.tree:
        sticky = entry.kind == "folder" and entry.mode & 0o1000
        if entry.kind in ("file", "folder", "hardlink") and entry.mode & 0o002 and not sticky:
            yield Finding(f"/{entry.path}", f"everybody can write to it (mode {entry.mode:o})")


def setuid(inspection: Inspection) -> Iterator[Finding]:
    """Only the distribution's programs run with rights of others."""
    for entry in inspection.tree:
        if entry.kind not in ("file", "hardlink") or PRIVILEGED.search(entry.path):
            continue
        if entry.mode & 0o6000:
            yield Finding(f"/{entry.path}", f"runs with the rights of its owner or group (mode {entry.mode:o})")
        if entry.capabilities:
            yield Finding(f"/{entry.path}", "runs with capabilities of the kernel")


def rootless(inspection: Inspection) -> Iterator[Finding]:
    """Users without root's rights can unpack the image, and enroot gives its containers their GPUs.

    What enroot does is in its src/docker.sh and conf/hooks.
    """
    for number, layer in enumerate(inspection.layers):
        if layer.compression == "zstd":
            text = "is compressed with zstd, which older enroot and umoci cannot read"
            yield Finding(f"layer {number + 1}", text, note=True, layer=number)
        paths = {entry.path for entry in layer.entries}
        for entry in layer.entries:
            folder, _, name = entry.path.rpartition("/")
            if name.startswith(f"{WHITEOUT}{WHITEOUT}") and name != OPAQUE:
                yield _in_layer(entry, "is a mark of aufs, and no whiteout of OCI")
            elif name.startswith(WHITEOUT) and f"{folder}/{name.removeprefix(WHITEOUT)}".lstrip("/") in paths:
                yield _in_layer(entry, "is a whiteout of what its layer brings itself")
    env = inspection.image.env
    capabilities = set(filter(None, env.get("NVIDIA_DRIVER_CAPABILITIES", "").split(",")))
    if any(elf.gpu for elf in inspection.objects.values()):
        if env.get("NVIDIA_VISIBLE_DEVICES", "") in ("", "none", "void"):
            yield Finding("NVIDIA_VISIBLE_DEVICES", "names no GPU, so containers of enroot have none")
        if not capabilities & {"all", "compute"}:
            yield Finding("NVIDIA_DRIVER_CAPABILITIES", "lacks compute, so containers of enroot have no libcuda.so.1")
    if unknown := sorted(capabilities - CAPABILITIES_OF_DRIVER):
        yield Finding("NVIDIA_DRIVER_CAPABILITIES", f"has {', '.join(unknown)}, which enroot's hook refuses")
    devices = env.get("MELLANOX_VISIBLE_DEVICES", "")
    if not re.fullmatch(r"(all|none|void|\d+(,\d+)*)?", devices):
        yield Finding("MELLANOX_VISIBLE_DEVICES", f"is {devices!r}; enroot's hook takes all, none or numbers")


def _forbidden(inspection: Inspection, rule: str) -> Iterator[Finding]:
    """Yield the files whose path the rule allows in no layer."""
    for entry in inspection.contents:
        for text, pattern in PATTERNS["forbidden"][rule].items():
            if re.search(pattern, entry.path):
                yield _in_layer(entry, text)


def _in_layer(entry: FileEntry, text: str) -> Finding:
    """Return a finding about a file that names its layer, counted from 1."""
    return Finding(f"/{entry.path}", f"{text}, in layer {entry.layer + 1}", layer=entry.layer)


def gpu_code(inspection: Inspection) -> Iterator[Finding]:
    """Fat binaries run on the GPUs that the matrix lists.

    What was compiled here must be for exactly these GPUs; what others compiled must run on all of them.
    """
    target = inspection.target
    if not inspection.renderer.project.matrix.model.gpu_architectures:
        raise NotApplicable("the matrix lists no GPU architectures")
    wanted = inspection.renderer.capabilities(target).get(inspection.image.architecture, ())
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
                yield Finding(f"/{path}", f"has {code}; the matrix wants {exact}")
        elif lacking := [capability for capability in wanted if not runs(elf, capability)]:
            yield Finding(f"/{path}", f"does not run on {', '.join(lacking)}: it has {code}")
        else:
            yield Finding(f"/{path}", f"has {code}", note=True)
    for pattern in own:
        if pattern not in seen:
            yield Finding(f"/{pattern}", "holds no GPU code")


def describe_code(elf: Elf) -> str:
    """Return what GPU code a file has: `code for 80, 90; PTX for 90`."""
    parts = sorted(elf.gpu, key=lambda part: (part.kind, natural_order(part.capability)))
    kinds = (
        (kind, ", ".join(part.capability for part in of_kind)) for kind, of_kind in groupby(parts, attrgetter("kind"))
    )
    return "; ".join(f"{kind.replace('ptx', 'PTX')} for {listed}" for kind, listed in kinds)


def runs(elf: Elf, capability: str) -> bool:
    """Return whether a file's GPU code runs on a compute capability.

    Code of X.y runs on X.z from z = y on, with the suffix `a` on X.y only; PTX is compiled for all later ones, with the
    suffix `f` for those of its family.
    """
    wanted = int(capability.rstrip("af"))
    for part in elf.gpu:
        compiled, suffix = int(part.capability.rstrip("af")), part.capability.lstrip("0123456789")
        in_family = compiled // 10 == wanted // 10 or (part.kind == "ptx" and suffix != "f")
        if compiled == wanted or (compiled < wanted and in_family and suffix != "a"):
            return True
    return False


BASE, BASE_DIGEST = "org.opencontainers.image.base.name", "org.opencontainers.image.base.digest"
"""Labels that `render --base-image` changes."""
USUAL = SYSTEM_PATH.split(":")
"""Folders of everybody's PATH, whether they exist or not."""


def plan(inspection: Inspection) -> Iterator[Finding]:
    """The labels say what the image is, its base, licences, versions, axes and lock, as the plan says now."""
    recipe = inspection.renderer.recipe(inspection.target)
    planned = renderer.image_labels(recipe, inspection.renderer.lock_hash(recipe), "")
    present = inspection.image.labels
    ours = {label for label in present if label.startswith(("imagebuild.component.", "imagebuild.axis."))}
    for label in sorted({*planned, *ours} - {BASE, BASE_DIGEST}):
        if present.get(label) != planned.get(label):
            is_now, should_be = present.get(label, "absent"), planned.get(label, "absent")
            yield Finding(label, f"is {is_now!r}, the plan says {should_be!r}")
    if not present.get(BASE):
        yield Finding(BASE, "the label is missing")
    if (digest := present.get(BASE_DIGEST)) and not re.fullmatch(DIGEST, digest):
        yield Finding(BASE_DIGEST, f"{digest!r} is not a digest")


def licenses(inspection: Inspection) -> Iterator[Finding]:
    """The licence texts of all components are there."""
    for name, component in inspection.components():
        for pattern in component.license_files:
            if not inspection.tree.glob(pattern):
                yield Finding(pattern, f"the licence text of {name} is missing")


def environment(inspection: Inspection) -> Iterator[Finding]:
    """Folders in variables exist."""
    for name, value in inspection.image.env.items():
        is_folder = re.search(r"_(DIR|HOME|ROOT|PREFIX)$", name) and value.startswith("/")
        folders = value.split(":") if name in renderer.FOLDER_LISTS else [value] if is_folder else []
        for folder in dict.fromkeys(folders):
            if not folder:
                yield Finding(name, "an empty part means the current folder")
            elif not folder.startswith("/"):
                yield Finding(name, f"{folder!r} depends on the current folder")
            elif inspection.tree.resolve(folder) is None and not is_a("mounted", folder) and folder not in USUAL:
                yield Finding(name, f"{folder} does not exist")


def user(inspection: Inspection) -> Iterator[Finding]:
    """The user of containers exists, no account has a password or needs none, and there is a normal user."""
    accounts = _accounts(inspection, "etc/passwd")
    hashes = _accounts(inspection, "etc/shadow")
    name = str(inspection.image.settings.get("User") or "").partition(":")[0]
    if name and not name.isdigit() and name not in accounts:
        yield Finding(name, "containers start as this user, whom /etc/passwd does not have")
    for account, fields in (*accounts.items(), *hashes.items()):
        password = fields[1] if len(fields) > 1 else ""
        if password == "":
            yield Finding(account, "needs no password")
        elif not password.startswith(("x", "*", "!")):
            yield Finding(account, "has a password, whose hash is in the image")
    if inspection.image.labels.get("imagebuild.target"):
        normal = next((fields for fields in accounts.values() if len(fields) > 5 and fields[2] == "1000"), None)
        if normal is None:
            yield Finding("1000", "there is no normal user with this number")
        elif (home := inspection.tree.find(normal[5])) is None or home.kind != "folder":
            yield Finding(normal[0], f"the home folder {normal[5]} does not exist")


def _accounts(inspection: Inspection, path: str) -> dict[str, list[str]]:
    """Return name → fields of the lines of /etc/passwd or /etc/shadow."""
    entry = inspection.tree.find(path)
    lines = ((entry.text if entry else None) or b"").decode("utf-8", "replace").splitlines()
    return {line.partition(":")[0]: line.split(":") for line in lines if line and not line.startswith("#")}


def command(inspection: Inspection) -> Iterator[Finding]:
    """What a container starts exists and is executable, and /bin/sh exists."""
    settings = inspection.image.settings
    words = [*(settings.get("Entrypoint") or ()), *(settings.get("Cmd") or ())]
    if not words:
        yield Finding("command", "the image has neither an entrypoint nor a command")
        return
    program = str(words[0])
    folders = [""] if program.startswith("/") else inspection.image.env.get("PATH", SYSTEM_PATH).split(":")
    files = (inspection.tree.find(f"{folder}/{program}") for folder in folders)
    file = next(filter(None, files), None)
    if file is None:
        yield Finding(program, "what a container starts does not exist")
    elif not file.mode & 0o111:
        yield Finding(program, "what a container starts is not executable")
    if inspection.tree.find("bin/sh") is None:
        yield Finding("/bin/sh", "does not exist; enroot and Apptainer start containers by it")


def size(inspection: Inspection) -> Iterator[Finding]:
    """The compressed layers keep within the size limit of the matrix."""
    target = inspection.target
    limits = inspection.renderer.project.matrix.model.images[target.image].size_limit_mb
    limit = limits.get(target.axes["variant"]) if isinstance(limits, dict) else limits
    if limit is None:
        raise NotApplicable("the matrix gives the image no size-limit-mb")
    if not all(layer.compression for layer in inspection.layers):
        raise NotApplicable("the engine saves layers unpacked; the limit is for compressed layers")
    megabytes, number = sum(layer.stored for layer in inspection.layers) / 1e6, len(inspection.layers)
    yield Finding("size", f"{megabytes:.0f} MB in {number} layers, at most {limit} MB", note=megabytes <= limit)


ImageRule = Callable[[Inspection], Iterator[Finding]]
"""Statement about images that reading them can refute. The function has its name; the first line of its docstring is
what passing proves. It yields what contradicts that, and raises NotApplicable if the image cannot be judged."""
RULES: tuple[ImageRule, ...] = (
    plan, licenses, environment, user, command, size, no_keys, no_tokens, no_site_ca, no_leftovers,
    not_world_writable, setuid, rootless, architecture, closure, symbol_versions, one_provider, no_stubs, gpu_code,
)  # fmt: skip
WHOEVER_BROUGHT_IT = (no_keys, no_tokens)
"""Rules that judge the base image's files like ours."""


def rule_name(rule: ImageRule) -> str:
    """Return the name of a rule as people see it: `no-keys`."""
    return rule.__name__.replace("_", "-")


IMAGE_CHECKS = {
    "readable": "Every layer can be read",
    **{rule_name(rule): str(rule.__doc__).partition(".")[0] for rule in RULES},
}
"""Name → what passing proves, of all checks of an image's files."""
SHOWN = 100
"""Findings of a rule that are listed."""


def declared_waivers(project: Project, image: str, components: Iterable[str]) -> list[tuple[str, CheckWaiver]]:
    """Return the waivers of an image and of its components, each with who declares it."""
    known = project.components
    waivers = [(name, waiver) for name in components if name in known for waiver in known[name].model.waivers]
    if entry := project.matrix.model.images.get(image):
        waivers += [(f"images.{image}", waiver) for waiver in entry.waivers]
    return waivers


@cache
def hash_of_rules() -> str:
    """Return the hash of the code that reads and judges files."""
    names = ("rules.py", "elf.py", "files.py", "layers.py", "patterns.yaml")
    return hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in names)).hexdigest()


def hash_of_image_checks(project: Project, image: str, components: Iterable[str]) -> str:
    """Return the hash of all that decides whether the checks of an image's files pass."""
    waivers = sorted(f"{owner} {waiver!r}" for owner, waiver in declared_waivers(project, image, components))
    return hashlib.sha256("\n".join([hash_of_rules(), *waivers]).encode()).hexdigest()


def judge_images(inspections: Sequence[Inspection]) -> Iterator[CheckResult]:
    """Yield the result of every check for all platforms of an image, first that the image can be read.

    If there are several platforms, the names of checks end with theirs.
    """
    for read in inspections:
        project, labels, image = read.renderer.project, read.image.labels, read.image
        name, components = labels.get("org.opencontainers.image.title", ""), components_of(labels)
        conditions = {**axis_facts(axes_of(labels)), "arch": image.architecture, "image": name}
        declared = declared_waivers(project, name, components) if components else ()
        waivers = [(owner, waiver) for owner, waiver in declared if matches(waiver.when, conditions)]
        judged = [CheckResult(component=IMAGE, check="readable", outcome="passed", seconds=round(read.seconds, 3))]
        judged += [_judge_rule(rule, read, [w for w in waivers if w[1].rule == rule_name(rule)]) for rule in RULES]
        sha256, suffix = hash_of_image_checks(project, name, components), f" {image.platform}" * (len(inspections) > 1)
        for result in judged:
            yield result.model_copy(update={"sha256": sha256, "check": f"{result.check}{suffix}"})


def _judge_rule(rule: ImageRule, inspection: Inspection, waivers: Sequence[tuple[str, CheckWaiver]]) -> CheckResult:
    """Return the result of a rule; `waivers` are those of this rule with the components or images that declare them."""
    began = time.monotonic()
    result = CheckResult(component=IMAGE, check=rule_name(rule), outcome="skipped")
    try:
        findings = list(dict.fromkeys(rule(inspection)))
    except NotApplicable as reason:
        return result.model_copy(update={"reason": str(reason)})
    faults, accepted = [], []
    unused = {waiver.subject: f"{owner} waives what is not there; remove the waiver" for owner, waiver in waivers}
    for finding in findings:
        fitting = next((w for w in waivers if fnmatchcase(finding.subject, w[1].subject)), None)
        if finding.note:
            accepted.append(f"{finding} (no fault)")
        elif rule not in WHOEVER_BROUGHT_IT and inspection.is_of_base(finding):
            accepted.append(f"{finding} (base image)")
        elif fitting:
            owner, waiver = fitting
            unused.pop(waiver.subject, None)
            accepted.append(f"{finding} (waived: {owner}: {waiver.reason})")
        else:
            faults.append(str(finding))
    lines = [*faults, *(f"{subject}: {text}" for subject, text in unused.items()), *accepted]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"… and {len(lines) - SHOWN} more"]
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return result.model_copy(
        update={
            "outcome": "failed" if faults else "passed", "reason": f"{faults[0]}{more}" if faults else "",
            "output": "\n".join(lines),
            "seconds": round(time.monotonic() - began, 3),
        }
    )  # fmt: skip


def read_images(found: FoundImage, renderer: Renderer, plan: Plan) -> list[Inspection]:
    """Read the files of an image for every platform that it has.

    Raises CommandError if an engine or a registry fails, ResultError if the image cannot be read.
    """
    inspections = []
    with room_explained(found.name):
        for image in map(found.image, found.platforms):
            began = time.monotonic()
            read = scan_all([image.fetch(layer) for layer in image.layers])
            inspections.append(Inspection(image, read, renderer, plan, time.monotonic() - began))
    return inspections
