"""The rule about GPU code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch

from imagebuild.inspection.context import Inspection, NotApplicable
from imagebuild.inspection.facts import Elf, Finding


def gpu_code(about: Inspection) -> Iterator[Finding]:
    """What was compiled here is for exactly the GPUs of the matrix; what others compiled runs on all of them."""
    wanted = wanted_capabilities(about)
    own = [pattern.strip("/") for _, component in about.known() for pattern in component.gpu_code]
    seen: set[str] = set()
    for path, elf in about.objects.items():
        if not elf.gpu:
            continue
        patterns = [pattern for pattern in own if fnmatch(path, pattern)]
        seen.update(patterns)
        has = describe(elf)
        if patterns:
            exact = f"code for {', '.join(wanted)}; PTX for {wanted[-1]}"
            if has != exact:
                yield Finding(f"/{path}", f"has {has}; the matrix wants {exact}")
        elif lacking := [capability for capability in wanted if not runs(elf, capability)]:
            yield Finding(f"/{path}", f"does not run on {', '.join(lacking)}: it has {has}")
        else:
            yield Finding(f"/{path}", f"has {has}", note=True)
    for pattern in own:
        if pattern not in seen:
            yield Finding(f"/{pattern}", "holds no GPU code")


def wanted_capabilities(about: Inspection) -> list[str]:
    """Compute capabilities, ascending. Raises NotApplicable if the image's labels name no target of the plan."""
    found = about.renderer.capabilities(about.target)
    if not found.get(about.arch):
        raise NotApplicable(f"the matrix lists no GPU architectures for {about.arch}")
    return list(found[about.arch])


def describe(elf: Elf) -> str:
    kinds = {"code": "code", "ptx": "PTX"}
    parts = []
    for kind, name in kinds.items():
        if found := sorted({part.capability for part in elf.gpu if part.kind == kind}, key=number):
            parts.append(f"{name} for {', '.join(found)}")
    return "; ".join(parts)


def number(capability: str) -> tuple[int, str]:
    digits = re.sub(r"\D", "", capability)
    return int(digits), capability


def runs(elf: Elf, capability: str) -> bool:
    """Code of X.y runs on X.z from z = y on, with `a` on X.y only; PTX is compiled for all later ones."""
    wanted, _ = number(capability)
    for part in elf.gpu:
        has, _ = number(part.capability)
        if has == wanted:
            return True
        if part.capability.endswith("a") or has > wanted:
            continue
        if has // 10 == wanted // 10 or (part.kind == "ptx" and not part.capability.endswith("f")):
            return True
    return False
