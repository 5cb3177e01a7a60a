"""What `imagebuild plan` prints about targets."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from imagebuild import console
from imagebuild import plan as planning
from imagebuild.console import out
from imagebuild.models import Plan
from imagebuild.render import Renderer


def as_json(plan: Plan, renderer: Renderer, select: Sequence[str]) -> None:
    """The selected targets, with the keys of their stages, and what is excluded."""
    targets = planning.select(plan, select)
    full = [t.model_copy(update={"stages": renderer.dockerfile(t).stages}) for t in targets]
    shown = Plan(
        targets=tuple(full),
        excluded=planning.select_excluded(plan, select),
        restricted=planning.restricted(plan, targets),
    )
    sys.stdout.write(shown.model_dump_json(indent=1) + "\n")  # rich takes a second for a thousand targets


def as_table(plan: Plan, select: Sequence[str], *, why: bool) -> None:
    """One line a target, what a publisher must accept, and with `why` what is not built."""
    targets = planning.select(plan, select)
    rows = [(t.id, ", ".join(p.removeprefix("linux/") for p in t.platforms), t.name) for t in targets]
    console.table(("target", "platforms", "image"), rows)
    if limits := planning.restricted(plan, targets):
        out.print()
        console.table(("restricted", "to publish images with it"), list(limits.items()))
    if why:
        out.print()
        rows = [(e.id, e.rule, e.reason) for e in planning.select_excluded(plan, select)]
        console.table(("not built", "rule", "reason"), rows)
