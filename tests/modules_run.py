"""Count the modules of imagebuild whose code runs before a command starts what it is there for.

    python -m tests.modules_run --until 'docker buildx bake' -- imagebuild build quickstart --base registry

runs `imagebuild build …` and ends it when it starts a program whose command line begins with these words, or makes an
HTTP request that begins with them (`POST /v1.47/containers/create`; `*` stands for anything within a word). Without
`--until`, the command runs to its end. A module counts if one of its functions, methods or comprehensions ran; its definitions, and what runs while a module is
imported, do not count. Sub-processes are not followed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import imagebuild
from imagebuild.cli import main as run_command

PACKAGE = Path(imagebuild.__file__).parent


@dataclass(frozen=True)
class ModulesRun:
    """Hold what ran until a command started what it is there for."""

    functions: Mapping[str, tuple[str, ...]]
    """Module, such as `build.bake` → names of its functions that ran."""
    imported: tuple[str, ...]
    """Modules that were imported, whether or not code of them ran."""
    reached: bool
    """Was the program started, or the request made, that was waited for?"""

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the modules of which a function ran."""
        return tuple(sorted(self.functions))

    def __str__(self) -> str:
        """Return one line for each module, and the figures."""
        lines = [f"{module:24} {', '.join(self.functions[module])}" for module in self.modules]
        functions = sum(map(len, self.functions.values()))
        figures = f"{len(self.modules)} modules, {functions} functions; {len(self.imported)} modules imported"
        return "\n".join([*lines, figures])


class Recorder:
    """Record which functions of imagebuild are called, outside imports."""

    def __init__(self) -> None:
        self.called: set[CodeType] = set()
        self._importing = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event of `sys.setprofile`."""
        code = frame.f_code
        if code.co_name == "<module>":
            depth = getattr(self._importing, "depth", 0)
            self._importing.depth = depth + (event == "call") - (event == "return")
        elif event == "call" and not getattr(self._importing, "depth", 0) and code.co_flags & inspect.CO_OPTIMIZED:
            self.called.add(code)

    def functions(self) -> dict[str, tuple[str, ...]]:
        """Return module → functions that were called."""
        found: dict[str, set[str]] = {}
        for code in self.called:
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE) and path.name != "__init__.py":
                module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
                found.setdefault(module, set()).add(code.co_qualname)
        return {module: tuple(sorted(names)) for module, names in found.items()}


def count_modules_run(
    arguments: Sequence[str], until: str, environ: Mapping[str, str] = os.environ, *, cwd: Path = PACKAGE.parent
) -> ModulesRun:
    """Run `imagebuild` with these arguments in a process of its own, and count until `until` (see above)."""
    environ = {**environ, "PYTHONPATH": str(PACKAGE.parent)}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "tests.modules_run", "--until", until, "--json", str(result), "--", *arguments]
        ended = subprocess.run(command, cwd=cwd, env=environ, check=False, capture_output=True, text=True, timeout=300)
        assert result.exists(), ended.stderr
        content = json.loads(result.read_text())
    assert content["reached"], f"{until!r} was not reached:\n{ended.stdout}\n{ended.stderr}"
    return ModulesRun(
        {module: tuple(names) for module, names in content["functions"].items()},
        tuple(content["imported"]),
        content["reached"],
    )


def _matches(words: Iterable[str], pattern: str) -> bool:
    given, wanted = tuple(words), pattern.split()
    return len(given) >= len(wanted) and all(map(fnmatchcase, given, wanted))


def main() -> None:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m tests.modules_run", description="Count the modules that run.")
    parser.add_argument("--until", help="first words of a program's command line, or of a request")
    parser.add_argument("--json", type=Path, help="file for the result; otherwise it is printed")
    parser.add_argument("arguments", nargs="+", help="arguments of imagebuild")
    options = parser.parse_args()
    arguments = options.arguments[options.arguments[0] == "imagebuild" :]
    recorder = Recorder()
    own_process = os.getpid()
    reached = False

    def finish() -> None:
        sys.setprofile(None)
        modules = [name.removeprefix("imagebuild.") for name in list(sys.modules) if name.count(".") > 1]
        imported = tuple(sorted(m for m in modules if PACKAGE.joinpath(*m.split(".")).with_suffix(".py").exists()))
        result = ModulesRun(recorder.functions(), imported, reached)
        if options.json:
            content = {"functions": result.functions, "imported": imported, "reached": reached}
            options.json.write_text(json.dumps(content))
        else:
            sys.stdout.write(f"{result}\n")

    def watch(event: str, values: tuple[Any, ...]) -> None:
        nonlocal reached
        if reached or os.getpid() != own_process:
            return
        if event == "subprocess.Popen":
            program, *words = map(os.fsdecode, values[1])
            words = [Path(program).name, *words]
        elif event == "http.client.send" and isinstance(values[1], bytes):
            words = values[1].partition(b"\r\n")[0].decode("latin-1").split()
        else:
            return
        if options.until and _matches(words, options.until):
            reached = True
            finish()
            raise SystemExit(0)  # instead of what it would have started; the command cleans up

    sys.argv = ["imagebuild", *arguments]
    sys.addaudithook(watch)
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        run_command()
    finally:
        if not reached:
            finish()


if __name__ == "__main__":
    main()
