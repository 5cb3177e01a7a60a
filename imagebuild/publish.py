"""`imagebuild publish`: targets whose images were verified get their tags, several at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagebuild import console, naming, publication, static
from imagebuild import plan as planning
from imagebuild.config import Project
from imagebuild.console import err, out
from imagebuild.errors import CommandError, ConfigError, ImagebuildError, NothingSelected
from imagebuild.fields import Platform
from imagebuild.models import Plan, Target
from imagebuild.publication import Draft, Tools
from imagebuild.publishing import decide, evidence
from imagebuild.publishing.decide import Terms
from imagebuild.publishing.evidence import Evidence
from imagebuild.publishing.result import Published, PublishResult
from imagebuild.registry.parallel import each
from imagebuild.registry.reference import parse

JOBS = 4
"""Targets at a time."""
MARKS = {
    "published": "[green]✓ published[/]", "unchanged": "[green]✓ unchanged[/]", "possible": "[yellow]- possible[/]",
    "refused": "[red]✗ refused[/]", "failed": "[red]✗ failed[/]",
}  # fmt: skip


@dataclass(frozen=True)
class Wish:
    """What `publish` was asked for."""

    select: Sequence[str]
    """Targets; without any, those that the folders have a build of."""
    folders: Sequence[Path]
    platforms: Sequence[Platform] = ()
    """Instead of all that a target is for."""
    jobs: int = JOBS
    allow_dirty: bool = False
    dry_run: bool = False


def publish(project: Project, plan: Plan, wish: Wish, tools: Tools) -> PublishResult:
    """Publish targets, each whatever becomes of the others.

    Raises ConfigError, NothingSelected or ResultError for what keeps it from beginning.
    """
    found = evidence.gather(wish.folders)
    targets = chosen(plan, wish, found)
    registries = [tools.registry(host) for host in _hosts(targets, found)]

    def one(target: Target) -> tuple[Draft | None, Published]:
        platforms = tuple(p for p in target.platforms if not wish.platforms or p in wish.platforms)
        terms = Terms(
            found, project.matrix.model.publish, decide.rules(project, target, static.CHECKS),
            made=frozenset({"provenance"}) if tools.provenance else frozenset(),
        )  # fmt: skip
        try:
            made = publication.draft(target, platforms, terms, tools, allow_dirty=wish.allow_dirty)
            return made, publication.publish(made, tools, dry_run=wish.dry_run)
        except ImagebuildError as error:
            return None, Published(target=target.id, state="failed", reasons=(str(error),))

    def checked(made: Draft | None, done: Published) -> Published:
        if made is None or done.state != "published":
            return done
        try:
            publication.recheck(made, tools)
        except CommandError as error:
            return done.model_copy(update={"state": "failed", "reasons": (str(error),)})
        return done

    published = each(one, targets, *registries, jobs=wish.jobs)
    return PublishResult(
        targets=tuple(each(lambda pair: checked(*pair), published, *registries, jobs=wish.jobs)),
        ignored=len(found.ignored),
        unnamed=tuple(str(v.path) for v in found.verifications if not v.value.digest),
    )


def _hosts(targets: Iterable[Target], found: Evidence) -> list[str]:
    names = [name.replace(naming.REVISION, "0") for target in targets for name in (*target.tags, *target.aliases)]
    staged = [build.value.repository for build in found.builds if build.value.repository]
    return sorted({parse(name).host for name in (*names, *staged)})


def chosen(plan: Plan, wish: Wish, found: Evidence) -> tuple[Target, ...]:
    """The targets to publish. Raises NothingSelected, ConfigError for a platform that one of them is not for."""
    targets = planning.select(plan, wish.select)
    if not wish.select:
        built = {build.value.target for build in found.builds}
        targets = tuple(target for target in targets if target.id in built)
        if not targets:
            where = ", ".join(map(str, wish.folders))
            raise NothingSelected(f"--from {where}: no result.json of a target of the plan is there")
    for target in targets:
        if wanted := [platform for platform in wish.platforms if platform not in target.platforms]:
            raise ConfigError(f"--platform {wanted[0]}: {target.id} is for {', '.join(target.platforms)}")
    return targets


def show(result: PublishResult, plan: Plan) -> None:
    """Print what became of each target, how many there are of each, and what who publishes them accepts."""
    for target in result.targets:
        out.print(f"{MARKS[target.state]} {target.target} {target.digest or ''}".rstrip())
        for line in _lines(target):
            out.print(f"    {line}", markup=False)
    states = Counter(target.state for target in result.targets)
    sent = sum(target.sent_bytes for target in result.targets)
    mounted = sum(target.mounted for target in result.targets)
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    out.print(f"{counts}; {console.size(sent)} sent, {mounted} blobs taken from staging")
    public = {target.target for target in result.targets if target.state not in ("refused", "failed")}
    for name, text in planning.restricted(plan, [t for t in plan.targets if t.id in public]).items():
        err.print(f"restricted: {name}: {text}", markup=False)
    if result.requests:
        asked = ", ".join(f"{number} {method}" for method, number in result.requests.items() if method.isupper())
        moved = " and ".join(f"{console.size(result.requests.get(k, 0))} {k}" for k in ("sent", "received"))
        err.print(f"requests: {asked}; bodies: {moved}")
    for path in result.unnamed:
        err.print(f"{path}: counts for nothing, as it names no digest; verify the image as NAME@DIGEST", markup=False)
    if result.ignored:
        err.print(f"{result.ignored} other JSON files were ignored")


def _lines(target: Published) -> Iterable[str]:
    would = target.state == "possible"
    yield from target.reasons
    yield from (f"{'would be given' if would else 'given'}  {name}" for name in target.given)
    yield from (f"kept   {name}" for name in target.kept)
    for name, before in target.moved.items():
        yield f"{'would move' if would else 'moved'}  {name}: {before} → {target.digest}"
    if target.attached:
        listed = ", ".join(f"{number} {kind}" for kind, number in target.attached.items())
        yield f"{'would attach' if would else 'attached'}  {listed}"
