"""Wheels, asked from the Python package index that this machine's pip is configured for. Only metadata is fetched."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from imagebuild.apt import Run
from imagebuild.errors import CommandError, ConfigError, ResultError, Unreachable
from imagebuild.fields import Arch
from imagebuild.lockfile import Wheel
from imagebuild.recipe import ARCHS, CPUS
from imagebuild.sources import WheelSet

GLIBC = ("manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(12, 36)))
"""Platform tags that the images' glibc satisfies; `fetch-wheels` accepts the same."""
TIMEOUT_S = 300
OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|Failed to establish|ProxyError|SSLError|ReadTimeout|ConnectTimeout|"
    r"Connection (?:refused|reset|aborted)|Temporary failure in name resolution|timed out|HTTP error 5"
)
"""What pip writes when it could not ask; then it also writes that it found nothing."""

Answer = dict[str, tuple[str, str]]
"""Name → version and sha256."""
Ask = Callable[[tuple[str, ...], Arch], Answer]


def resolve(ask: Ask, wanted: WheelSet) -> tuple[Wheel, ...]:
    """The newest wheels that fit, in one version for all architectures.

    Raises ConfigError if an architecture lacks a wheel, and as `ask` does.
    """
    answers = {arch: ask(wanted.requirements, arch) for arch in ARCHS}
    first, *others = ARCHS
    wheels = []
    for name, (version, _) in sorted(answers[first].items()):
        for arch in others:
            other = answers[arch].get(name)
            if other is None or other[0] != version:
                raise ConfigError(
                    f"{wanted.component} {wanted.version}: {name} is {version} for {first} but {other and other[0]} "
                    f"for {arch}"
                )
        digests = {arch: answers[arch][name][1] for arch in ARCHS}
        wheels.append(Wheel(name=name, version=version, sha256=digests))
    return tuple(wheels)


def ask_pip(run: Run, index: str | None = None) -> Ask:
    """Asks pip; `index` is a Python package index to use instead of the one it is configured for.

    The function raises Unreachable if the index does not answer, CommandError if it has no such wheel, and
    ResultError if pip's report cannot be read.
    """

    def ask(asked: tuple[str, ...], arch: Arch) -> Answer:
        tags = [option for glibc in GLIBC for option in ("--platform", f"{glibc}_{CPUS[arch]}")]
        text = _pip(
            run, "install", *_index(index), "--dry-run", "--quiet", "--ignore-installed", "--no-deps",
            "--only-binary", ":all:", "--target", "unused", "--report", "-", *tags, *asked,
            failing=f"pip finds no {' '.join(asked)} for {arch}",
        )  # fmt: skip
        try:
            report: dict[str, Any] = json.loads(text)
            return {
                item["metadata"]["name"]: (
                    item["metadata"]["version"],
                    item["download_info"]["archive_info"]["hashes"]["sha256"],
                )
                for item in report["install"]
            }
        except (ValueError, KeyError) as error:
            raise ResultError(f"pip's report cannot be read: {error!r}") from None

    return ask


def versions(run: Run, name: str, index: str | None = None) -> tuple[str, ...]:
    """Every version of a wheel that fits both architectures, pre-releases too.

    Raises Unreachable or CommandError, as `ask_pip`, and ResultError if pip's answer cannot be read.
    """
    found = []
    for arch in ARCHS:
        tags = [option for glibc in GLIBC for option in ("--platform", f"{glibc}_{CPUS[arch]}")]
        text = _pip(
            run, "index", "versions", *_index(index), "--pre", "--only-binary", ":all:", *tags, name,
            failing=f"pip finds no {name}",
        )  # fmt: skip
        match = re.search(r"^Available versions: (.+)$", text, re.MULTILINE)
        if not match:
            raise ResultError(f"pip's list of versions of {name} cannot be read: {text[:200]!r}")
        found.append(match[1].split(", "))
    return tuple(version for version in found[0] if all(version in other for other in found[1:]))


def _index(index: str | None) -> tuple[str, ...]:
    return ("--index-url", index) if index else ()


def _pip(run: Run, *words: str, failing: str) -> str:
    command, *rest = words
    try:
        return run(
            sys.executable, "-m", "pip", command, "--retries", "2", "--disable-pip-version-check", *rest,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    except CommandError as error:
        said = str(error).partition(": ")[2].splitlines()
        told = [line for line in said if not line.startswith("WARNING: Location")]
        if OFFLINE.search("\n".join(said)):
            raise Unreachable(f"{failing}: its index does not answer") from None
        raise CommandError("\n".join([f"{failing}:", *told[-4:]])) from None
