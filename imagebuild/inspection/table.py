"""The rules. A rule is a function that names what it objects to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from imagebuild.inspection import rules_elf, rules_files, rules_gpu, rules_image
from imagebuild.inspection.context import Inspection
from imagebuild.inspection.facts import Finding


@dataclass(frozen=True)
class Rule:
    """A statement about images that reading them can refute."""

    name: str
    description: str
    """What passing proves, in one line."""
    find: Callable[[Inspection], Iterator[Finding]]
    """Raises NotApplicable if it says nothing about the image."""


RULES = (
    Rule("labels", "The labels say what it is, from what it was built, and under which licences", rules_image.labels),
    Rule("plan", "Versions, axes and lock in the labels are what the plan says now", rules_image.plan),
    Rule("packages", "Packages that the plan names are installed, in its versions", rules_image.packages),
    Rule("licenses", "The licence texts of all components are there", rules_image.licenses),
    Rule("environment", "Folders in variables exist, and no variable holds a secret", rules_image.environment),
    Rule("user", "Users exist, have no passwords, and one is a normal user", rules_image.user),
    Rule("command", "What a container starts exists and is executable", rules_image.command),
    Rule("size", "The compressed layers keep within the budget of the matrix", rules_image.size),
    Rule("no-keys", "No layer holds a private key, not even below another", rules_files.no_keys),
    Rule("no-tokens", "No layer, label, variable or build step holds a token or a password", rules_files.no_tokens),
    Rule("no-site-ca", "No layer trusts a certificate that the distribution does not", rules_files.no_site_ca),
    Rule("no-leftovers", "No layer holds package lists, caches or temporary files", rules_files.no_leftovers),
    Rule("not-world-writable", "Nobody but owners can write to files and folders", rules_files.not_world_writable),
    Rule("setuid", "Only the distribution's programs run with rights of others", rules_files.setuid),
    Rule("architecture", "Every ELF file is for the image's architecture", rules_elf.architecture),
    Rule("closure", "The loader finds every library that is needed, but the driver's", rules_elf.closure),
    Rule("symbol-versions", "Libraries define every version of symbols that is needed", rules_elf.symbol_versions),
    Rule("symbols", "What programs load defines every symbol that is needed", rules_elf.symbols),
    Rule("one-provider", "For each library the loader can find only one file", rules_elf.one_provider),
    Rule("no-stubs", "The loader finds no stub and no copy of a driver's library", rules_elf.no_stubs),
    Rule("gpu-code", "Fat binaries run on the GPUs that the matrix lists", rules_gpu.gpu_code),
)
