"""Where a site keeps copies of what builds fetch. Pure.

A mirror changes where something comes from, never what it is: images keep their digests, archives their sha256,
sources in git their commits, packages their signed index, wheels their hashes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from imagebuild.fields import Model

Address = Annotated[str, Field(pattern=r"^https?://[^/\s@]+/(\S*/)?$")]
"""`https://host/` or `https://host/folder/`: with the slash at the end, and without a password, which is for netrc."""

DEFAULT_REGISTRY = "docker.io"


class Mirrors(Model):
    """Addresses that builds use in place of public ones."""

    images: dict[str, str] = Field(default_factory=dict)
    """Registry, or registry and path → the registry and path to pull from instead; of several, the longest counts."""
    downloads: dict[Address, Address] = Field(default_factory=dict)
    """Beginning of an address → what it becomes, for archives, keys, sources in git and repositories of packages; of
    several, the longest counts. It is for http and https alike, unless there is one for each."""
    python_index: Address | None = None
    """A Python package index (the folder of its simple pages), instead of the one pip is configured for."""

    def image(self, reference: str) -> str:
        """Where to pull an image from; a reference without mirror comes back as it is."""
        full = normalized(reference)
        fitting = [p for p in self.images if full.startswith((f"{p.rstrip('/')}/", f"{p}:", f"{p}@"))]
        if not fitting:
            return reference
        prefix = max(fitting, key=len)
        return self.images[prefix].rstrip("/") + full.removeprefix(prefix.rstrip("/"))

    def download(self, url: str) -> str:
        """Where to fetch an address from; one without mirror comes back as it is."""
        scheme, _, rest = url.partition("://")
        fitting = [p for p in self.downloads if rest.startswith(p.partition("://")[2])]
        if not fitting:
            return url
        prefix = max(fitting, key=lambda p: (len(p.partition("://")[2]), p.startswith(f"{scheme}://")))
        return self.downloads[prefix] + rest.removeprefix(prefix.partition("://")[2])


def normalized(reference: str) -> str:
    """An image with its registry: `debian:13` is `docker.io/library/debian:13`."""
    first, slash, _ = reference.partition("/")
    if not slash:
        return f"{DEFAULT_REGISTRY}/library/{reference}"
    is_registry = "." in first or ":" in first or first == "localhost"
    return reference if is_registry else f"{DEFAULT_REGISTRY}/{reference}"
