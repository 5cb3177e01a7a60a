"""Which tags of a repository name an image for ever, and which of them move. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

REFERRERS = re.compile(r"sha256-([0-9a-f]{64})(?:\.([a-z]+))?")
"""Tags that are no images: lists of what refers to a digest, and what cosign puts beside one."""
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
REVISION = r"(?P<revision>[0-9a-f]{7,40}(?:-dirty)?)"
ANY = r"[A-Za-z0-9._-]+"


def signed(tags: Iterable[str]) -> frozenset[str]:
    """Digests that have a signature by tag."""
    found = (REFERRERS.fullmatch(tag) for tag in tags)
    return frozenset(f"sha256:{match[1]}" for match in found if match and match[2] == "sig")


def of_images(tags: Iterable[str]) -> tuple[str, ...]:
    """Tags that people pull by; what the specification allows as none is left out, as it would name a page."""
    return tuple(tag for tag in tags if TAG.fullmatch(tag) and not REFERRERS.fullmatch(tag))


def split(
    tags: Iterable[str], templates: Iterable[str], axes: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Tags of one image that never move, in the order of the templates; those that do, the most exact first; and the
    revision that the former say.

    `templates` are the matrix's, of tags that never move; `axes` are the image's own. Versions that a template names
    may be any, since the matrix has moved on.
    """
    patterns = [_pattern(template, axes) for template in templates]
    kept: dict[str, int] = {}
    revision = ""
    for tag in tags:
        for number, pattern in enumerate(patterns):
            if match := pattern.fullmatch(tag):
                kept.setdefault(tag, number)
                revision = revision or match.groupdict().get("revision") or ""
    moving = sorted((tag for tag in tags if tag not in kept), key=lambda tag: (-len(tag), tag))
    return tuple(sorted(kept, key=lambda tag: (kept[tag], tag))), tuple(moving), revision


def _pattern(template: str, axes: Mapping[str, str]) -> re.Pattern[str]:
    tag = template.rpartition(":")[2]
    parts = re.split(r"{([^{}]*)}", tag)
    seen = False
    text = ""
    for number, part in enumerate(parts):
        if number % 2 == 0:
            text += re.escape(part)
        elif part == "revision":
            text += REVISION.replace("?P<revision>", "?:") if seen else REVISION
            seen = True
        else:
            text += re.escape(axes[part]) if part in axes else ANY
    return re.compile(text)


def natural(text: str) -> list[tuple[int, int, str]]:
    """To sort `12.9` before `12.10`."""
    return [(1, int(p), "") if p.isdecimal() else (0, 0, p) for p in re.split(r"(\d+)", text) if p]
