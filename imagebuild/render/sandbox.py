"""The program that fills a project's templates. It runs without imagebuild's variables, and cannot open files.

It reads each request as a line of JSON: the name of a template, and values. It asks for texts with such a line, too."""

import json
import re
import resource
import signal
import sys
import textwrap  # noqa: F401 - a filter imports this module, which needs open files
from collections.abc import Mapping
from functools import cache
from traceback import walk_tb
from typing import Any

import jinja2
import jinja2.debug
import jinja2.sandbox

LARGEST = 4 << 20
"""Maximum number of characters of a filled template."""
WITH_METHODS = ("cycler", "joiner", "lipsum")
"""Functions of jinja2 that return objects, and are not needed."""


def text_of(kind: str, name: str) -> tuple[str, str]:
    """Return the text and the path of a template or file. Raises LookupError if imagebuild cannot read it."""
    send({"read": [kind, name]})
    answer = json.loads(sys.stdin.readline())
    if "problem" in answer:
        raise LookupError(answer["problem"])
    return answer["text"], answer["path"]


def send(line: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


@cache
def make_environment() -> jinja2.Environment:
    environment = jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.FunctionLoader(lambda name: (*text_of("template", name), None)), undefined=jinja2.StrictUndefined,
        auto_reload=False, autoescape=False, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    for name in WITH_METHODS:
        del environment.globals[name]
    del environment.filters["pprint"]

    def file(name: object) -> str:
        return text_of("file", str(name))[0]

    file.__qualname__ = "file"  # for messages
    environment.globals["file"] = file
    # `quoted` escapes a text for double quotes in a Dockerfile.
    environment.filters["quoted"] = lambda text: re.sub(r'([\\"$])', r"\\\1", text)
    # Make the macros available in every template.
    macros = vars(environment.get_template("macros.j2").module)
    environment.globals |= {name: macro for name, macro in macros.items() if not name.startswith("_")}
    return environment


def fill(name: str, values: dict[str, Any]) -> dict[str, object]:
    """Return the text of a filled template, or the problem with its place."""
    template = None
    try:
        template = make_environment().get_template(name)
        text = template.render(values)
        if len(text) > LARGEST:
            raise ValueError(f"yields more than {LARGEST >> 20} MB of text")
    except jinja2.TemplateSyntaxError as error:
        return {"path": error.filename, "line": error.lineno, "problem": error.message, "syntax": True}
    except Exception as error:  # such as a division by zero in a template
        path = template.filename if template else None
        lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
        problem = "needs too much memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__
        undefined = isinstance(error, jinja2.UndefinedError)
        return {"path": path, "line": [1, *lines][-1], "problem": problem[:LARGEST], "undefined": undefined}
    return {"text": text}


def main(memory: int, seconds: float) -> None:
    """Answer requests until the input ends. The process ends if a template needs more seconds of CPU time."""
    jinja2.Template("{{ 'x' }}")  # imports the codecs of string constants, which needs open files
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    while line := sys.stdin.readline():
        signal.setitimer(signal.ITIMER_PROF, seconds)
        send(fill(*json.loads(line)))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
