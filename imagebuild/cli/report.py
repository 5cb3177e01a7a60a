"""Run `imagebuild report` and `imagebuild limits`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imagebuild.cli import options
from imagebuild.cli.options import argument, option
from imagebuild.core.errors import ConfigError, plural

if TYPE_CHECKING:
    from imagebuild.bench.profiles import Profile

MOST = 1_000_000
"""Highest number of ranks or hosts that is accepted."""


@options.example(
    "imagebuild report all_reduce.log --profile h200 --algorithm ring",
    "imagebuild report logs/ --baseline last-week.json --junit report.xml --json report.json",
    "imagebuild report verify.json logs/ --html report.html",
)
def report(
    files: list[Path] = argument(
        "FILE", "Logs or JSON of benchmarks, results of verify, reports, folders, gzip; `-` is stdin."
    ),
    profile: options.ProfileOption = None,
    profiles: options.ProfilesOption = None,
    baseline: Path | None = option("--baseline FILE", "Earlier report; what became slower since then fails.", None),
    ranks: int | None = option("--ranks NUMBER", "Ranks that every run should have.", None, min=1, max=MOST),
    nodes: int | None = option("--nodes NUMBER", "Hosts that every run should have.", None, min=1, max=MOST),
    least: float | None = option(
        "--min-bw GB/S", "Bus bandwidth that the best size of 1 GiB or more must reach.", None, min=0
    ),
    algorithm: str | None = option("--algorithm NAME", "Algorithms that NCCL was made to use, such as ring.", None),
    allow: list[str] | None = option(
        "--allow unvalidated|partial|unjudged", "Accept uncompared data, missing GPUs, or unjudged speed.", None
    ),
    json_file: options.JsonOption = None,
    junit: Path | None = option("--junit FILE|-", "Write JUnit XML, which CI systems show.", None, dir_okay=False),
    html: Path | None = option("--html FILE|-", "Write a page with charts.", None, dir_okay=False),
    markdown: options.MarkdownOption = False,
) -> None:
    """Say what benchmarks and checks measured, and whether it is right and fast enough.

    Exit status 0: nothing failed, and all that was asked for was judged; 1: otherwise; 2: the input is wrong;
    5: nothing could be read.
    """
    from imagebuild.bench.judge import Expected
    from imagebuild.core.console import out
    from imagebuild.report.report import make_report
    from imagebuild.report.text import print_report, report_markdown

    expected = Expected(ranks, nodes, () if algorithm is None else (algorithm,), least)
    if profiles and profile is None:
        raise ConfigError(f"--profiles {profiles}: name a profile with --profile")
    folders = options.data_folders(profiles, "profiles")
    outputs = {"--json": Path(json_file) if json_file is not None else None, "--junit": junit, "--html": html}
    printed = Path(options.STDOUT) in outputs.values()
    if markdown and printed:
        raise ConfigError("--markdown: --json, --junit or --html has the standard output; name a file there")
    result = make_report(
        files, profile=profile, profiles=folders, baseline=baseline, expected=expected, allowed=allow or (),
        outputs=outputs,
    )  # fmt: skip

    def show() -> None:
        if markdown:
            out.file.write(report_markdown(result))
        elif not printed:
            print_report(result)

    options.print_result(json_file, result, show)
    if result.exit_status:
        raise typer.Exit(result.exit_status)


@options.example(
    "imagebuild limits",
    "imagebuild limits h100 --nodes 4",
    "imagebuild limits --check      # for CI: is every reference below its ceiling?",
)
def limits(
    profile: str | None = argument(
        "PROFILE", "Hardware, a file of profiles/; without a name, all profiles are listed.", None, completes="profiles"
    ),
    nodes: int | None = option("--nodes NUMBER", "Hosts; by default of one NVLink domain.", None, min=1, max=MOST),
    check: options.CheckOption = False,
    profiles: options.ProfilesOption = None,
    json_file: options.JsonOption = None,
) -> None:
    """Show what hardware can do at best, and what was measured on it."""
    from imagebuild.bench.ceilings import limit_rows, lint_profile
    from imagebuild.bench.profiles import find_profile, load_profiles
    from imagebuild.core.console import out, print_table
    from imagebuild.core.errors import Mistakes

    known = load_profiles(*options.data_folders(profiles, "profiles"))
    chosen = known if profile is None else {profile: find_profile(known, profile)}
    if nodes is not None and (check or profile is None):
        raise ConfigError("--nodes: name a profile, too; --check looks at all references")
    if check:
        mistakes = Mistakes()
        for document in chosen.values():
            lint_profile(document, mistakes)
        found = list(dict.fromkeys(mistakes.texts))
        verdict = f"{plural(len(chosen), 'profile')}: every reference is below its ceiling."
        options.print_result(json_file, found, lambda: out.print("\n".join(found) or verdict, markup=False))
        if found:
            raise typer.Exit(1)
    elif profile is None:
        titles = [{"profile": name, "title": document.model.title} for name, document in known.items()]
        rows = [tuple(row.values()) for row in titles]
        options.print_result(json_file, titles, lambda: print_table(("profile", "what it is"), rows))
    else:
        table = limit_rows(chosen[profile].model, nodes)
        options.print_result(json_file, table, lambda: _show(chosen[profile].model, nodes, table))


def _show(profile: Profile, nodes: int | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of limits, the head of each ceiling once."""
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
        markup=False,
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
        out.print("Nothing is known about the network between these nodes.")
    out.print("\n* the hard ceiling of the test: what is measured above it is a mistake", markup=False)
