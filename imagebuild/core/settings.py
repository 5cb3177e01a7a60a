"""The user's configuration: mirrors, their credentials, registries, CA certificates.

A mirror changes the server from which a file is downloaded, but not the content of the file: digests of images, sha256
of archives, commits of git sources, signed indexes of packages and hashes of wheels are checked as without a mirror."""

import configparser
import netrc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Annotated
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import AfterValidator, Field

from imagebuild.core import yaml
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Form, Model, full_reference
from imagebuild.core.files import read_bytes, xdg_folder

Address = Annotated[
    str,
    Form(r"https?://[^/\s@]+/(\S*/)?", "https://host/ or https://host/folder/, with the slash, without a password"),
]
"""The URL of a folder, without a password: passwords belong in the netrc file."""
PIP_CONFIGURATIONS = ("~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf")
CA_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")


class Mirrors(Model):
    """Mirrors that builds use instead of public servers."""

    images: dict[str, str] = Field(default_factory=dict)
    """Maps a registry, or a registry with a path, to the registry and path to pull from instead. If several keys match,
    the longest key is used."""
    downloads: dict[Address, Address] = Field(default_factory=dict)
    """Maps the beginning of a URL to its replacement, for archives, keys, git sources and package repositories. If
    several beginnings match, the longest is used."""
    python_index: Address | None = None
    """URL of a Python package index (the folder of its simple pages). Default: the index that pip is configured for."""

    def image(self, reference: str) -> str:
        """Return the reference from which to pull an image. Without a mirror, the reference is unchanged."""
        full = full_reference(reference)
        prefixes = [p for p in self.images if full.startswith((f"{p.rstrip('/')}/", f"{p}:", f"{p}@"))]
        if not prefixes:
            return reference
        prefix = max(prefixes, key=len)
        return self.images[prefix].rstrip("/") + full.removeprefix(prefix.rstrip("/"))

    def download(self, url: str) -> str:
        """Return the URL from which to download a file. Without a mirror, the URL is unchanged."""
        prefix = max((p for p in self.downloads if url.startswith(p)), key=len, default="")
        return self.downloads[prefix] + url.removeprefix(prefix) if prefix else url


def _expanded(path: str) -> Path:
    # Without a home folder, `~` stays, and must not be a folder in the current folder.
    return Path("/" if path.startswith("~") else "", os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises


def _readable_netrc(path: str) -> str:
    file = _expanded(path)
    try:
        hosts = netrc.netrc(file).hosts
    except (OSError, netrc.NetrcParseError) as error:
        # The text of the error may quote the file, which contains passwords.
        reason = error.strerror if isinstance(error, OSError) else f"line {error.lineno} is not in the format of netrc"
        raise ValueError(f"{file} cannot be read: {reason}") from None
    if "default" in hosts:
        raise ValueError(f"{file}: `default` sends a password to every server; write `machine HOST` for each host")
    return str(file)


class Settings(Model):
    """The contents of the user's configuration file, `config.yaml`."""

    mirrors: Mirrors = Field(default_factory=Mirrors)
    netrc: Annotated[str, AfterValidator(_readable_netrc)] | None = None
    """File with the passwords of mirrors, in the format of netrc."""
    insecure_registries: tuple[str, ...] = ()
    """Registries (`host` or `host:port`) without TLS. TLS is never used for registries on this machine."""

    @property
    def netrc_file(self) -> Path | None:
        return Path(self.netrc) if self.netrc else None


def settings_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the configuration: $IMAGEBUILD_CONFIG, or a file in $XDG_CONFIG_HOME or ~/.config."""
    if path := environ.get("IMAGEBUILD_CONFIG"):
        return Path(path)
    return (xdg_folder("XDG_CONFIG_HOME", environ) or _expanded("~/.config")) / "imagebuild" / "config.yaml"


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Read the configuration.
    If there is no file, return the defaults. Raises ConfigError with all mistakes in the file."""
    file = settings_path(environ)
    if not file.exists() and not environ.get("IMAGEBUILD_CONFIG"):
        return Settings()
    return yaml.read_yaml(file, Settings).model


def offline_bundle(environ: Mapping[str, str]) -> Path:
    """Return the path of the symlink to the bundle (downloaded sources) for `imagebuild build --offline`."""
    return settings_path(environ).with_name("offline-bundle")


def configured_index() -> str | None:
    """Return the URL of the Python package index in the configuration of pip. None if pip uses its default."""
    index = os.environ.get("PIP_INDEX_URL", "")
    for path in PIP_CONFIGURATIONS:
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(configparser.Error):
            parser.read(_expanded(path))
            index = index or parser.get("global", "index-url", fallback="")
    return index if index.startswith("http") else None


def pip_conf_text(index: str, login: tuple[str, str] | None = None) -> str:
    """Return the text of a pip.conf that sets a Python package index.
    Plain http is allowed, because the lock contains the hashes of all wheels."""
    address = urlsplit(index)
    if login:
        host = f"{quote(login[0], safe='')}:{quote(login[1], safe='')}@{address.netloc}"
        index = urlunsplit(address._replace(netloc=host))
    trusted = f"trusted-host = {address.hostname}\n" if address.scheme == "http" else ""
    return f"[global]\nindex-url = {index}\n{trusted}"


def ca_bundle(given: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file of CA certificates for downloads.

    The first one that is set is used: `given`, then the environment variables in CA_VARIABLES. Default: the file of
    this machine, or None if it has no such file. Raises ConfigError if the file does not contain certificates."""
    named = (("--ca", given), *((f"{name}:", environ.get(name)) for name in CA_VARIABLES))
    for name, path in ((name, Path(path)) for name, path in named if path):
        try:
            content = read_bytes(path)
        except ConfigError as error:
            raise ConfigError(f"{name} {error}") from None
        if b"CERTIFICATE-----" not in content:
            raise ConfigError(f"{name} {path}: contains no certificate; use a file with certificates in PEM format")
        if path.is_file():
            return path.resolve()
        copy = Path(mkdtemp(prefix="imagebuild-"), "ca.pem")  # programs cannot read a stream again
        copy.write_bytes(content)
        return copy
    return SYSTEM_CA if SYSTEM_CA.is_file() else None


def pip_environment(ca: Path | None, netrc_file: Path | None) -> dict[str, str]:
    """Return environment variables that pass CA certificates and passwords to pip."""
    # The certificates of this machine are the default. As a variable, they would override `cert` in a pip.conf.
    files = {"PIP_CERT": None if ca == SYSTEM_CA else ca, "NETRC": netrc_file}
    return {name: str(path.absolute()) for name, path in files.items() if path}


@contextmanager
def git_environment(ca: Path | None, netrc_file: Path | None) -> Iterator[dict[str, str]]:
    """Yield environment variables that pass CA certificates and passwords to git.
    git reads .netrc only from the home folder, so the variables set a temporary home folder."""
    result = {"GIT_SSL_CAINFO": str(ca)} if ca and ca != SYSTEM_CA else {}
    with TemporaryDirectory(prefix="imagebuild-") as home:
        if netrc_file:
            (Path(home) / ".netrc").symlink_to(netrc_file.absolute())
            own = os.environ.get("GIT_CONFIG_GLOBAL") or str(Path(os.environ.get("HOME") or "/", ".gitconfig"))
            result |= {"HOME": home, "GIT_CONFIG_GLOBAL": own}
        yield result
