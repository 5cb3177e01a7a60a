"""Second of the four steps that decide a job: the image, chosen from a plan or a catalogue. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from imagebuild.bench.profiles import Profile
from imagebuild.core import fields
from imagebuild.core.errors import ConfigError, nearest
from imagebuild.core.fields import ARCHS, CPUS, Arch, YamlFile, full_reference, major, matches, natural_order, satisfies
from imagebuild.jobs.facts import DATA, Fabric, Feature, JobFacts, Stack
from imagebuild.jobs.offer import Offer, OfferedImage
from imagebuild.jobs.request import JobRequest
from imagebuild.jobs.size import Size, conditions_of_size


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
    components: tuple[str, ...] = ()
    """Components that the image is known to contain."""


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
        image = _image_to_pull(request, profile, facts, size, offer)
    _refuse_bad_combinations(request, size, conditions_of_image(conditions, image, facts))
    return image


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
        plugin = "none" if size.plugin == "host" else size.plugin
        driver = size.parameters.get("driver") or size.cluster.driver
        image = newest_image(offer, facts.stacks, profile, plugin, driver)
    if image.arches is not None and profile.node.cpu not in image.arches:
        arches = f"is for {', '.join(image.arches)}, but {profile.name} is {profile.node.cpu}"
        raise ConfigError(f"--image {image.reference}: {arches}; choose another image")
    if full_reference(image.reference) != image.reference:
        remedy = "set the registry with --registry or with `registry` in the cluster's file, choose a published image"
        remedy += " with --catalog FILE, or name an image with --image"
        problem = "the name contains no registry, so nodes cannot pull the image"
        raise ConfigError(f"{image.reference}: {problem}; {remedy}")
    if image.components and "nccl-tests" not in image.components and "programs" not in size.parameters:
        remedy = "add nccl-tests to the image, or set the folder of the programs with --param programs=FOLDER"
        raise ConfigError(f"--image {image.reference}: does not contain nccl-tests, according to the plan; {remedy}")
    return replace(image, nccl=request.nccl or image.nccl, components=(*image.components, *request.components))


def named_image(reference: str, offer: Offer, stacks: Mapping[str, YamlFile[Stack]]) -> JobImage:
    """Return what is known about an image: from the offer, or else only from the name.

    Raises ConfigError if `reference` is not the name of an image, or if nodes would look for the image in Docker Hub.
    """
    if not re.fullmatch(rf"(?!.*(//|:/))[A-Za-z0-9][A-Za-z0-9._:/-]*(@{fields.DIGEST})?", reference):
        remedy = "write REPOSITORY:TAG or REPOSITORY@DIGEST, without docker://"
        raise ConfigError(f"--image {reference!r}: not the name of an image; {remedy}")
    for offered in offer.images:
        if reference in (offered.id, offered.reference, *offered.aliases):
            image = _job_image(offered, _stack_of(offered, stacks) or "other", offer)
            return image if reference == offered.id else replace(image, reference=reference)
    if full_reference(reference) != reference:
        near = nearest(reference, [offered.id for offered in offer.images])
        write = f"write the name with its registry, such as ghcr.io/acme/{reference}"
        what = f"did you mean {near!r}?" if near else f"{write}, or {full_reference(reference)} for Docker Hub"
        raise ConfigError(f"--image {reference}: has no registry, so nodes would ask Docker Hub for it; {what}")
    fits = (name for name, file in stacks.items() if any(fnmatchcase(reference, glob) for glob in file.model.images))
    tag = reference.rpartition("/")[2]
    version = re.search(r"nccl[-_]?v?(\d+\.\d+\.\d+)", tag)
    arches = tuple(arch for arch in ARCHS if arch in tag or CPUS[arch] in tag)
    return JobImage(reference, next(fits, "other"), version[1] if version else None, arches or None)


def newest_image(
    offer: Offer, stacks: Mapping[str, YamlFile[Stack]], profile: Profile, plugin: str, driver: str | None
) -> JobImage:
    """Return the newest image that fits.
    If no image fits, raises ConfigError that lists the requirements and how many images lack each of them."""
    arch, capability = profile.node.cpu, (profile.gpu.compute_capability or "").replace(".", "")
    compiling = offer.gpu_architectures.get(capability)

    def lack(image: OfferedImage, stack: str) -> str:
        """Return the first requirement that an image does not meet. Return "" if the image meets all requirements."""
        cuda = image.axes["cuda"]
        lacks = {
            arch: arch not in image.arches,
            f"the plug-in {plugin!r}": stacks[stack].model.lacks_plugin(plugin, image.components),
            f"compute capability {profile.gpu.compute_capability}": image.axes.get("gpu", capability) != capability
            or (compiling is not None and not satisfies(cuda, compiling)),
            f"driver {driver}": driver is not None and int(major(driver)) < int(DATA["drivers"].get(major(cuda), "0")),
            f"that all checks passed on {arch}": arch in image.unverified,
        }
        return next((requirement for requirement, is_lacking in lacks.items() if is_lacking), "")

    runnable = [(image, _stack_of(image, stacks)) for image in offer.images if image.axes.get("variant") != "devel"]
    candidates = [(image, stack) for image, stack in runnable if stack]
    fitting = [candidate for candidate in candidates if not lack(*candidate)]
    if not fitting:
        noun = "published image" if offer.is_published else "image of the plan"
        if not candidates:
            remedy = "add it to the components of an image, or name one with --image"
            raise ConfigError(f"no {noun} contains nccl-tests; {remedy}")
        lacks = Counter(lack(*candidate) for candidate in candidates)
        counted = ", ".join(f"{requirement} rules out {number}" for requirement, number in lacks.items())
        remedy = plugin_remedy(plugin, stacks) if any(repr(plugin) in requirement for requirement in lacks) else ""
        raise ConfigError(f"no {noun} fits: {counted}; {remedy}name an image with --image")

    def order(candidate: tuple[OfferedImage, str]) -> tuple[object, ...]:
        image, stack = candidate
        version = [int(number) for number in re.findall(r"\d+", image.axes["cuda"])]
        release = image.axes.get("os", "")
        place = offer.places.get((image.image, release), -1)
        return stacks[stack].model.prefer, version, place, natural_order(release)

    return _job_image(*max(fitting, key=order), offer)


def plugin_remedy(plugin: str, stacks: Mapping[str, YamlFile[Stack]]) -> str:
    """Return the beginning of a remedy, which says how to build an image with this plug-in.
    Return "" if the plug-in is not optional in any kind of image."""
    for name, file in stacks.items():
        if component := file.model.optional_plugins.get(plugin):
            return f"build {name} with --with {component} and add --with {component} here, or "
    return ""


def _stack_of(image: OfferedImage, stacks: Mapping[str, YamlFile[Stack]]) -> str | None:
    """Return the name of an image's stack. None if the image does not contain nccl-tests."""
    known = {name: file.model for name, file in stacks.items() if file.model.components}
    fits = [name for name, stack in known.items() if set(stack.components) <= set(image.components)]
    other = "other" if "nccl-tests" in image.components else None
    return max(fits, key=lambda name: known[name].prefer, default=other)


def _job_image(image: OfferedImage, stack: str, offer: Offer) -> JobImage:
    plain_version = re.match(r"\d+(\.\d+)+", image.nccl)
    return JobImage(
        image.reference, stack, plain_version[0] if plain_version else None, image.arches,
        DATA["drivers"].get(major(image.axes["cuda"])), not offer.is_published, image.components,
    )  # fmt: skip
