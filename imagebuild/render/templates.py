"""The templates of a project. jinja2 fills the templates in a sandbox, and caches them in compiled form."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import cached_property
from traceback import extract_tb
from typing import Any

import jinja2
import jinja2.sandbox

from imagebuild.core.errors import ConfigError, nearest
from imagebuild.core.files import cache_folder, read_text
from imagebuild.project.project import Project


class Templates:
    """The templates of a project."""

    def __init__(self, project: Project) -> None:
        self.project = project

    def rule(self, title: str, about: str) -> str:
        """Return the comment that begins a section of a Dockerfile.
        Raises ConfigError if `macros.j2` does not define the macro `rule`."""
        rule: Any = self._environment.globals.get("rule")
        if not callable(rule):
            where = f"{self.project.template('macros.j2')}:1"
            raise ConfigError(f"{where}: does not define the macro rule; copy it from the macros.j2 of imagebuild")
        return str(rule(title, about))

    def file(self, component: str, name: str) -> str:
        """Return the text of a file of a component. `OTHER/file` names a file of the component OTHER.
        Templates call this function as `file(name)`."""
        owner, _, file = name.rpartition("/")
        path = self.project.folder(owner or component) / "files" / file
        try:
            text = path.read_text(encoding="utf-8").rstrip("\n")
        except OSError as error:
            raise LookupError(f"{path} cannot be read: {error.strerror}") from None
        for number, line in enumerate(text.splitlines(), 1):
            if line == "EOF":
                problem = "the line 'EOF' would end the heredoc that contains the file; change the line"
                raise ConfigError(f"{path}:{number}: {problem}")
            if "\0" in line:
                raise ConfigError(f"{path}:{number}: a text file cannot contain a NUL; remove it")
        return text

    @cached_property
    def _environment(self) -> jinja2.Environment:
        compiled = None
        with suppress(OSError, ConfigError):  # without a writable folder, templates are compiled each time
            folder = cache_folder("sandboxed-templates")
            folder.mkdir(parents=True, exist_ok=True)
            compiled = jinja2.FileSystemBytecodeCache(str(folder)) if os.access(folder, os.W_OK) else None
        # A CI job with the right to sign renders the project's templates, and must not run code of the project.
        environment = jinja2.sandbox.SandboxedEnvironment(
            bytecode_cache=compiled,
            loader=jinja2.FunctionLoader(self._template),
            undefined=jinja2.StrictUndefined,
            auto_reload=False,
            autoescape=False,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        # `quoted` escapes a text for double quotes in a Dockerfile.
        environment.filters["quoted"] = lambda text: re.sub(r'([\\"$])', r"\\\1", text)
        # Make the macros available in every template.
        environment.globals |= vars(environment.get_template("macros.j2").module)
        return environment

    def _template(self, name: str) -> tuple[str, str, None]:
        """Return the text and the path of a template. jinja2 calls this function to load templates."""
        path = self.project.template(name)
        if not path.exists():
            remedy = "write `extends: imagebuild` in the matrix to use imagebuild's template"
            raise ConfigError(f"{path}: is missing, but templates need it; {remedy}")
        return read_text(path), str(path), None

    def render(self, name: str, /, **context: Any) -> str:
        """Render a template. Blank lines are merged. A blank line follows each heredoc, because hadolint requires it.
        Raises ConfigError with file and line for a mistake in the template."""
        try:
            text = self._environment.get_template(name).render(**context)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{self.project.template(error.name or name)}:{error.lineno}: {error.message}; correct it"
            ) from None
        except ConfigError:
            raise
        except Exception as error:  # such as a division by zero in a template
            lines = [1, *(frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename.endswith(name))]
            problem, remedy = str(error), "correct the template"
            if isinstance(error, jinja2.UndefinedError):
                known = {*context, *(key for value in context.values() if isinstance(value, dict) for key in value)}
                near = nearest(problem.split("'")[-2], known)
                remedy = f"did you mean {near!r}?" if near else "name it in `key` or `build-requires` of component.yaml"
            raise ConfigError(f"{self.project.template(name)}:{lines[-1]}: {problem}; {remedy}") from None
        text = text.replace("\nEOF\n", "\nEOF\n\n")
        while "\n\n\n" in text:
            text = text.replace("\n\n\n", "\n\n")
        return text.strip() + "\n"
