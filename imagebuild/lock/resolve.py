"""The lock of a project: pin sources, update entries, and compare the entries with the servers of the sources."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

import yaml

from imagebuild import __version__
from imagebuild.core import settings
from imagebuild.core.console import Progress, format_size, out, print_table, redacted_text
from imagebuild.core.errors import Absent, CommandError, ConfigError, ImagebuildError, Unreachable, plural, suggestion
from imagebuild.core.fields import ARCHS, Arch, Model, Platform
from imagebuild.core.files import write_text
from imagebuild.core.http import Advance
from imagebuild.core.patterns import data_of
from imagebuild.core.run import for_each
from imagebuild.lock import repositories
from imagebuild.lock.distribution import ReleasePackages, archive_of, installed_packages, package_name
from imagebuild.lock.report import write_report
from imagebuild.lock.upstream import Upstream
from imagebuild.oci.reference import parse_reference
from imagebuild.project.load import LOCK
from imagebuild.project.lockfile import (
    KINDS,
    UNREAD,
    Archive,
    BaseImage,
    Entry,
    GitRef,
    Key,
    Lock,
    LockedArchive,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    WheelSet,
    describe_key,
    key_of,
    lacks,
    source_title,
)
from imagebuild.project.plan import Target
from imagebuild.project.project import Project
from imagebuild.render.recipe import OwnedSource, Recipe
from imagebuild.render.renderer import Renderer

R = TypeVar("R")
S = TypeVar("S", bound=Source)


def lock_text(lock: Lock) -> str:
    """Return the text of the lock file. It is sorted, so that diffs are small."""
    return json.dumps(lock.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1, sort_keys=True) + "\n"


def merged_sources(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Combine the sources with the same lock entry, and return one source for each entry.

    The source of a repository gets the packages of all targets. Git sources with a commit in the matrix are left out,
    because they need no entry. Raises ConfigError if two components give a repository different keys or suites."""
    merged: dict[Key, Source] = {}
    for source in sources:
        if isinstance(source, GitRef) and source.commit:
            continue
        first = merged.setdefault(key_of(source), source)
        if isinstance(source, BaseImage) and source.facts:
            merged[key_of(source)] = source
        if isinstance(source, PackageSource) and isinstance(first, PackageSource):
            if (first.suite, first.key) != (source.suite, source.key):
                raise ConfigError(
                    f"{source.url}: one component has suite {first.suite!r} and key {first.key}, "
                    f"another suite {source.suite!r} and key {source.key}; use the same in both components"
                )
            packages = tuple(sorted({*first.packages, *source.packages}))
            archs = tuple(sorted({*first.archs, *source.archs}))
            releases = tuple(sorted({*first.releases, *source.releases}))
            merged[key_of(source)] = replace(source, packages=packages, archs=archs, releases=releases)
    return tuple(merged.values())


def without_unused(lock: Lock, sources: Iterable[Source]) -> Lock:
    """Return a copy of the lock without unused entries and without unused packages of repositories."""
    tables: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
    for source in sources:
        (kind, name), entry = key_of(source), lock.entry(key_of(source))
        if isinstance(source, PackageSource) and isinstance(entry, LockedRepository):
            used = {package: version for package, version in entry.packages.items() if package in source.packages}
            entry = entry.model_copy(update={"packages": used})
        if entry is not None:
            tables[kind][name] = entry
    return lock.model_copy(update=tables)


def address_of(key: Key) -> str:
    """Return the URL, image or component in the key of a lock entry, without the git tag or version."""
    return key[1].partition(" ")[0]


def keys_of(project: Project, names: Iterable[str], sources: Iterable[OwnedSource]) -> frozenset[Key]:
    """Return the keys of the entries that belong to `names`.

    A name is a component, pin, base, image or URL, or a shell pattern for these. The name of an image stands for the
    image that it starts from, unless a component has the same name. Raises ConfigError for an unknown name."""
    known: defaultdict[str, set[Key]] = defaultdict(set)
    for owner, source in dict.fromkeys((owned.owner, owned.source) for owned in sources):
        key = key_of(source)
        known[address_of(key)].add(key)
        if owner not in project.components:
            known[owner].add(key)
        elif not isinstance(source, BaseImage):
            for name in (owner, project.components[owner].model.pin or owner):
                known[name].add(key)
    found = {name: [key for other in known if fnmatchcase(other, name) for key in known[other]] for name in names}
    for name, keys in found.items():
        if not keys:
            near = suggestion(name, {other for other in known if ("/" in other) == ("/" in name)})
            raise ConfigError(f"{name}: no source belongs to this component, pin, base, image or URL{near}")
    return frozenset(chain.from_iterable(found.values()))


def describe_entry(entry: Entry) -> str:
    """Return a short text about a lock entry, such as the first digits of its hash."""
    match entry:
        case str(pin) | LockedImage(digest=pin) | LockedArchive(sha256=pin):
            return pin.removeprefix("sha256:")[:12]
        case LockedRepository():
            return f"{len(entry.packages)} packages, key {entry.fingerprint[-16:]}"
        case wheels:
            return ", ".join(f"{wheel.name} {wheel.version}" for wheel in wheels)


def release_packages(
    renderer: Renderer, targets: Iterable[Target], platforms: Sequence[Platform]
) -> Iterator[ReleasePackages]:
    """Yield the packages that targets and their build stages install from the archives of distributions, for each
    release and architecture. Without `platforms`, for all platforms of the targets."""
    bases = renderer.project.matrix.model.bases
    read = cache(lambda text: tuple(installed_packages(text)))
    owners: dict[tuple[str, Arch], dict[str, str]] = {}
    for target in targets:
        recipe = renderer.recipe(target)
        final = renderer.dockerfile(target).text.rpartition("\nFROM ")[2]
        places = [(target.image, target.axes["os"], final, [part.repository for part in recipe.components])]
        places += [(s.name, s.values["os"], renderer.stage(target, s), [s.packages]) for s in recipe.stages]
        named = {package: part.name for part in recipe.components for package in part.packages}
        for name, release, text, pinned in places:
            others = {package_name(package) for each in pinned if each for package in each.packages}
            wanted = {p: named.get(p, name) for p in read(text) if package_name(p) not in others}
            for arch in ARCHS:
                if f"linux/{arch}" in {*target.platforms} & {*(platforms or target.platforms)} and wanted:
                    owners.setdefault((release, arch), {}).update(wanted)
    for (release, arch), packages in owners.items():
        archive = archive_of(bases[release], arch)
        place = archive.suites[0] if archive else bases[release].image
        owned = tuple(sorted(packages.items()))
        yield ReleasePackages(
            f"{place} {arch}", release, "", tuple(sorted(packages)), (arch,), (release,), archive, owned
        )


# Asking


def ask_each(
    sources: Iterable[S], ask: Callable[[S, Advance], R], upstream: Upstream,
    settle: Callable[[S, R | ImagebuildError], tuple[str, bool]],
) -> None:  # fmt: skip
    """Call `ask` for each source in parallel threads, and show the progress.

    `settle` is called with each answer or error, one at a time. It returns the text to show, and whether the answer is
    good. Ctrl-C or an unexpected error stops all threads, but the effects of `settle` so far stay."""
    turn = threading.Lock()

    def work(source: S) -> None:
        name = source_title(source)
        progress.begin(name, name)
        try:
            try:
                answer: R | ImagebuildError = ask(
                    source, lambda done, total: progress.advance(name, f"{format_size(done)} of {format_size(total)}")
                )
            except ImagebuildError as error:
                answer = error
            with turn:
                if not upstream.stopped:
                    text, good = settle(source, answer)
                    progress.end(name, text, good=good)
        except BaseException:
            upstream.stop()
            raise

    with Progress() as progress:
        for_each(work, sources, upstream)


def network_upstream(ca: Path | None, *, isolated: bool = True) -> Upstream:
    """Return a client for the servers of sources, with the mirrors and passwords in the user's configuration.

    `ca` replaces the CA certificates of the machine. `isolated` says whether scripts of archives must run isolated.
    Raises ConfigError if the configuration or the certificates are wrong."""
    configured = settings.load_settings(os.environ)
    return Upstream(configured.mirrors, settings.ca_bundle(ca, os.environ), configured.netrc_file, isolated=isolated)


# Pinning


Failure = Literal["wrong", "lacks packages", "gone", "no answer"]
Failures = list[tuple[Failure, str, str]]
"""The kind, source and reason of each answer that could not be used."""


def complaint(failures: Failures) -> str:
    """Return a message with one line for each failure. Empty if there are no failures."""
    lines = [f"  {kind}: {name}: {reason}" for kind, name, reason in sorted(failures)]
    if silent := {server_of(name, reason) for kind, name, reason in failures if kind == "no answer"}:
        lines.append(f"servers that did not answer: {', '.join(sorted(silent))}")
    head = (
        "these sources could not be pinned, so their lock entries did not change, or lack packages; "
        "choose other versions in the matrix, or try again later:"
    )
    return "\n".join([head, *lines]) if lines else ""


def server_of(title: str, reason: str) -> str:
    """Return the server of a source that did not answer: the mirror or host in the reason or in the source's title."""
    if found := re.search(r"\(as \w+://([^/)]+)", reason) or re.search(r"://(?:[^/@]*@)?([^/]+)", title):
        return found[1]
    kind, _, name = title.partition(" ")
    return parse_reference(reason.partition(": ")[0] or name).host if kind == "image" else "the Python package index"


def failure(source: Source, error: ImagebuildError) -> tuple[Failure, str]:
    """Return the kind and the text of an error about a source. The text does not repeat the URL of the source."""
    kind: Failure = "gone" if isinstance(error, Absent) else "no answer" if isinstance(error, Unreachable) else "wrong"
    return kind, str(error).removeprefix(f"{address_of(key_of(source))}: ")


@dataclass(frozen=True)
class LockFile:
    """The lock of a project, with the sources that the selected targets need."""

    project: Project
    renderer: Renderer
    targets: tuple[Target, ...]
    today: date = field(default_factory=lambda: datetime.now(UTC).date())
    platforms: tuple[Platform, ...] = ()
    """Platforms for which sources are needed. If empty, sources for all platforms of the targets are needed."""

    @property
    def path(self) -> Path:
        return self.project.lock_file or self.project.root / LOCK

    @property
    def recipes(self) -> Iterator[Recipe]:
        """The recipe of each target: the parts and sources of its Dockerfile."""
        return map(self.renderer.recipe, self.targets)

    @cached_property
    def owned_sources(self) -> tuple[OwnedSource, ...]:
        """All sources that the targets need for the platforms, each with the component, base or image that needs it."""
        return tuple(chain.from_iterable(recipe.sources_for(self.platforms) for recipe in self.recipes))

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The sources that the targets need, one for each entry of the lock.
        Raises ConfigError as `merged_sources` does."""
        return merged_sources(owned.source for owned in self.owned_sources)

    @cached_property
    def release_packages(self) -> tuple[ReleasePackages, ...]:
        """The packages that the targets install from the archives of distributions, without a pin."""
        return tuple(release_packages(self.renderer, self.targets, self.platforms))

    @cached_property
    def lock(self) -> Lock:
        """The entries of the project, and those of the extended project that the targets need. `pin` changes them."""
        used = without_unused(self.project.lock, self.sources)
        return self.project.own_lock.over(used.model_copy(update={"date": used.date or self.today}))

    @property
    def unpinned(self) -> list[Source]:
        """The sources without a complete entry in the lock."""
        return [source for source in self.sources if lacks(self.lock, source)]

    def write(self, lock: Lock | None = None) -> None:
        """Write the lock file with the current entries, or with the entries of another lock."""
        lock, own = lock or self.lock, self.project.own_lock.images
        # The digest of --base-image is not from a server.
        base = (self.project.changes.base_image or "").partition("@")[0]
        images = {name: entry for name, entry in {**lock.images, **own}.items() if name in own or name != base}
        write_text(self.path, lock_text(lock.model_copy(update={"images": images}) if base else lock))

    def bring_up_to_date(
        self, upstream: Upstream, folder: Path, names: Collection[str] = (), *, whole: bool = False,
        say: Callable[[str], object] = out.print,
    ) -> None:  # fmt: skip
        """Pin what is missing or what belongs to `names`, look for packages of distributions, and write the report.

        The report is in `folder`. `whole`: see `complete`. Raises CommandError with all problems, after everything else
        was pinned."""
        failures: Failures = []
        try:
            failures += self.update(upstream, names) if names else self.complete(upstream, whole=whole)
            for kind, name, reason in self.unavailable(upstream):
                if kind == "no answer":
                    say(f"not checked: {name}: {reason}")
                else:
                    failures.append((kind, name, reason))
            unpinned, number = len(self.unpinned), len(self.sources)
            state = f"sources without a pin: {unpinned} of {number}" if unpinned else f"all {number} sources are pinned"
            say(f"{self.path}: {state}")
        finally:
            if failures or upstream.archives:
                ids = [target.id for target in self.targets]
                report = write_report(folder, failures, upstream.answered, upstream.archives, ids)
        if text := complaint(failures):
            raise CommandError(f"{text}\n{report} says what servers answered and what archives contain")

    def complete(self, upstream: Upstream, *, whole: bool) -> Failures:
        """Pin the sources without a pin. If the targets are the `whole` matrix, also remove unused entries."""
        failures = self.pin(self.unpinned, upstream)
        # After a failure, old entries may still be needed.
        if whole and not failures and (used := without_unused(self.lock, self.sources)) != self.lock:
            self.write(used)
        return failures

    def update(self, upstream: Upstream, names: Collection[str]) -> Failures:
        """Pin again the sources that belong to `names`, as in `keys_of`. Raises ConfigError for an unknown name."""
        keys = keys_of(self.project, names, self.owned_sources)
        return self.pin([source for source in self.sources if key_of(source) in keys], upstream, anew=True)

    def pin(self, sources: Iterable[Source], upstream: Upstream, *, anew: bool = False) -> Failures:
        """Ask the servers for the content of sources, and write the lock after each answer. Return the failures.

        After a failure, a source keeps its entry. With `anew`, existing entries are ignored, so that even a new key of
        a repository is accepted."""
        failures: Failures = []

        def ask(source: Source, advance: Advance) -> Entry:
            known = self.lock.entry(key_of(source))
            entry = upstream.resolve(source, None if anew else known, advance)
            if not (isinstance(source, PackageSource) and isinstance(known, LockedRepository)):
                return entry
            assert isinstance(entry, LockedRepository)
            # Targets that are not selected need other packages of the repository.
            asked = {repositories.name_of(package) for package in source.packages}
            packages = {name: version for name, version in known.packages.items() if name not in source.packages}
            candidates = {name: versions for name, versions in known.candidates.items() if name not in asked}
            merged = {"packages": packages | entry.packages, "candidates": candidates | entry.candidates}
            return entry.model_copy(update={**merged, "hashes": known.hashes})

        def settle(source: Source, answer: Entry | ImagebuildError) -> tuple[str, bool]:
            if isinstance(answer, ImagebuildError):
                kind, reason = failure(source, answer)
                failures.append((kind, source_title(source), reason))
                return kind, False
            # A missing package affects only the targets that need it, so the entry is written anyway.
            lacking = ""
            if isinstance(source, PackageSource) and isinstance(answer, LockedRepository):
                absent = [package for package in source.packages if package not in answer.packages]
                providers = upstream.providers.get(source.url, {})
                lacking = "; ".join(repositories.choose(answer.candidates, absent, providers)[1])
            if lacking:
                failures.append(("wrong", source_title(source), f"{lacking}; all other packages are pinned"))
            table, key = getattr(self.lock, key_of(source)[0]), key_of(source)[1]
            if table.get(key) != answer:
                table[key] = answer
                self.write()
            return describe_entry(answer), not lacking

        ask_each(sources, ask, upstream, settle)
        return failures

    def unavailable(self, upstream: Upstream) -> Failures:
        """Ask the archives of distributions for the packages that images install without a pin. Return the missing
        packages, and the archives that did not answer."""
        failures: Failures = []

        def settle(source: ReleasePackages, answer: list[str] | ImagebuildError) -> tuple[str, bool]:
            if isinstance(answer, ImagebuildError):
                kind, text = failure(source, answer)
                failures.append((kind, source_title(source), f"{text}; its packages were not checked"))
                return kind, False
            failures.extend(("lacks packages", source_title(source), text) for text in answer)
            return f"{plural(len(answer), 'package')} missing", not answer

        ask_each(self.release_packages, lambda wanted, _: upstream.unavailable(wanted), upstream, settle)
        return failures

    def shown(self, names: Collection[str]) -> str:
        """Return the lock entries that belong to `names` as YAML text.
        `keys_of` explains `names`. Raises ConfigError for an unknown name."""
        known = json.loads(lock_text(self.lock))
        entries = {
            describe_key((kind, name)): known[kind].get(name, "not in the lock")
            for kind, name in sorted(keys_of(self.project, names, self.owned_sources))
        }
        return yaml.safe_dump(entries, width=1000, sort_keys=False)


# Checking


State = Failure | Literal["not locked", "not read", "not used", "as locked"]


class SourceReport(Model):
    """The result of comparing one lock entry with the server of the source."""

    source: str
    state: State
    locked: str
    """Short text about the entry in imagebuild.lock. Empty if there is no entry."""
    found: str
    """Short text about the source on its server, or the error."""
    consequence: str
    """The consequence for a build, and the remedy. Empty if the source matches the lock."""


class LockReport(Model):
    """The result of a check of the lock, as `lock --check --json` writes it."""

    imagebuild: str
    """Version of imagebuild."""
    asked: datetime | None
    """Time at which the servers of the sources were asked. None if they were not asked."""
    targets: tuple[str, ...]
    sources: tuple[SourceReport, ...]

    @property
    def exit_status(self) -> int:
        """The exit status: 1 if a build would stop or an entry is unused, else 4 if a server did not answer, else 0."""
        states = {report.state for report in self.sources}
        return 1 if states - {"as locked", "no answer"} else 4 if "no answer" in states else 0


CONSEQUENCES: Mapping[State, str] = data_of(__file__)
"""Maps each state of a source to the consequence for a build, the worst state first."""


def check_lock(lock: LockFile, upstream: Upstream | None, *, whole: bool = False) -> LockReport:
    """Compare the lock with the sources that the targets need and, if `upstream` is not None, with the servers.

    No archives are downloaded and no images are pulled. If the targets are the `whole` matrix, unused entries in the
    project's own lock file are reported too."""
    reports: list[SourceReport] = []
    names = tuple(target.id for target in lock.targets)
    platforms = lock.platforms or tuple(dict.fromkeys(p for target in lock.targets for p in target.platforms))
    command = lock.project.changes.lock_command(*(() if whole else names[:3]))

    def add(state: State, key: Key, *found: str) -> None:
        entry = lock.lock.entry(key)
        reports.append(
            SourceReport(
                source=describe_key(key),
                state=state,
                locked=describe_entry(entry) if entry else "",
                found=redacted_text("; ".join(filter(None, found))),
                consequence=CONSEQUENCES[state].format(address=address_of(key), command=command),
            )
        )

    def settle(source: Source, answer: str | ImagebuildError) -> tuple[str, bool]:
        lacking = lacks(lock.lock, source)
        state: State = "not read" if lacking == UNREAD else "not locked" if lacking else "as locked"
        if isinstance(answer, ImagebuildError):
            state, answer = failure(source, answer)
        add(state, key_of(source), answer, lacking)
        return state, state == "as locked"

    def ask(source: Source, advance: Advance) -> str:
        assert upstream
        return probe(source, lock.lock.entry(key_of(source)), upstream, advance, platforms)

    if upstream:
        ask_each(lock.sources, ask, upstream, settle)
        lacking = lock.unavailable(upstream)
        for wanted in lock.release_packages:
            found = [(kind, text) for kind, title, text in lacking if title == source_title(wanted)]
            texts = [text for _, text in found] or [f"{plural(len(wanted.packages), 'package')} without a pin"]
            add(found[0][0] if found else "as locked", key_of(wanted), *texts)
    else:
        for source in lock.sources:
            settle(source, "")
    own = lock.project.own_lock if whole else Lock()
    used = without_unused(own, lock.sources)
    for key, entry in own.entries():
        if entry != (kept := used.entry(key)):
            unused = set(getattr(entry, "packages", ())) - set(getattr(kept, "packages", ()))
            add("not used", key, ", ".join(sorted(unused)))
    reports.sort(key=lambda row: ([*CONSEQUENCES].index(row.state), row.source))
    asked = datetime.now(UTC).replace(microsecond=0) if upstream else None
    return LockReport(imagebuild=__version__, asked=asked, targets=names, sources=tuple(reports))


def probe(
    source: Source, entry: Entry | None, upstream: Upstream, advance: Advance, platforms: Collection[Platform]
) -> str:
    """Compare a source on its server with the lock entry, and return a short text about the source.

    For an image, the pinned digest has to exist; its tag may have moved. Raises ImagebuildError if the source differs
    from the entry, is missing, or is not available for all platforms."""
    match source, entry:
        case Archive(url=url), _:
            size, known = upstream.web.length(url), getattr(entry, "size", None)
            if None not in (known, size) and size != known:
                raise CommandError(f"{url}: has {size} bytes, but the lock says {known}")
            return format_size(size) if size is not None else "exists, size unknown"
        case PackageSource(), _:
            return packages_there(source, entry if isinstance(entry, LockedRepository) else None, upstream)
        case WheelSet(), tuple():
            pinned = tuple(f"{wheel.name}=={wheel.version}" for wheel in entry)
            there = upstream.wheels(replace(source, requirements=pinned))
            if changed := ", ".join(wheel.name for wheel in entry if wheel not in there):
                raise CommandError(f"the index has different files for {changed}")
            return describe_entry(entry)
    now = upstream.resolve(source, entry, advance)
    if isinstance(entry, str) and now != entry:
        raise CommandError(f"upstream now has {describe_entry(now)}, but the lock has {describe_entry(entry)}")
    # An image for a single platform lists no platforms.
    of = now.platforms if isinstance(now, LockedImage) else {}
    if of and (lacking := set(platforms) - set(of)):
        raise CommandError(f"the image is for {', '.join(of)}, not for {', '.join(sorted(lacking))}")
    return describe_entry(now)


def packages_there(source: PackageSource, entry: LockedRepository | None, upstream: Upstream) -> str:
    """Compare a repository with its lock entry, and return a short text about the key and the packages on the server.
    Raises ConfigError if the key differs, or if a locked or required package is missing."""
    index = upstream.index(source)
    locked = entry.packages if entry else {}
    wanted = [f"{repositories.name_of(p)}={locked[p]}" if p in locked else p for p in source.packages]
    chosen, problems = repositories.choose(index.versions, wanted, index.providers)
    try:
        repositories.check_known(source.url, index, entry)
    except ConfigError as error:
        problems.insert(0, failure(source, error)[1])
    if problems:
        raise ConfigError(f"{source.url}: {'; '.join(problems)}")
    shown = [f"{repositories.name_of(package)} {version}" for package, version in chosen.items()]
    return f"signed by {', '.join(index.signed_by)}; {', '.join(shown)}"


def show_report(report: LockReport) -> None:
    """Print the sources that differ from the lock, and the consequences for a build."""
    shown = [row for row in report.sources if row.state != "as locked"]
    rows = [(row.state, row.source, row.found) for row in shown]
    if rows:
        print_table(("state", "source", "found"), rows)
    for (state, consequence), number in Counter((row.state, row.consequence) for row in report.sources).items():
        out.print(f"{state}: {number}{f'; {consequence}' if consequence else ''}")
    if report.asked is None:
        out.print("the servers of the sources were not asked")
