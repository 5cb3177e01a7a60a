"""The commands `imagebuild init`, `plan`, `render`, `impact` and `ci-matrix`."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from imagebuild.cli import options
from imagebuild.core.errors import ConfigError, NothingSelected, nearest, plural

if TYPE_CHECKING:
    from imagebuild.project.plan import Plan, Target
    from imagebuild.project.project import Project
    from imagebuild.render.renderer import Renderer

SECRET_MOUNT = re.compile(r"--mount=type=secret,\S+ *(\\\n *)?")
"""A secret mount, through which `build` passes mirrors and passwords to a step. `docker build` needs no such mount."""


@options.command()
def init(folder: Path, repository: str, image: str, workflow: str | None) -> None:
    from importlib.resources import files

    from imagebuild.core.console import out
    from imagebuild.core.files import write_text
    from imagebuild.project.project import check_repository

    check_repository("--repository", repository)
    if not re.fullmatch("[a-z0-9][a-z0-9-]*", image):
        raise ConfigError(f"--name {image}: must consist of lower-case letters, digits and hyphens")
    if workflow and not re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", workflow):
        raise ConfigError(f"--workflow {workflow}: write it as OWNER/NAME@REVISION, such as acme/imagebuild@v0.1.0")
    templates = files("imagebuild.project") / "templates"
    matrix = (templates / "matrix.yaml").read_text(encoding="utf-8")
    texts = {
        "matrix.yaml": matrix.replace("REPOSITORY", repository).replace("NAME", image),
        ".gitignore": "/build/\n",
    }
    if workflow:
        owner, _, revision = workflow.partition("@")
        called = (templates / "images.yml").read_text(encoding="utf-8")
        address = f"{owner}/.github/workflows/project.yml@{revision}"
        texts[".github/workflows/images.yml"] = called.replace("WORKFLOW", address)
    # A repository may have the other files before it becomes a project, or before it gets a workflow.
    *_, asked = [name for name in texts if name != ".gitignore"]
    if os.path.lexists(folder / asked):
        raise ConfigError(f"{folder / asked}: exists already; edit it, or name an empty folder")
    for name, text in texts.items():
        kept = os.path.lexists(folder / name)
        if not kept:
            write_text(folder / name, text)
        lines = f"; it should contain {text.strip()}" if name == ".gitignore" else ""
        out.print(f"{folder / name}: {f'kept{lines}' if kept else 'written'}")
    out.print("`imagebuild plan` lists the targets, `imagebuild build` builds them.")


@options.command()
def plan(
    project: options.ProjectFiles, edits: options.PlanChanges, select: tuple[str, ...], why: bool, registry: str | None,
    json_file: str | None, lock: bool, explained: str | None, waive: tuple[str, ...],
    osv_file: str | None, builders: int | None, folder: Path,
) -> None:  # fmt: skip
    from imagebuild.project.plan import restricted_components
    from imagebuild.project.select import select_excluded, select_one, select_targets

    if write_osv(osv_file):
        return
    changes = edits.parse(registry)
    names = [explained] if explained else select
    workspace = project.open(changes, select=names if edits else None)
    if explained:
        explain_target(workspace.project, select_one(workspace.plan, explained))
        return
    targets = select_targets(workspace.plan, select)
    check_advisories(targets, waive, whole=why)
    workspace = workspace.locked(targets, wanted=lock)
    if builders:
        divide_targets(workspace.renderer, targets, builders, folder, json_file)
        return
    excluded = select_excluded(workspace.plan, select)
    restricted = restricted_components(workspace.plan, targets)
    whole = None
    if json_file is not None:
        full = [t.model_copy(update={"stages": workspace.renderer.dockerfile(t).stages}) for t in targets]
        provides = {
            name: roles for name, roles in workspace.plan.provides.items() if any(name in t.components for t in full)
        }
        parts = {"targets": tuple(full), "excluded": excluded, "restricted": restricted, "provides": provides}
        whole = workspace.plan.model_copy(update=parts)

    def show() -> None:
        from imagebuild.core.console import err, out, print_table

        # For JSON, every Dockerfile was rendered above. Rendering includes this check.
        if not whole:
            workspace.renderer.check(targets)
        rows = [(t.id, ", ".join(p.removeprefix("linux/") for p in t.platforms), t.name) for t in targets]
        states = {target.id: lock_states(workspace, target) for target in targets}
        if unready := Counter((state, title) for own in states.values() for title, state in own.items() if state):
            counted = [Counter(own.values()) for own in states.values()]
            shares = [f"{of.total() - of['not locked']} of {of.total()}" + unread_part(of) for of in counted]
            locked = [(*row[:2], share, row[2]) for row, share in zip(rows, shares, strict=True)]
            print_table(("target", "platforms", "locked", "image"), locked, whole=["locked", "image"])
            out.print()
            lines = [(title, state, str(number)) for (state, title), number in sorted(unready.items())]
            print_table(("source", "is", "targets"), lines)
            images = {t.image for t in targets if any(states[t.id].values())}
            command = workspace.project.changes.lock_command(*sorted(images))
            of = Counter(state for state, _ in unready)
            err.print(f"sources without a pin: {of['not locked']}{unread_part(of)}; `{command}` completes the lock")
        else:
            print_table(("target", "platforms", "image"), rows, whole=["image"])
        if absent := absences(workspace.plan, select, targets) if not why else ():
            out.print(f"not listed: {', '.join(absent)}" + ("; --why shows the reasons" if excluded else ""))
        if restricted:
            out.print()
            print_table(("restricted component", "condition for publishing its images"), list(restricted.items()))
        if why and excluded:
            out.print()
            print_table(("not built", "rule", "reason"), [(e.id, e.rule, e.reason) for e in excluded])

    options.print_result(json_file, whole, show)


def absences(plan: Plan, select: Sequence[str], chosen: Sequence[Target]) -> list[str]:
    """Return the numbers of combinations that rules and --exclude leave out, with the rule."""
    from imagebuild.project.plan import EXCEPT
    from imagebuild.project.select import select_excluded, select_targets

    wanted = [text for text in select if not text.startswith(EXCEPT)]
    rules = Counter({"--exclude": len(select_targets(plan, wanted)) - len(chosen)})
    rules.update(excluded.rule for excluded in select_excluded(plan, select))
    return [f"{plural(number, 'combination')} by {rule}" for rule, number in rules.items() if number]


def lock_states(workspace: options.Workspace, target: Target) -> dict[str, str]:
    """Map each source of a target to its state: `not locked`, `not read` (pinned, but without facts), or empty."""
    from imagebuild.project.lockfile import UNREAD, lacks, source_title

    states: dict[str, str] = {}
    for source in {owned.source for owned in workspace.renderer.recipe(target).sources}:
        lacking, title = lacks(workspace.project.lock, source), source_title(source)
        states[title] = states.get(title) or ("not read" if lacking == UNREAD else "not locked" if lacking else "")
    return states


def unread_part(states: Counter[str]) -> str:
    """Return the part of a message that says how many sources are pinned, but not read."""
    return f", not read: {states['not read']}" if states["not read"] else ""


def explain_target(project: Project, target: Target) -> None:
    """Print each value of a target, and where it comes from."""
    from imagebuild.core.console import print_table
    from imagebuild.project.explain import explain

    print_table(("value of the target", "is", "because of"), list(explain(project, target)), whole=["because of"])


def divide_targets(
    renderer: Renderer, targets: Sequence[Target], builders: int, folder: Path, json_file: str | None
) -> None:
    """Print which builder would build which targets. `folder` may contain the results of earlier builds."""
    from imagebuild.build.builders import division_of, print_division
    from imagebuild.build.impact import ProjectState

    division = division_of(ProjectState(renderer, targets).builds(), folder, builders)
    options.print_result(json_file, division.summary, lambda: print_division(division))


def write_osv(file: str | None) -> bool:
    """Write all advisories to a file, in the format of OSV. None: write nothing. Return whether they were printed."""
    from imagebuild.core.advisory import advisories, osv

    if file:
        options.print_or_write(json.dumps([osv(each) for each in advisories()], indent=1) + "\n", file)
    return file == options.STDOUT


def check_advisories(targets: Sequence[Target], waived: Sequence[str], *, whole: bool = False) -> None:
    """Print the advisories about versions in the targets. `waived` contains texts `ID=REASON`.

    Raises ConfigError for an advisory that refuses a version, unless it is waived."""
    from imagebuild.core.advisory import advisories
    from imagebuild.project.plan import known_faults

    reasons = {text.partition("=")[0]: text.partition("=")[2].strip() for text in waived}
    known = {advisory.id for advisory in advisories()}
    for name, reason in reasons.items():
        if name not in known or not reason:
            hint = f"did you mean {near!r}?" if (near := nearest(name, known)) else "`plan --osv -` lists all"
            problem = "write the reason as ID=REASON" if name in known else f"unknown advisory; {hint}"
            raise ConfigError(f"--waive {name!r}: {problem}")
    for advisory, ids in known_faults(targets):
        if advisory.severity == "refuse" and not advisory.only_if and advisory.id not in reasons:
            raise ConfigError(f"{ids[0]}: {advisory}; or add --waive '{advisory.id}=REASON'")
    options.name_advisories(targets, whole=whole)


@options.command()
def render(
    project: options.ProjectFiles, edits: options.ImageChanges, select: tuple[str, ...], unresolved: bool,
    purpose: Literal["standalone"] | None, output: str | None, lock: bool,
) -> None:  # fmt: skip
    from imagebuild.project.lockfile import check_pinned
    from imagebuild.project.select import select_one

    workspace = project.open(edits.parse(), output, select=select)
    chosen = select_one(workspace.plan, *select)
    edits.check_base([chosen], pinned=False)
    workspace = workspace.locked([chosen], wanted=lock)
    words = (*project.words, *(("--for", purpose) if purpose else ()))
    warning, sources = "", [owned.source for owned in workspace.renderer.recipe(chosen).sources]
    try:
        check_pinned(workspace.project.lock, sources, workspace.project.changes.lock_command(chosen.id))
    except ConfigError as error:
        if not unresolved:
            raise ConfigError(f"{error}\n  or print the Dockerfile with --unresolved, only to read it") from None
        warning = f"# This cannot be built yet. {str(error).splitlines()[0].rstrip(':')}.\n"
    text = workspace.renderer.dockerfile(chosen, words).text
    options.print_or_write(warning + (SECRET_MOUNT.sub("", text) if purpose else text), output)


@options.command()
def impact(
    project: options.ProjectFiles, edits: options.PlanChanges, before: str, select: tuple[str, ...], after: str | None,
    markdown: bool, platforms: tuple[str, ...], base: Literal["bootstrap", "registry"], json_file: str | None,
) -> None:  # fmt: skip
    from imagebuild.build.impact import predict_impact, print_impact

    if markdown and json_file == options.STDOUT:
        raise ConfigError("--markdown: cannot be combined with --json -; write the JSON to a file")
    if not after and (both := re.fullmatch(r"(.*[^./])(\.{2,3})([^./].*)?", before)) and not Path(before).exists():
        if both[2] == "...":
            raise ConfigError(f"{before}: compares with a common ancestor; write two revisions as A..B")
        before, after = both[1], both[3]
    try:
        result = predict_impact(
            project.folder, before, after, changes=edits.parse(), select=select,
            platforms=options.parse_platforms(platforms), base=base,
        )  # fmt: skip
    except NothingSelected as error:
        raise NothingSelected(f"{error}; if you mean a revision, write {before}..REVISION") from None
    options.print_result(json_file, result, lambda: print_impact(result, markdown=markdown))


@options.command()
def ci_matrix(
    project: options.ProjectFiles, edits: options.PlanChanges, signers: options.TrustOptions,
    select: tuple[str, ...], since: str | None, unpublished: bool, registry: str | None, max_jobs: int,
    platforms: tuple[str, ...], rendered: Path | None,
) -> None:  # fmt: skip
    from imagebuild.build.impact import changed_since, print_matrix, read_state
    from imagebuild.core.console import UNSIGNED, err, styled

    trust = signers.trusted()
    if trust and not unpublished:
        raise ConfigError("--key, --certificate-identity and --no-tlog: need --unpublished; add --unpublished")
    if since is not None and unpublished:
        raise ConfigError("--changed-since: cannot be combined with --unpublished; leave out one of them")
    changes = edits.parse(registry)
    # The old state uses the image names in its matrix, so --registry would make every target differ.
    state = read_state(
        project.folder, changes if unpublished else edits.parse(), select, options.parse_platforms(platforms)
    )
    targets = state.targets
    if since is not None:
        targets = changed_since(since, project.folder, state)
        err.print(f"{len(targets)} of {len(state.targets)} targets differ from {since}")
    if unpublished:
        from imagebuild.oci.registry import connect_registry
        from imagebuild.publish.publish import unpublished_targets

        targets = unpublished_targets(state.renderer, state.targets, cache(connect_registry), trust)
        what = "are not published in their current state"
        err.print(f"{len(targets)} of {len(state.targets)} targets {what}")
        if not trust:
            err.print(styled(*UNSIGNED))
    if rendered:
        from imagebuild.core.files import write_text
        from imagebuild.publish.decide import hashes_of

        write_text(rendered, hashes_of(state.renderer, targets).model_dump_json(), named=True)
    print_matrix(state, targets, max_jobs)
