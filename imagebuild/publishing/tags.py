"""The tags of a target, with the commit that was built. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from imagebuild.naming import REVISION, REVISION_DIGITS

DIRTY = "-dirty"


def revision(revisions: Mapping[str, Iterable[str | None]], *, allow_dirty: bool) -> tuple[str, str]:
    """What `{revision}` stands for, and why it stands for nothing: one of both is empty.

    `revisions` are those of the builds of each platform. With `allow_dirty`, what no commit says gets `-dirty` behind
    the commit, so that the tag admits it.
    """
    every = [found for of_platform in revisions.values() for found in of_platform]
    known = sorted({found.removesuffix(DIRTY) for found in every if found})
    if not known or None in every:
        return "", "a build does not say of which commit it is; build it in a git repository"
    dirty = any(found.endswith(DIRTY) for found in every if found)
    if dirty and not allow_dirty:
        return "", f"built from files that differ from commit {known[0][:12]}; commit them, or say --allow-dirty"
    if len(known) > 1 and not allow_dirty:
        listed = ", ".join(f"{platform} from {_short(found)}" for platform, found in sorted(revisions.items()))
        return "", f"its builds are of different commits: {listed}; build them again, or say --allow-dirty"
    return known[0][:REVISION_DIGITS] + (DIRTY if dirty or len(known) > 1 else ""), ""


def filled(
    templates: Sequence[str], revisions: Mapping[str, Iterable[str | None]], *, allow_dirty: bool
) -> tuple[tuple[str, ...], str]:
    """The tags, and why they cannot be given."""
    if not any(REVISION in template for template in templates):
        return tuple(templates), ""
    found, why = revision(revisions, allow_dirty=allow_dirty)
    return tuple(template.replace(REVISION, found) for template in templates), why


def _short(revisions: Iterable[str | None]) -> str:
    return " and ".join(sorted({found[:12] for found in revisions if found}))
