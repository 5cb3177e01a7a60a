"""The Python package index: which one this machine's pip uses, and telling the pip of a build step."""

from __future__ import annotations

import configparser
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from imagebuild import programs
from imagebuild.apt import Run
from imagebuild.errors import CommandError

CONFIGURATIONS = (Path("~/.config/pip/pip.conf"), Path("~/.pip/pip.conf"), Path("/etc/pip.conf"))


def configured() -> str | None:
    """Address of the Python package index, if this machine's pip has another than its default."""
    found = os.environ.get("PIP_INDEX_URL", "")
    for path in CONFIGURATIONS:
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(configparser.Error):
            parser.read(path.expanduser())
            found = found or parser.get("global", "index-url", fallback="")
    return found if found.startswith("http") else None


def default(run: Run = programs.run) -> str:
    """The index that pip asks where nothing is configured; pip's help says it. Raises CommandError."""
    said = run(sys.executable, "-m", "pip", "install", "--help", env={"COLUMNS": "400"})
    found = re.search(r"\(default\s+(https://[^\s)]+)\)", said)
    if not found:
        raise CommandError("pip's help does not say its default index; set mirrors.python-index in config.yaml")
    return found[1]


def text(index: str, login: tuple[str, str] | None = None) -> str:
    """A pip.conf for an index; the wheels' hashes, which the lock has, verify what comes without https."""
    address = urlsplit(index)
    if login:
        host = f"{quote(login[0], safe='')}:{quote(login[1], safe='')}@{address.netloc}"
        index = urlunsplit(address._replace(netloc=host))
    trusted = f"trusted-host = {address.hostname}\n" if address.scheme == "http" else ""
    return f"[global]\nindex-url = {index}\n{trusted}"
