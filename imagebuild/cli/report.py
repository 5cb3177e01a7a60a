"""The commands `imagebuild report` and `imagebuild limits`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from imagebuild.cli import options
from imagebuild.core.errors import ConfigError, plural

if TYPE_CHECKING:
    from imagebuild.bench.profiles import Profile

COUNT = options.IntRange(min=1, max=1_000_000)
"""The type of a number of ranks or hosts."""


@options.command(
    "imagebuild report all_reduce.log --profile h200 --algorithm ring",
    "imagebuild report logs/ --baseline last-week.json --junit report.xml --json report.json",
    "imagebuild report verify.json logs/ --html report.html",
)
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=options.PATH,
    help="Benchmark logs or JSON, results of verify, or reports, also gzipped or in folders. `-` is standard input.",
)
@options.profile
@options.profiles
@click.option(
    "--baseline",
    metavar="FILE",
    type=options.PATH,
    help="Earlier report to compare with. A result that became slower is a failure.",
)
@click.option("--ranks", metavar="NUMBER", type=COUNT, help="Number of ranks that every run must have.")
@click.option("--nodes", metavar="NUMBER", type=COUNT, help="Number of hosts that every run must have.")
@click.option(
    "--min-bw",
    "least",
    metavar="GB/S",
    type=options.FloatRange(min=0),
    help="Minimum bus bandwidth that the fastest message size of 1 GiB or more must reach.",
)
@click.option("--algorithm", metavar="NAME", help="NCCL algorithm that the run was forced to use, such as ring.")
@click.option(
    "--allow",
    metavar="unvalidated|partial|unjudged",
    multiple=True,
    help="Accept data that was not compared (unvalidated), missing GPUs (partial), or speeds that were not judged "
    "(unjudged). Can be repeated.",
)
@options.json_file
@click.option("--junit", metavar="FILE|-", type=options.FILE, help="Write JUnit XML, which CI systems display.")
@click.option("--html", metavar="FILE|-", type=options.FILE, help="Write a page with charts.")
@options.markdown
def report(
    files: tuple[Path, ...],
    profile: str | None,
    profiles: Path | None,
    baseline: Path | None,
    ranks: int | None,
    nodes: int | None,
    least: float | None,
    algorithm: str | None,
    allow: tuple[str, ...],
    json_file: str | None,
    junit: Path | None,
    html: Path | None,
    markdown: bool,
) -> None:
    """Judge the results of benchmarks and checks: are they right, complete and fast enough?

    Exit status 0: nothing failed, and everything that the options ask for was judged; 1: something failed or was not
    judged; 2: the input is wrong; 5: no file could be read."""
    from imagebuild.bench.judge import Expected
    from imagebuild.core.console import out
    from imagebuild.report.report import make_report
    from imagebuild.report.text import print_report, report_markdown

    expected = Expected(ranks, nodes, () if algorithm is None else (algorithm,), least)
    if profiles and profile is None:
        raise ConfigError(f"--profiles {profiles}: needs --profile; name a profile with --profile")
    folders = options.data_folders(profiles, "profiles")
    outputs = {"--json": Path(json_file) if json_file is not None else None, "--junit": junit, "--html": html}
    printed = Path(options.STDOUT) in outputs.values()
    if markdown and printed:
        problem = "--json, --junit or --html uses the standard output; replace its `-` by a file name"
        raise ConfigError(f"--markdown: {problem}")
    result = make_report(
        files, profile=profile, profiles=folders, baseline=baseline, expected=expected, allowed=allow,
        outputs=outputs,
    )  # fmt: skip

    def show() -> None:
        if markdown:
            out.file.write(report_markdown(result))
        elif not printed:
            print_report(result)

    options.print_result(json_file, result, show)
    if result.exit_status:
        sys.exit(result.exit_status)


@options.command(
    "imagebuild limits",
    "imagebuild limits h100 --nodes 4",
    "imagebuild limits --check      # for CI: is every reference below its ceiling?",
)
@click.argument(
    "profile",
    metavar="[PROFILE]",
    required=False,
    help="Hardware profile: the name of a file in profiles/. Without a name, all profiles are listed.",
    shell_complete=options.names_of("profiles"),
)
@click.option("--nodes", metavar="NUMBER", type=COUNT, help="Number of hosts. Default: the hosts of one NVLink domain.")
@click.option(
    "--check",
    is_flag=True,
    help="Check that every measured speed in the profiles is below its ceiling. Exit status 1 if a speed is not.",
)
@options.profiles
@options.json_file
def limits(profile: str | None, nodes: int | None, check: bool, profiles: Path | None, json_file: str | None) -> None:
    """Print the best speeds that hardware can reach, and the speeds measured on it."""
    from imagebuild.bench.ceilings import limit_rows, lint_profile
    from imagebuild.bench.profiles import find_profile, load_profiles
    from imagebuild.core.console import out, print_table
    from imagebuild.core.errors import Mistakes

    known = load_profiles(*options.data_folders(profiles, "profiles"))
    chosen = known if profile is None else {profile: find_profile(known, profile)}
    if nodes is not None and (check or profile is None):
        raise ConfigError(
            "--nodes: needs a PROFILE and cannot be combined with --check; name a profile, or leave out --nodes"
        )
    if check:
        mistakes = Mistakes()
        for document in chosen.values():
            lint_profile(document, mistakes)
        found = list(dict.fromkeys(mistakes.texts))
        verdict = f"{plural(len(chosen), 'profile')}: every reference is below its ceiling."
        options.print_result(json_file, found, lambda: out.print("\n".join(found) or verdict))
        if found:
            sys.exit(1)
    elif profile is None:
        titles = [{"profile": name, "title": document.model.title} for name, document in known.items()]
        rows = [tuple(row.values()) for row in titles]
        options.print_result(json_file, titles, lambda: print_table(("profile", "what it is"), rows))
    else:
        table = limit_rows(chosen[profile].model, nodes)
        options.print_result(json_file, table, lambda: _show(chosen[profile].model, nodes, table))


def _show(profile: Profile, nodes: int | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of limits. If consecutive rows have the same ceiling, only the first row shows the ceiling."""
    from imagebuild.bench.ceilings import rank_layout
    from imagebuild.core.console import out, print_table

    nodes = nodes or profile.hosts_per_domain
    ranks = nodes * profile.node.gpus
    layout = rank_layout(profile, ranks, nodes)
    network = f"; W = {layout.network:g} GB/s for the network of one domain" if layout.network else ""
    out.print(
        f"{profile.title}: {plural(ranks, 'rank')} on {plural(nodes, 'node')}\n"
        f"n = {ranks} ranks, k = {plural(layout.domains, 'NVLink domain')}, g = {ranks // layout.domains} ranks each; "
        f"link = {layout.link:g} GB/s one way{network}\n",
    )
    lines, shown = [], None
    for row in rows:
        ceiling, rate = row["ceiling"], row["rate"]
        least = f"{ceiling:.1f}{' *' * row['hardest']}" if ceiling else ""
        head = (row["test"], row["algorithm"], least, row["formula"])
        share = f"{rate / ceiling:.0%}" if rate and ceiling else ""
        measured = (f"{rate:g}", share, f"{row['source']}, {row['date']}") if rate else ("", "", "")
        lines.append((*(("",) * 4 if head == shown else head), *measured))
        shown = head
    print_table(("test", "algorithm", "ceiling GB/s", "formula", "measured GB/s", "of ceiling", "source"), lines)
    if layout.domains > 1 and layout.network is None:
        out.print("The profile does not describe the network between these nodes.")
    out.print("\n* the physical limit of the test: a speed above it is a measurement error")
