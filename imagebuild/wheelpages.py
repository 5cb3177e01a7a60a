"""Pages of a Python package index: reading a site's, and writing those of a bundle. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def read(text: str, page: str) -> dict[str, tuple[str, str]]:
    """File name → address and sha256, from the page of a project at the address `page`; files without sha256 are
    left out: a lock has it for each.
    """
    if text.lstrip().startswith("{"):
        entries = [(f["url"], f.get("hashes", {}).get("sha256", "")) for f in json.loads(text).get("files", ())]
    else:
        links = _Links()
        links.feed(text)
        entries = []
        for href in links.found:
            url, fragment = urldefrag(href)
            entries.append((url, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""))
    full = [(urljoin(page, url), digest) for url, digest in entries if digest]
    return {unquote(urlsplit(url).path.rpartition("/")[2]): (url, digest) for url, digest in full}


def project_of(file: str) -> str:
    """The normalised name of the project that a wheel is of."""
    return normalized(file.partition("-")[0])


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def write(files: Mapping[str, str], names: Iterable[str]) -> str:
    """A page with links to the wheels `names`; `files` is file name → sha256."""
    links = "".join(f'<a href="/wheels/{escape(n)}#sha256={files[n]}">{escape(n)}</a><br>\n' for n in sorted(names))
    return f"<!DOCTYPE html><html><body>\n{links}</body></html>\n"
