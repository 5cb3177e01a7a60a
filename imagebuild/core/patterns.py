"""Regular expressions and other rows of data in the YAML file beside a module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml


def data_of(module: str, name: str = "") -> Any:
    """Return the content of a YAML file beside a module. `module` is the path of the module. Without `name`, the file
    has the name of the module. `name` may begin with a folder."""
    path = Path(module).parent / f"{name or Path(module).stem}.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - safe


class DataFile(dict[str, Any]):
    """The YAML file beside a module. Its regular expressions are under the key `patterns`.

    A list in place of a pattern stands for its alternatives, and `(?&name)` for the text of this name under `parts`."""

    def __init__(self, module: str, **parts: str) -> None:
        """Read the file. `module` is the path of the module, `parts` are additional parts."""
        super().__init__(data_of(module))
        self.parts = parts | self.get("parts", {})
        self.patterns = {name: self.pattern(text) for name, text in self.get("patterns", {}).items()}

    def pattern(self, text: str | list[str]) -> re.Pattern[str]:
        """Return the regular expression with a text, or with alternatives."""
        return re.compile(self.complete("|".join(text) if isinstance(text, list) else text))

    def complete(self, text: str | list[str]) -> str:
        """Return a text with its parts in place of their names."""
        joined = f"(?:{'|'.join(text)})" if isinstance(text, list) else text
        return re.sub(r"\(\?&(\w+)\)", lambda match: self.complete(self.parts[match[1]]), joined)
