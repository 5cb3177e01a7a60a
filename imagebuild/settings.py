"""The user's configuration file: mirrors, credentials for them, registries, and the bundle of offline builds."""

from __future__ import annotations

import netrc
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from imagebuild import config
from imagebuild.errors import ConfigError
from imagebuild.fields import Model
from imagebuild.files import read_text, write_text
from imagebuild.mirrors import Mirrors


class Settings(Model):
    """The file `config.yaml`."""

    mirrors: Mirrors = Field(default_factory=Mirrors)
    netrc: str | None = None
    """File with the passwords of mirrors, in netrc's format."""
    bundle: str | None = None
    """Folder that `imagebuild build --offline` takes everything from; `imagebuild bundle use` writes it."""

    insecure_registries: tuple[str, ...] = ()
    """Registries (`host` or `host:port`) that are reached without TLS; those on this machine always are."""

    @property
    def netrc_file(self) -> Path | None:
        return Path(self.netrc).expanduser() if self.netrc else None


def path(environ: Mapping[str, str]) -> Path:
    """Where the configuration is: `$IMAGEBUILD_CONFIG`, else in the folder of the XDG specification."""
    if given := environ.get("IMAGEBUILD_CONFIG"):
        return Path(given)
    home = environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(home) / "imagebuild" / "config.yaml"


def load(environ: Mapping[str, str]) -> Settings:
    """The configuration; without a file the defaults. Raises ConfigError with every mistake in it."""
    file = path(environ)
    if not file.exists() and not environ.get("IMAGEBUILD_CONFIG"):
        return Settings()
    mistakes = config.Mistakes()
    document = config.load(file, Settings, mistakes)
    mistakes.stop_if_any()
    assert document is not None
    found = document.model
    if found.netrc_file:
        try:
            netrc.netrc(found.netrc_file)
        except (OSError, netrc.NetrcParseError) as error:
            # The error's text may quote the file, which holds passwords.
            why = error.strerror if isinstance(error, OSError) else f"line {error.lineno} is not netrc's format"
            raise ConfigError(f"{document.at('netrc')}: netrc: {found.netrc_file} cannot be read: {why}") from None
    return found


def remember_bundle(environ: Mapping[str, str], folder: Path) -> Path:
    """Write the bundle's folder into the configuration, leaving its other lines alone; returns the file.

    Raises ConfigError if the file cannot be written, or its keys do not stand on lines of their own.
    """
    file = path(environ)
    text = read_text(file) if file.exists() else ""
    if text.lstrip().startswith("{"):
        raise ConfigError(f"{file}:1: is all in braces, so no line can be added; write `bundle: {folder}` by hand")
    line = f"bundle: {folder}\n"
    changed, count = re.subn(r"(?m)^bundle:.*\n?", lambda _: line, text, count=1)
    write_text(file, changed if count else f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{line}")
    return file
