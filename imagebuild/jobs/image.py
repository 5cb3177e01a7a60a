"""Second of the four steps that decide a job: the image, chosen from a plan or a catalogue. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from imagebuild.bench.profiles import Profile
from imagebuild.core import fields
from imagebuild.core.errors import ConfigError, nearest
from imagebuild.core.fields import ARCHS, CPUS, Arch, YamlFile, full_reference, major, matches, natural_order, satisfies
from imagebuild.jobs.facts import DATA, Fabric, Feature, JobFacts, Stack
from imagebuild.jobs.offer import Offer, OfferedImage
from imagebuild.jobs.request import JobRequest
from imagebuild.jobs.size import Size, conditions_of_size, resolve_size

BENCHMARKS = "nccl-tests"
"""Component with the programs that jobs run."""
PLANNED = (
    "comes from a plan, so nobody is known to have built, pushed and verified the image; "
    "to choose among verified images, use --catalog with a file from `imagebuild catalog`"
)
"""Note about an image of a plan."""


@dataclass(frozen=True)
class JobImage:
    """The image that a job runs, as far as it is known."""

    reference: str
    """Name by which nodes pull the image. Empty for a job without a container."""
    stack: str
    """Name of the file in `jobs/stacks/` that describes the programs and plug-ins of the image."""
    nccl: str | None
    """Version of NCCL. None if the version is not known."""
    arches: tuple[Arch, ...] | None
    """CPU architectures of the image. None if the architectures are not known."""
    driver: str | None = None
    """Oldest NVIDIA driver with which the image runs. None if this driver is not known."""
    is_planned: bool = False
    """True if the image comes from `imagebuild plan`, so the image may not have been built."""
    components: Mapping[str, str] = field(default_factory=dict)
    """Maps the components that the image is known to contain to their versions."""

    @property
    def is_file(self) -> bool:
        """Whether the image is a file that all nodes see, and not an image in a registry."""
        return self.reference.startswith("/")


def resolve_images(
    request: JobRequest, profile: Profile, facts: JobFacts, size: Size, offer: Offer
) -> tuple[JobImage, ...]:
    """Return the image of each side of a comparison of images, or the one image of another job.
    Raises ConfigError if one job cannot run the images in turn."""
    if request.images == (request.image,):
        return (resolve_image(request, profile, facts, size, offer),)
    if size.scheduler.kubernetes or size.container == "none":
        problem = f"{DATA['places'][size.container]} cannot change the image during a job"
        remedy = "use slurm with pyxis or Apptainer, or compare libraries with --compare nccl=VERSION,…"
        raise ConfigError(f"--compare image: {problem}; {remedy}")
    if request.image:
        raise ConfigError("--image: --compare already names the images; leave out --image")
    images = tuple(resolve_image(replace(request, image=name), profile, facts, size, offer) for name in request.images)
    if len({image.stack for image in images}) > 1:
        kinds = ", ".join(f"{image.reference} ({image.stack})" for image in images)
        problem = f"images of different kinds need different settings: {kinds}"
        raise ConfigError(f"--compare image: {problem}; choose images of one kind")
    if len({image.reference for image in images}) < len(images):
        raise ConfigError(f"--compare image: two sides are {images[0].reference}; name different images")
    return images


def resolve_image(request: JobRequest, profile: Profile, facts: JobFacts, size: Size, offer: Offer) -> JobImage:
    """Return the image that the request names, or the newest image that fits.
    Raises ConfigError if the options exclude each other, or if no image fits."""
    # Bad combinations of options are refused first, because "no image fits" would hide the reason.
    conditions = conditions_of_size(request, profile, facts, size)
    _refuse_bad_combinations(request, size, conditions)
    if request.nccl is not None and not re.fullmatch(r"[0-9]+\.[0-9]+(\.[0-9]+)?", request.nccl):
        raise ConfigError(f"--nccl {request.nccl!r}: must be a version of NCCL such as 2.28.3")
    if size.container == "none":
        if request.image:
            problem = "with --container none, the job runs the programs of the nodes; remove one of the two options"
            raise ConfigError(f"--image: {problem}")
        image = JobImage("", "other", request.nccl, None)
    else:
        _refuse_wrong_file(request.image or "", size)
        image = _image_to_pull(request, profile, facts, size, offer)
    _refuse_bad_combinations(request, size, conditions_of_image(conditions, image, facts))
    return image


def choose_image(
    request: JobRequest, profile: Profile, facts: JobFacts, offer: Offer
) -> tuple[JobImage | None, Sequence[RankedImage], str]:
    """Return the best image that runs on the hardware of the request, the better ones that do not run, and, if no image
    runs, the beginning of an error message. Raises ConfigError if the hardware does not support the fabric."""
    size = resolve_size(request, profile, facts)
    _refuse_bad_combinations(request, size, conditions_of_size(request, profile, facts, size))
    ranking = rank_images(offer, facts.stacks, profile, size, program=None)
    for place, ranked in enumerate(ranking):
        if not ranked.lacks:
            return ranked.image, ranking[:place], ""
    return None, ranking, nothing_fits(ranking, offer, facts.stacks, size)


def _refuse_wrong_file(reference: str, size: Size) -> None:
    """Raise ConfigError if `reference` is the path of an image file that the job cannot start."""
    place, suffix = DATA["places"][size.container], DATA["image_files"].get(size.container)
    if suffix and re.fullmatch(rf"/[\w./+@:-]+\{suffix}", reference):
        return
    if reference.startswith(("/", ".", "~")) or reference.endswith((".sqsh", ".sif")):
        remedy = f"write the absolute path of a file *{suffix} that all nodes see" if suffix else "write REPOSITORY:TAG"
        others = [c for c in size.scheduler.containers if reference.endswith(DATA["image_files"].get(c, "/"))]
        if others and size.container not in others:
            remedy = f"use --container {others[0]}, or {remedy}"
        raise ConfigError(f"--image {reference}: {place} cannot start this file; {remedy}")


def conditions_of_image(before: Mapping[str, str], image: JobImage, facts: JobFacts) -> Mapping[str, str]:
    """Return the names and values that conditions (`when`) can use: those in `before`, and those of the image."""
    return {**before, "stack": image.stack, "nccl": image.nccl or facts.nccl_variables.release}


def _refuse_bad_combinations(request: JobRequest, size: Size, conditions: Mapping[str, str]) -> None:
    """Raise ConfigError if a rule (`supports`, `excludes`) of the fabric or of a feature forbids this job.
    A rule about a condition without a value in `conditions` is skipped."""
    combined: dict[str, Fabric | Feature] = {f"--fabric {request.fabric}": size.fabric}
    combined |= {f"--feature {name}": feature for name, feature in size.features.items()}
    for option, facts in combined.items():
        remedy = "leave the feature out" if isinstance(facts, Feature) else "choose another fabric"
        for rule in (*facts.supports, *facts.excludes):
            is_wrong = matches(rule.when, conditions) == (rule in facts.excludes)
            if is_wrong and rule.when.keys() <= conditions.keys():
                raise ConfigError(f"{option}: {rule.reason}; {remedy}")


def _image_to_pull(request: JobRequest, profile: Profile, facts: JobFacts, size: Size, offer: Offer) -> JobImage:
    if request.image is not None:
        image = named_image(request.image, offer, facts.stacks)
    else:
        image = newest_image(offer, facts.stacks, profile, size)
    if image.arches is not None and profile.node.cpu not in image.arches:
        arches = f"is for {', '.join(image.arches)}, but {profile.name} is {profile.node.cpu}"
        raise ConfigError(f"--image {image.reference}: {arches}; choose another image")
    if full_reference(image.reference) != image.reference and not image.is_file:
        remedy = "set the registry with --registry or with `registry` in the cluster's file, choose a published image"
        remedy += " with --catalog FILE, or name an image with --image"
        problem = "the name contains no registry, so nodes cannot pull the image"
        raise ConfigError(f"{image.reference}: {problem}; {remedy}")
    needed = size.test.component
    if image.components and needed not in image.components and "programs" not in size.parameters:
        remedy = f"add {needed} to the image, or set the folder of the programs with --param programs=FOLDER"
        raise ConfigError(f"--image {image.reference}: does not contain {needed}, according to the plan; {remedy}")
    return replace(
        image, nccl=request.nccl or image.nccl, components={**dict.fromkeys(request.components, ""), **image.components}
    )


def named_image(reference: str, offer: Offer, stacks: Mapping[str, YamlFile[Stack]]) -> JobImage:
    """Return what is known about an image: from the offer, or else only from the name.

    Raises ConfigError if `reference` is not the name of an image, or if nodes would look for the image in Docker Hub.
    """
    is_file = reference.startswith("/")
    if not is_file and not re.fullmatch(rf"(?!.*(//|:/))[A-Za-z0-9][A-Za-z0-9._:/-]*(@{fields.DIGEST})?", reference):
        remedy = "write REPOSITORY:TAG or REPOSITORY@DIGEST, without docker://"
        raise ConfigError(f"--image {reference!r}: not the name of an image; {remedy}")
    for offered in offer.images:
        if reference in (offered.id, offered.reference, *offered.aliases):
            image = _job_image(offered, _stack_of(offered, stacks), offer)
            return image if reference == offered.id else replace(image, reference=reference)
    if full_reference(reference) != reference and not is_file:
        near = nearest(reference, [offered.id for offered in offer.images])
        write = f"write the name with its registry, such as ghcr.io/acme/{reference}"
        what = f"did you mean {near!r}?" if near else f"{write}, or {full_reference(reference)} for Docker Hub"
        raise ConfigError(f"--image {reference}: has no registry, so nodes would ask Docker Hub for it; {what}")
    fits = (name for name, file in stacks.items() if any(fnmatchcase(reference, glob) for glob in file.model.images))
    tag = reference.rpartition("/")[2]
    version = re.search(r"nccl[-_]?v?(\d+\.\d+\.\d+)", tag)
    arches = tuple(arch for arch in ARCHS if arch in tag or CPUS[arch] in tag)
    return JobImage(reference, next(fits, "other"), version[1] if version else None, arches or None)


@dataclass(frozen=True)
class RankedImage:
    """An image of an offer, and whether a job can run the image."""

    id: str
    image: JobImage
    lacks: str = ""
    """First requirement that the image does not meet. Empty if the image meets all requirements."""
    reason: str = ""
    """Why the image does not meet this requirement."""


def rank_images(
    offer: Offer, stacks: Mapping[str, YamlFile[Stack]], profile: Profile, size: Size, program: str | None = BENCHMARKS
) -> list[RankedImage]:
    """Return the images that can run programs, the best first: by the kind of image, the version of CUDA, and the
    release of the distribution. `program` is a component that the image must contain."""
    plugin, driver = _network_plugin(size), size.parameters.get("driver") or size.cluster.driver
    arch, gpu = profile.node.cpu, profile.gpu.compute_capability or ""
    capability = gpu.replace(".", "")
    compiling = offer.gpu_architectures.get(capability)

    def ranked(image: OfferedImage) -> RankedImage:
        stack, cuda = _stack_of(image, stacks), image.cuda
        built_for, oldest = image.axes.get("gpu", capability), DATA["drivers"].get(major(cuda), "0")
        rows: tuple[tuple[bool, str | None, str], ...] = (
            (program not in (None, *image.components), program, f"without {program}"),
            (arch not in image.arches, arch, f"for {', '.join(image.arches)}, not for {arch}"),
            (
                stacks[stack].model.lacks_plugin(plugin, image.components),
                f"the plug-in {plugin!r}",
                f"without NCCL's plug-in {plugin!r}",
            ),
            (
                built_for != capability or bool(cuda and compiling and not satisfies(cuda, compiling)),
                f"compute capability {gpu}",
                f"compiled with CUDA {cuda} for other compute capabilities than {gpu}",
            ),
            (
                driver is not None and int(major(driver)) < int(oldest),
                f"driver {driver}",
                f"CUDA {cuda} needs driver {oldest} or later",
            ),
            (
                arch in image.unverified,
                f"that all checks passed on {arch}",
                f"checks not known to have passed on {arch}",
            ),
        )
        lacks, reason = next(((what or "", why) for is_lacking, what, why in rows if is_lacking), ("", ""))
        return RankedImage(image.id, _job_image(image, stack, offer), lacks, reason)

    def order(image: OfferedImage) -> tuple[object, ...]:
        version = [int(number) for number in re.findall(r"\d+", image.cuda)]
        release = image.axes.get("os", "")
        place = offer.places.get((image.image, release), -1)
        return stacks[_stack_of(image, stacks)].model.prefer, version, place, natural_order(release)

    runnable = [image for image in offer.images if image.axes.get("variant") != "devel"]
    return [ranked(image) for image in sorted(runnable, key=order, reverse=True)]


def newest_image(offer: Offer, stacks: Mapping[str, YamlFile[Stack]], profile: Profile, size: Size) -> JobImage:
    """Return the first image of the ranking that meets all requirements. Raises ConfigError if no image does."""
    program = size.test.component
    ranking = rank_images(offer, stacks, profile, size, program)
    fitting = next((ranked.image for ranked in ranking if not ranked.lacks), None)
    if fitting:
        return fitting
    if {ranked.lacks for ranked in ranking} <= {program}:
        remedy = "add it to the components of an image, or name one with --image"
        raise ConfigError(f"--image: no {offer.noun} contains {program}; {remedy}")
    raise ConfigError(f"{nothing_fits(ranking, offer, stacks, size)}name an image with --image")


def nothing_fits(
    ranking: Sequence[RankedImage], offer: Offer, stacks: Mapping[str, YamlFile[Stack]], size: Size
) -> str:
    """Return the beginning of an error message: the missing requirements, and how many images lack each of them."""
    lacks, plugin = Counter(ranked.lacks for ranked in ranking), _network_plugin(size)
    counted = ", ".join(f"{requirement} rules out {number}" for requirement, number in lacks.items())
    remedy = plugin_remedy(plugin, stacks) if any(repr(plugin) in requirement for requirement in lacks) else ""
    return f"no {offer.noun} fits: {counted or 'there is no image of another variant than devel'}; {remedy}"


def _network_plugin(size: Size) -> str:
    """Return NCCL's plug-in that the image must contain; the nodes contain the plug-in `host`."""
    return "none" if size.plugin == "host" else size.plugin


def plugin_remedy(plugin: str, stacks: Mapping[str, YamlFile[Stack]]) -> str:
    """Return the beginning of a remedy, which says how to build an image with this plug-in.
    Return "" if the plug-in is not optional in any kind of image."""
    for name, file in stacks.items():
        if component := file.model.optional_plugins.get(plugin):
            return f"build {name} with --with {component} and add --with {component} here, or "
    return ""


def _stack_of(image: OfferedImage, stacks: Mapping[str, YamlFile[Stack]]) -> str:
    """Return the name of an image's stack. An image without the benchmarks has the stack of the like with them."""
    known = {name: file.model for name, file in stacks.items() if file.model.components}
    fits = [name for name, stack in known.items() if set(stack.components) <= {*image.components, BENCHMARKS}]
    return max(fits, key=lambda name: known[name].prefer, default="other")


def _job_image(image: OfferedImage, stack: str, offer: Offer) -> JobImage:
    plain_version = re.match(r"\d+(\.\d+)+", image.nccl)
    return JobImage(
        image.reference, stack, plain_version[0] if plain_version else None, image.arches,
        DATA["drivers"].get(major(image.cuda)), not offer.is_published, image.components,
    )  # fmt: skip
