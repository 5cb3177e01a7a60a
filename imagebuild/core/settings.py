"""Read the user's configuration file: mirrors, credentials for them, registries.

A mirror changes where something comes from, never what it is: images keep their digests, archives their sha256,
sources in git their commits, packages their signed index, wheels their hashes.
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import AfterValidator, Field

from imagebuild.core import yaml
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Form, Model, full_reference

Address = Annotated[
    str,
    Form(r"https?://[^/\s@]+/(\S*/)?", "https://host/ or https://host/folder/, with the slash, without a password"),
]
"""A password is for netrc."""


class Mirrors(Model):
    """Replace public addresses in builds."""

    images: dict[str, str] = Field(default_factory=dict)
    """Registry, or registry and path → the registry and path to pull from instead; of several, the longest counts."""
    downloads: dict[Address, Address] = Field(default_factory=dict)
    """Beginning of an address → what it becomes, for archives, keys, sources in git and repositories of packages; of
    several, the longest counts."""
    python_index: Address | None = None
    """A Python package index (the folder of its simple pages), instead of the one pip is configured for."""

    def image(self, reference: str) -> str:
        """Return where to pull an image from; a reference without a mirror is returned as it is."""
        full = full_reference(reference)
        prefixes = [p for p in self.images if full.startswith((f"{p.rstrip('/')}/", f"{p}:", f"{p}@"))]
        if not prefixes:
            return reference
        prefix = max(prefixes, key=len)
        return self.images[prefix].rstrip("/") + full.removeprefix(prefix.rstrip("/"))

    def download(self, url: str) -> str:
        """Return where to fetch an address from; one without a mirror is returned as it is."""
        prefix = max((p for p in self.downloads if url.startswith(p)), key=len, default="")
        return self.downloads[prefix] + url.removeprefix(prefix) if prefix else url


def _expanded(path: str) -> Path:
    """Return a path with the home folder for `~`, which stays as it is for a user without one."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises where there is no home


def _readable_netrc(path: str) -> str:
    file = _expanded(path)
    try:
        netrc.netrc(file)
    except (OSError, netrc.NetrcParseError) as error:
        # The error's text may quote the file, which holds passwords.
        reason = error.strerror if isinstance(error, OSError) else f"line {error.lineno} is not in netrc's format"
        raise ValueError(f"{file} cannot be read: {reason}") from None
    return str(file)


class Settings(Model):
    """Hold the file `config.yaml`."""

    mirrors: Mirrors = Field(default_factory=Mirrors)
    netrc: Annotated[str, AfterValidator(_readable_netrc)] | None = None
    """File with the passwords of mirrors, in netrc's format."""
    insecure_registries: tuple[str, ...] = ()
    """Registries (`host` or `host:port`) that are reached without TLS; those on this machine always are."""

    @property
    def netrc_file(self) -> Path | None:
        return Path(self.netrc) if self.netrc else None


def settings_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the configuration: $IMAGEBUILD_CONFIG, else in $XDG_CONFIG_HOME or ~/.config."""
    if path := environ.get("IMAGEBUILD_CONFIG"):
        return Path(path)
    return _expanded(environ.get("XDG_CONFIG_HOME") or "~/.config") / "imagebuild" / "config.yaml"


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Read the configuration; without a file, return the defaults. Raises ConfigError with every mistake in it."""
    file = settings_path(environ)
    if not file.exists() and not environ.get("IMAGEBUILD_CONFIG"):
        return Settings()
    return yaml.read_yaml(file, Settings).model


def offline_bundle(environ: Mapping[str, str]) -> Path:
    """Return the link, beside the configuration, to the bundle that `imagebuild build --offline` takes."""
    return settings_path(environ).with_name("offline-bundle")


PIP_CONFIGURATIONS = ("~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf")


def configured_index() -> str | None:
    """Return the address of the Python package index that pip is configured for; None for its default."""
    index = os.environ.get("PIP_INDEX_URL", "")
    for path in PIP_CONFIGURATIONS:
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(configparser.Error):
            parser.read(_expanded(path))
            index = index or parser.get("global", "index-url", fallback="")
    return index if index.startswith("http") else None


def pip_conf_text(index: str, login: tuple[str, str] | None = None) -> str:
    """Return a pip.conf for an index. What comes without https is verified by the hashes in the lock."""
    address = urlsplit(index)
    if login:
        host = f"{quote(login[0], safe='')}:{quote(login[1], safe='')}@{address.netloc}"
        index = urlunsplit(address._replace(netloc=host))
    trusted = f"trusted-host = {address.hostname}\n" if address.scheme == "http" else ""
    return f"[global]\nindex-url = {index}\n{trusted}"


CA_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")


def ca_bundle(given: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the CA bundle for downloads: the given one, that of the first variable that is set, or the machine's.

    Raises ConfigError if what is named is no file of certificates, as pip and curl do.
    """
    named = (("--ca", given), *((f"{name}:", environ.get(name)) for name in CA_VARIABLES))
    for name, path in ((name, Path(path)) for name, path in named if path):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} {path}: cannot be read: {error.strerror}") from None
        if b"CERTIFICATE-----" not in content:
            raise ConfigError(f"{name} {path}: has no certificate; name a file of them in PEM's format")
        return path.resolve()
    return SYSTEM_CA if SYSTEM_CA.is_file() else None


def pip_environment(ca: Path | None, netrc_file: Path | None) -> dict[str, str]:
    """Return variables that give pip a CA bundle and passwords."""
    # The machine's bundle is left out: it is the default, and would win over the `cert` of a pip.conf.
    files = {"PIP_CERT": None if ca == SYSTEM_CA else ca, "NETRC": netrc_file}
    return {name: str(path.absolute()) for name, path in files.items() if path}


@contextmanager
def git_environment(ca: Path | None, netrc_file: Path | None) -> Iterator[dict[str, str]]:
    """Provide variables that give git a CA bundle and passwords; git reads netrc only in the home folder."""
    result = {"GIT_SSL_CAINFO": str(ca)} if ca and ca != SYSTEM_CA else {}
    with TemporaryDirectory(prefix="imagebuild-") as home:
        if netrc_file:
            (Path(home) / ".netrc").symlink_to(netrc_file.absolute())
            own = os.environ.get("GIT_CONFIG_GLOBAL") or str(Path(os.environ.get("HOME") or "/", ".gitconfig"))
            result |= {"HOME": home, "GIT_CONFIG_GLOBAL": own}
        yield result
