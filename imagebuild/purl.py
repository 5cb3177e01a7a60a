"""Package URLs: one name for a thing, whichever tool wrote it down. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

from imagebuild.mirrors import normalized

GITHUB = "https://github.com/"


def purl(kind: str, name: str, version: str = "", qualifiers: Mapping[str, str] | None = None) -> str:
    """`pkg:kind/name@version?…`; slashes in the name separate a namespace."""
    at = f"@{quote(version, safe=':')}" if version else ""
    pairs = [f"{key}={quote(value, safe='/:')}" for key, value in sorted((qualifiers or {}).items()) if value]
    return f"pkg:{kind}/{quote(name, safe='/')}{at}" + (f"?{'&'.join(pairs)}" if pairs else "")


def image(reference: str, digest: str, arch: str = "") -> str:
    """An image or a manifest of a registry; `reference` has a tag or none, and no digest."""
    full = normalized(reference)
    repository, colon, tag = full.rpartition(":")
    if not colon or "/" in tag:
        repository, tag = full, ""
    last = repository.rpartition("/")[2].lower()
    return purl("oci", last, digest, {"repository_url": repository, "tag": tag, "arch": arch})


def git(name: str, url: str, commit: str) -> str:
    """A commit; `name` is what it is called where no forge that purl knows has it."""
    if url.startswith(GITHUB):
        return purl("github", url.removeprefix(GITHUB).removesuffix(".git").lower(), commit)
    return purl("generic", name, commit, {"vcs_url": f"git+{url}@{commit}"})


def archive(name: str, version: str, url: str, sha256: str) -> str:
    """A file that is downloaded."""
    return purl("generic", name, version, {"download_url": url, "checksum": f"sha256:{sha256}"})


def wheel(name: str, version: str) -> str:
    """A distribution of the Python package index."""
    return purl("pypi", re.sub(r"[-_.]+", "-", name).lower(), version)


def identity(text: str) -> str:
    """Kind, name and version without qualifiers, the same for two spellings of the same thing."""
    return unquote(text.partition("?")[0].partition("#")[0])
