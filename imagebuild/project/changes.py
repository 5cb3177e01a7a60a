"""The changes that options such as `--set` and `--with` make to a project. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import REPOSITORY


@dataclass(frozen=True)
class Changes:
    """Changes that the command line makes to a project."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Values of `--set`. Maps an axis (such as `cuda`) to its values, separated by commas, or a pin (an entry of
    `versions` in `matrix.yaml`) to a version. `version@commit` names a commit that has no git tag."""
    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    repository: str | None = None
    """Repository that replaces the `repository` of the matrix."""
    base_image: str | None = None
    """Image that every target starts from, instead of the base in the matrix. Must contain a digest, except for
    `imagebuild render`."""
    append: str | None = None
    """Path of a file with Dockerfile instructions to append to every image."""
    appended: str = ""
    """Content of the file `append`. Empty without such a file."""

    @property
    def options_of_plan(self) -> tuple[str, ...]:
        """The options that change the plan (`--set`, `--with`, `--without`), as words of a command line.
        Only these options change which downloads the lock must contain."""
        pairs = [("--set", f"{name}={value}") for name, value in self.values.items()]
        pairs += [("--with", name) for name in self.with_] + [("--without", name) for name in self.without]
        return tuple(word for pair in pairs for word in pair)

    @property
    def options(self) -> tuple[str, ...]:
        """All options that make these changes, except `--registry`, as words of a command line."""
        base = ("--base-image", self.base_image) if self.base_image else ()
        return (*self.options_of_plan, *base, *(("--append", self.append) if self.append else ()))

    def lock_command(self, *words: str) -> str:
        """Return the `imagebuild lock` command that records the hashes of all downloads for these changes.
        `words` are additional arguments of the command."""
        return shlex.join(["imagebuild", "lock", *words, *self.options_of_plan])


def check_repository(option: str, name: str | None) -> None:
    """Raise ConfigError if `name`, the value of an option, is not a valid repository. None is accepted."""
    if name is not None and not REPOSITORY.fits(name):
        raise ConfigError(f"{option} {name}: must be {REPOSITORY.words}")


def parse_changes(
    settings: Iterable[str], with_: Iterable[str] = (), without: Iterable[str] = (), *, repository: str | None = None,
) -> Changes:  # fmt: skip
    """Return the changes that options such as `--set cuda=13.1` make.
    Raises ConfigError if a setting is not `name=value`, if a name is set twice, or if `repository` is not valid."""
    check_repository("--registry", repository)
    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--set {setting}: must be NAME=VALUE, such as --set cuda=13.1")
        if name in values:
            raise ConfigError(f"--set {setting}: {name} is set twice; give an axis several values as {name}=A,B")
        values[name] = value
    return Changes(values, tuple(with_), tuple(without), repository)
