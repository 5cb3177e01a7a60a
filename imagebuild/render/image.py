"""Packages, environment and labels for the final stage of a Dockerfile, computed from a target's recipe. Pure."""

from collections.abc import Iterator
from typing import Any

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import FOLDER_LISTS, SYSTEM_PATH, YamlFile
from imagebuild.project.lockfile import UNRESOLVED, common_environment
from imagebuild.project.matrix import Matrix
from imagebuild.render.recipe import Part, PinnedPackages, Recipe

ACCOUNTS = {"root": 0, "daemon": 1, "www-data": 33, "mpiuser": 1000, "nobody": 65534}
"""Maps accounts that all images have to the ids of the user and of its group. Distributions never change these ids."""
GROUPS = {**ACCOUNTS, "nogroup": 65534, "users": 100}


def package_arguments(recipe: Recipe) -> list[str]:
    """Return the packages to install, as arguments of apt-get."""
    exact, others = set[str](), {*recipe.image.packages.apt}
    for part in recipe.components:
        if part.repository:
            exact.update(exact_packages(part.name, part.repository))
        else:
            others.update(part.packages)
    # The distribution's archive keeps one version of a package. An update may change the end of the version, so `*` is
    # appended to the version.
    own = {f"'{package}*'" if "=" in package else package for package in others}
    return sorted(exact | own, key=lambda package: package.strip("'"))


def exact_packages(component: str, pinned: PinnedPackages) -> list[str]:
    """Return a component's packages from a signed repository, each with a version.

    A version that the component does not state is from the lock. Architectures that the lock does not contain are
    ignored, because no image is built for them. Raises ConfigError if the lock has different versions for two
    architectures, because both architectures share one Dockerfile."""
    result = []
    for package in pinned.packages:
        known = pinned.versions[package]
        if len(known) > 1 and "=" not in package:
            raise ConfigError(
                f"imagebuild.lock: {package} has the versions {', '.join(sorted(known))} in "
                f"{', '.join(pinned.urls.values())}; set `platforms` of the image to one platform, or request "
                f"{package}=VERSION in the component {component}, with a version that is for both architectures"
            )
        result.append(package if "=" in package else f"{package}={next(iter(known), UNRESOLVED)}")
    return result


def package_repository(component: str, pinned: PinnedPackages) -> dict[str, Any]:
    """Return the values with which a template adds the signed package repository of a component."""
    first = next(iter(pinned.repositories.values()))
    result = {"name": first.name, "suite": first.suite, "keys": pinned.keys, "urls": pinned.urls, "stage": component}
    return result if first.configured else {**result, "packages": exact_packages(component, pinned)}


def numeric_user(recipe: Recipe, matrix: YamlFile[Matrix]) -> str | None:
    """Return the user and group that containers run as, as numbers, because kubelets compare only numbers with
    `runAsNonRoot`. None if the image does not set a user. Raises ConfigError if a name is unknown."""
    name, _, group = (recipe.image.user or "").partition(":")
    if not name:
        return None
    ids = [word if word.isdigit() else known.get(word) for word, known in ((name, ACCOUNTS), (group or name, GROUPS))]
    if None in ids:
        where = matrix.at("images", recipe.target.image, "user")
        problem = f"the ids of {recipe.image.user!r} are not known before the build; write numbers, such as 1000:1000"
        raise ConfigError(f"{where}: images.{recipe.target.image}.user: {problem}")
    return ":".join(map(str, ids))


def image_environment(recipe: Recipe, matrix: YamlFile[Matrix]) -> dict[str, str]:
    """Return the environment variables of the image. `matrix` is the file that declares the image.
    Raises ConfigError if two components, or a component and the image, set a variable to different values."""
    env, needed = {"PATH": SYSTEM_PATH}, dict[str, str]()
    archives = {part.name: _archive_environment(recipe, part) for part in recipe.components}
    declared = {variable for part in recipe.components for variable in part.env}.difference(FOLDER_LISTS)
    for part in recipe.components:
        of_archive = {variable: value for variable, value in archives[part.name].items() if variable not in declared}
        taken = {**_base_environment(recipe, part), **of_archive, **part.env}
        for variable, value in taken.items():
            if variable in FOLDER_LISTS:
                env[variable] = f"{value}:{env[variable]}" if variable in env else value
            elif env.setdefault(variable, value) != value:
                where = part.file.at("env", variable)
                problem = f"is {value!r}, but another component sets {env[variable]!r}; remove one of the two"
                raise ConfigError(f"{where}: env.{variable}: {problem}")
            elif part.component.unpacked or any(variable in archive for archive in archives.values()):
                needed[variable] = part.name
    for variable, value in recipe.image.env.items():
        if variable in needed and env[variable] != value:
            where = matrix.at("images", recipe.target.image, "env", variable)
            problem = f"is {value!r}, but {needed[variable]} needs {env[variable]!r}; remove the variable"
            raise ConfigError(f"{where}: env.{variable}: {problem}")
        listed = variable in FOLDER_LISTS and variable in env
        env[variable] = f"{value}:{env[variable]}" if listed else value
    return env


def library_folders(recipe: Recipe) -> list[tuple[str, str]]:
    """Return a pair of component and folder for each folder in which the loader looks for libraries, in order."""
    result = []
    for part in recipe.components:
        unpacked = part.component.unpacked
        of_archive = unpacked.libraries(_archive_environment(recipe, part)) if unpacked else ()
        result += [(part.name, folder) for folder in (*part.component.libraries, *of_archive)]
    return result


def adaptations(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each difference between the image and the archives or the base image that it is made from."""
    for stage in recipe.stages:
        yield from (f"{stage.name}: {line}" for line in stage.archive_environment[1])
    base = recipe.base.partition("@")[0]
    for nccl, held in dict.fromkeys((facts.nccl, facts.held) for facts in recipe.base_facts.values()):
        if nccl and "nccl" in recipe.target.components:
            yield f"{base}: contains NCCL {nccl}, images get {recipe.target.components['nccl']}"
        if held:
            yield f"{base}: holds back upgrades of {', '.join(held)}"
    for user, words in dict.fromkeys((facts.user, facts.entrypoint) for facts in recipe.base_facts.values()):
        if user not in ("", "0", "root") and not recipe.image.user:
            yield f"{base}: runs as {user}, images run as root"
        if words:
            yield f"{base}: commands are started by {' '.join(words)}, also in images"


def _base_environment(recipe: Recipe, part: Part) -> dict[str, str]:
    """Return the environment variables that a component takes from the base image.
    Empty if the lock does not contain the environment of the base image."""
    by_platform: dict[str, dict[str, str]] = {}
    for platform in sorted(recipe.target.platforms) if recipe.base_facts else ():
        env = recipe.base_facts[platform].environment if platform in recipe.base_facts else {}
        own = [folder for folder in env.get("PATH", "").split(":") if folder not in SYSTEM_PATH.split(":")]
        known = {**env, "PATH": ":".join(own)}
        by_platform[platform] = {v: known[v] for v in part.component.env_of_base if known.get(v)}
    return common_environment(by_platform)[0]


def _archive_environment(recipe: Recipe, part: Part) -> dict[str, str]:
    """Return the environment variables that a component's archive sets in this variant of the image.
    A folder that another component replaces counts only if the image contains a component with libraries in it."""
    unpacked = part.component.unpacked
    if unpacked is None or part.stage is None:
        return {}
    devel = recipe.target.axes["variant"] == "devel"
    libraries = [f"{folder}/" for other in recipe.components for folder in other.component.libraries]
    replaced = [f"{unpacked.prefix}/{name}/" for name in unpacked.replaced]
    absent = tuple(place for place in replaced if not any(folder.startswith(place) for folder in libraries))
    found: dict[str, str] = {}
    for variable, value in part.stage.archive_environment[0].items():
        places = [place for place in value.split(":") if not f"{place}/".startswith(absent)]
        if places and (devel or variable not in unpacked.devel):
            found[variable] = ":".join(places)
    return found


def image_labels(recipe: Recipe) -> dict[str, str]:
    """Return the labels of the image.

    The digest of the base is left out if builds may create the base from packages of the distribution, because such
    builds do not use the official image."""
    target = recipe.target
    base_name, _, base_digest = recipe.base.partition("@")
    licenses = {f"({part.component.license})" for part in recipe.components}
    result = {
        "org.opencontainers.image.title": target.image,
        "org.opencontainers.image.description": recipe.image.description,
        "org.opencontainers.image.version": target.name.rpartition(":")[2],
        "org.opencontainers.image.base.name": base_name,
        "org.opencontainers.image.base.digest": "" if recipe.is_bootstrapped else base_digest,
        "org.opencontainers.image.licenses": " AND ".join(sorted(licenses)),
        "imagebuild.target": target.id, "imagebuild.lock": recipe.lock_hash,
    }  # fmt: skip
    result |= {f"imagebuild.axis.{axis}": value for axis, value in target.axes.items()}
    result |= {f"imagebuild.component.{name}": version for name, version in target.components.items()}
    for part in recipe.components:
        result |= {f"imagebuild.{label}": text for label, text in part.labels.items()}
    return {label: value for label, value in (result | recipe.image.labels).items() if value}
