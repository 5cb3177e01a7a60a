"""References of images: `registry/repository:tag@digest`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import DEFAULT_REGISTRY, DIGEST, HOST, PATH, TAG, full_reference, is_loopback

_REFERENCE = re.compile(
    rf"(?P<host>{HOST})/(?P<repository>{PATH}(?:/{PATH})*)"
    rf"(?::(?P<tag>{TAG}))?"
    rf"(?:@(?P<digest>{DIGEST}))?"
)

NO_REFERENCE = "not the name of an image; write registry/repository:tag or registry/repository@sha256:DIGEST"
"""The message about a text that is not a reference."""


@dataclass(frozen=True)
class ImageReference:
    """A reference of an image or a repository. `host` contains the port; `repository` does not contain the host."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def name(self) -> str:
        return f"{self.host}/{self.repository}"

    @property
    def wanted(self) -> str:
        """The digest or tag to request from the registry. Default: `latest`."""
        return self.digest or self.tag or "latest"

    def at(self, digest: str) -> ImageReference:
        """Return a reference with another digest in the same repository."""
        return replace(self, tag=None, digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}" + (f"@{self.digest}" if self.digest else "")


def parse_reference(text: str) -> ImageReference:
    """Parse a reference.
    `debian:13` stands for `docker.io/library/debian:13`. Raises ConfigError if the text is not a reference."""
    match = _REFERENCE.fullmatch(full_reference(text))
    if not match:
        raise ConfigError(f"{text}: {NO_REFERENCE}")
    return ImageReference(**match.groupdict())


def api_address(host: str, insecure: tuple[str, ...] = ()) -> str:
    """Return the URL of a registry's API: http for registries on this machine or in `insecure`, https for others."""
    scheme = "http" if is_loopback(host) or host in insecure else "https"
    return f"{scheme}://{'registry-1.docker.io' if host == DEFAULT_REGISTRY else host}/v2/"
