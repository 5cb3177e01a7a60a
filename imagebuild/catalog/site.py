"""The site: an index with the picker and a table, and a page for each image. Pure: a catalogue in, texts out.

Pages need no server and no network. Everything that a registry said is text to them, never markup or program: Jinja
escapes it, and the page's policy runs the one program whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from imagebuild.catalog import chart, commands, picker, words
from imagebuild.catalog.models import Catalog, PublishedImage
from imagebuild.report import words as report_words
from imagebuild.report.clean import one_line, visible

INDEX = "index.html"
DATA = "images.json"


def pages(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Path and text of every file of the site; the same catalogue gives the same."""
    environment = _environment()
    yield DATA, catalog.model_dump_json(indent=1) + "\n"
    yield INDEX, index(catalog, environment)
    page = environment.get_template("image.html.j2")
    style, script = _Part("style", "site.css"), _Part("script", "copy.js")
    for image in catalog.images:
        yield path_of(image), page.render(image=image, catalog=catalog, style=style, script=script)


def path_of(image: PublishedImage) -> str:
    """The page of an image, relative to the index."""
    return f"images/{image.image}/{image.tag}.html"


def index(catalog: Catalog, environment: jinja2.Environment | None = None) -> str:
    """The page of all images."""
    environment = environment or _environment()
    facets = picker.facets_of(catalog.images)
    columns = [facet for facet in facets if facet.key not in ("image", picker.PLATFORM)]
    labels = "".join(
        f'tbody td:nth-of-type({number})::before{{content:"{_css(title)}"}}'
        for number, title in enumerate((*(facet.title for facet in columns), *COLUMNS), 1)
    )
    return environment.get_template("index.html.j2").render(
        catalog=catalog,
        facets=facets,
        columns=columns,
        fixed=COLUMNS,
        style=_Part("style", "site.css", f"@media (max-width: 60rem) {{ {labels} }}\n"),
        script=_Part("script", "copy.js", _text("index.js")),
        data=embedded(picker.data(catalog)),
        counts=list(Counter(image.image for image in catalog.images).items()),
    )


COLUMNS = ("Platforms", "Compressed", "Checks", "Scan", "Busbw", "Dated")


def _css(text: str) -> str:
    """Text for a string of a style sheet."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\{ord(c):x} " for c in text)


def embedded(document: Mapping[str, Any]) -> Markup:
    """JSON that cannot end the script element it is in."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))  # noqa: S704 - nothing in it is markup


class _Part:
    """A style sheet or a program of a page, and what the page's policy says to let it in."""

    def __init__(self, kind: str, name: str, more: str = "") -> None:
        self._text = f"\n{_text(name)}{more}"
        self._kind = kind

    def __html__(self) -> str:
        return f"<{self._kind}>{self._text}</{self._kind}>"

    @property
    def policy(self) -> Markup:
        digest = base64.b64encode(hashlib.sha256(self._text.encode()).digest()).decode()
        return Markup(f"'sha256-{digest}'")  # noqa: S704 - a digest


@cache
def _text(name: str) -> str:
    return files("imagebuild.catalog").joinpath("templates", name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text), autoescape=True, undefined=jinja2.StrictUndefined, finalize=_harmless,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {
        "absent": picker.ABSENT,
        "bytes": report_words.bytes_text,
        "choices": picker.choices,
        "commands": commands.of,
        "draw": chart.draw,
        "frame": chart,
        "line": one_line,
        "marks": words.MARKS,
        "number": report_words.number,
        "path_of": path_of,
        "words": words,
    }
    return environment


def _harmless(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
