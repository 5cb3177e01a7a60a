"""A parser for HTML pages that collects elements, text and scripts, and checks the content security policy."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "input", "br", "line", "circle"}


@dataclass
class Outline(HTMLParser):
    """The content of a page. Parsing fails if an element is not closed."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: list[tuple[str | None, str]] = field(default_factory=list)
    """The type and the content of each script."""
    text: str = ""
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append((self.elements[-1][1].get("type"), data))
        elif not self.open or self.open[-1] != "style":
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def runs_only_its_own_scripts(self) -> None:
        """Assert that the page loads nothing, and that its content security policy permits only its own scripts."""
        assert not [a for _, a in self.elements if {"src", "srcset", "data", "poster", "background"} & set(a)]
        policy = next(str(a["content"]) for a in self.named("meta") if "http-equiv" in a)
        assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src '")
        assert "http" not in policy
        for kind, script in self.scripts:
            digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            assert (f"'sha256-{digest}'" in policy) == (kind is None)


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    found.close()
    assert not found.open
    return found
