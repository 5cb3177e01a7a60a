"""The changes that options such as `--set` and `--with` make to a project. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from imagebuild.core.errors import ConfigError
from imagebuild.project.matrix import REPOSITORY


@dataclass(frozen=True)
class Changes:
    """Changes that the command line makes to a project."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Values of `--set`: maps an axis to its values, separated by commas, or a pin (an entry of `versions`) to its
    version. Write `version@commit` for a commit without a tag."""
    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    repository: str | None = None
    """Repository that replaces the `repository` of the matrix."""
    base_image: str | None = None
    """Image that replaces the base of each target. It needs a digest, except for `render`."""
    append: str | None = None
    """File with Dockerfile instructions to append to every image."""
    appended: str = ""
    """The content of the `append` file."""

    @property
    def options_of_plan(self) -> tuple[str, ...]:
        """The options that change the plan, and therefore the sources to lock, as words of a command line."""
        pairs = [("--set", f"{name}={value}") for name, value in self.values.items()]
        pairs += [("--with", name) for name in self.with_] + [("--without", name) for name in self.without]
        return tuple(word for pair in pairs for word in pair)

    @property
    def options(self) -> tuple[str, ...]:
        """All options that make these changes, as words of a command line."""
        base = ("--base-image", self.base_image) if self.base_image else ()
        return (*self.options_of_plan, *base, *(("--append", self.append) if self.append else ()))

    def lock_command(self, *words: str) -> str:
        """Return the command that pins the sources of a plan with these changes. `words` are further arguments."""
        return shlex.join(["imagebuild", "lock", *words, *self.options_of_plan])


def check_repository(option: str, name: str | None) -> None:
    """Raise ConfigError if the value of an option cannot be a repository."""
    if name is not None and not REPOSITORY.fits(name):
        raise ConfigError(f"{option} {name}: must be {REPOSITORY.words}")


def parse_changes(
    settings: Iterable[str],
    with_: Iterable[str] = (),
    without: Iterable[str] = (),
    *,
    repository: str | None = None,
) -> Changes:
    """Return the changes that options such as `--set cuda=13.1` make.

    Raises ConfigError for an option that is not `name=value`.
    """
    check_repository("--registry", repository)
    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--set {setting}: is not name=value; write it like --set cuda=13.1")
        if name in values:
            raise ConfigError(f"--set {setting}: {name} is set twice; give an axis several values as {name}=A,B")
        values[name] = value
    return Changes(values, tuple(with_), tuple(without), repository)
