"""The templates of a project. `sandbox.py` fills them in a process of its own, because nobody has to trust them."""

import json
import os
import re
import signal
import sys
from pathlib import Path, PurePath
from typing import Any

from imagebuild.core.errors import ConfigError, nearest
from imagebuild.core.files import read_inside
from imagebuild.core.run import Dialogue, ProgramEnded
from imagebuild.project.project import Project

MEMORY = 512 << 20
"""Bytes of memory that filling templates may need."""
SECONDS = 5.0
"""Seconds of CPU time that filling one template may need."""
LONGEST = 64 << 20
"""Maximum number of bytes of one message of the process."""
SECTION = "section"
"""Name of the template with the comment that begins a section of a Dockerfile."""


class Templates:
    """The templates of a project, and the process that fills them."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._process: Dialogue | None = None

    def rule(self, title: str, about: str) -> str:
        """Return the comment that begins a section of a Dockerfile.
        Raises ConfigError if `macros.j2` does not define the macro `rule`."""
        return self.render(SECTION, title=title, about=about).rstrip("\n")

    def render(self, name: str, component: str = "", /, **values: Any) -> str:
        """Fill a template with plain values: texts, numbers, booleans, lists and dicts.

        Templates of a component can call `file(name)`. Blank lines are merged. A blank line follows each heredoc,
        because hadolint requires it. Raises ConfigError with file and line for a mistake in the template."""
        try:
            reply = self._fill(name, component, values)
        except BaseException:  # the process may wait for an answer
            self._process = None
            raise
        if "text" in reply:
            text = reply["text"].replace("\nEOF\n", "\nEOF\n\n")
            return re.sub("\n{3,}", "\n\n", text).strip() + "\n"
        path = reply["path"] or self._path(name)
        problem = "".join(letter if letter.isprintable() else " " for letter in reply["problem"][:500])
        remedy = "correct it" if reply.get("syntax") else "correct the template"
        if reply.get("undefined"):
            known = {name: name for name in values}
            for owner, value in values.items():
                for key in value if isinstance(value, dict) else ():
                    known[key] = f"{owner}.{key}" if key.isidentifier() else f'{owner}["{key}"]'
            wanted = "".join(problem.split("'")[-2:-1])
            # Jinja reads `stage.compiler-native` as a subtraction.
            near = nearest(wanted, known) or next((key for key in sorted(known) if wanted in key.split("-")), None)
            remedy = "name it in `key` or `build-requires` of component.yaml"
            remedy = f"did you mean `{known[near]}`?" if near else remedy
        if name == SECTION:
            problem, remedy = "does not define the macro rule", "copy it from the macros.j2 of imagebuild"
        raise ConfigError(f"{path}:{reply['line']}: {problem}; {remedy}")

    def _fill(self, name: str, component: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the process. Raises ConfigError if the process ends, or needs a file that is refused."""
        is_new = self._process is None
        if self._process is None:
            # The process can import what this process can. Reading the sites again would take longer.
            env = {"PYTHONPATH": os.pathsep.join(sys.path), "LC_ALL": "C.UTF-8"}
            program = Path(__file__).with_name("sandbox.py")
            self._process = Dialogue([sys.executable, "-SP", str(program), str(MEMORY), str(SECONDS)], env)
        self._process.send(json.dumps([name, values]))
        try:
            while "read" in (reply := json.loads(self._process.receive(LONGEST))):
                self._process.send(json.dumps(self._read(component, *reply["read"])))
        except ProgramEnded as end:
            status, message = end.args
            if status == -signal.SIGTERM and not is_new:  # it ends with the thread that started it
                self._process = None
                return self._fill(name, component, values)
            problem = f"the process that fills templates ended ({status}): {message[-500:]}"
            if status == -signal.SIGPROF:
                problem = f"takes more than {SECONDS:.0f} s"
            raise ConfigError(f"{self._path(name)}:1: {problem}; correct the template") from None
        return dict(reply)

    def _read(self, component: str, kind: str, name: str) -> dict[str, str]:
        """Return the text of a template or file and its path, or the reason why a file cannot be read.
        Raises ConfigError if a template is missing, or a file is outside the project."""
        parts = PurePath(name).parts
        if not name.isprintable() or len(name) > 255 or not parts or ".." in parts or name.startswith("/"):
            return {"problem": f"{name[:255]!r} is not the name of a file in the project"}
        if name == SECTION:
            return {"text": "{{ rule(title, about) }}", "path": str(self._path(name))}
        if kind == "file":
            return self._file(component, name)
        path = self._path(name)
        if not path.exists():
            remedy = "write `extends: imagebuild` in the matrix to use imagebuild's template"
            raise ConfigError(f"{path}: is missing, but templates need it; {remedy}")
        return {"text": read_inside(self.project.folders, path), "path": str(path)}

    def _path(self, name: str) -> Path:
        return self.project.template("macros.j2" if name == SECTION else name)

    def _file(self, component: str, name: str) -> dict[str, str]:
        """Return the text of a file of a component. `OTHER/file` names a file of the component OTHER."""
        owner, _, file = name.partition("/")
        is_other = file and owner in self.project.components
        path = self.project.folder(owner if is_other else component) / "files" / (file if is_other else name)
        if not os.path.lexists(path):
            return {"problem": f"{path} cannot be read: No such file or directory"}
        text = read_inside(self.project.folders, path).rstrip("\n")
        for number, line in enumerate(text.splitlines(), 1):
            if line == "EOF":
                problem = "the line 'EOF' would end the heredoc that contains the file; change the line"
                raise ConfigError(f"{path}:{number}: {problem}")
            if "\0" in line:
                raise ConfigError(f"{path}:{number}: a text file cannot contain a NUL; remove it")
        return {"text": text, "path": str(path)}
