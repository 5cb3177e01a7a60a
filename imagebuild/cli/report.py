"""Run `imagebuild report` and `imagebuild limits`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from imagebuild.cli import options
from imagebuild.cli.options import argument, option
from imagebuild.core.errors import ConfigError, plural

if TYPE_CHECKING:
    from imagebuild.bench.ceilings import LimitRow, LimitTable
    from imagebuild.bench.profiles import Measured, Profiles

MOST = 1_000_000
"""Highest number of ranks or hosts that is accepted."""


@options.example(
    "imagebuild report all_reduce.log --profile h200 --algorithm ring",
    "imagebuild report logs/ --baseline last-week.json --junit report.xml --json report.json",
    "imagebuild report verify.json logs/ --html report.html",
)
def report(
    files: Annotated[
        list[Path],
        argument("FILE", "Logs or JSON of benchmarks, results of verify, reports, folders, gzip; `-` is stdin."),
    ],
    profile: options.ProfileOption = None,
    profiles: options.ProfilesOption = None,
    baseline: Annotated[
        Path | None, option("--baseline FILE", "Earlier report as JSON; what became slower since then fails.")
    ] = None,
    ranks: Annotated[int | None, option("--ranks NUMBER", "Ranks that every run should have.", min=1, max=MOST)] = None,
    nodes: Annotated[int | None, option("--nodes NUMBER", "Hosts that every run should have.", min=1, max=MOST)] = None,
    least: Annotated[
        float | None, option("--min-bw GB/S", "Bus bandwidth that the best size of 1 GiB or more must reach.", min=0)
    ] = None,
    algorithm: Annotated[
        str | None, option("--algorithm NAME", "Class of algorithms that NCCL was made to use, such as ring.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        option("--allow unvalidated|partial|unjudged", "Accept uncompared data, missing GPUs, or unjudged speed."),
    ] = None,
    json_file: options.JsonOption = None,
    junit: Annotated[Path | None, option("--junit FILE|-", "Write JUnit XML, which CI systems show.")] = None,
    html: Annotated[Path | None, option("--html FILE|-", "Write a page with charts.")] = None,
    markdown: options.MarkdownOption = False,
) -> None:
    """Say what benchmarks and checks measured, and whether it is right and fast enough.

    Exit status 0: nothing failed, and all that was asked for was judged; 1: otherwise; 2: the input is wrong;
    5: nothing could be read.
    """
    from imagebuild.bench.judge import Expected
    from imagebuild.core.console import out
    from imagebuild.report.report import ReportRequest, make_report
    from imagebuild.report.text import print_report, report_markdown

    expected = Expected(ranks, nodes, () if algorithm is None else (algorithm,), least)
    if profiles and profile is None:
        raise ConfigError(f"--profiles {profiles}: name a profile with --profile")
    folders = options.data_folders(profiles, "profiles")
    outputs = Path(json_file) if json_file is not None else None, junit, html
    printed = Path(options.STDOUT) in outputs
    if markdown and printed:
        raise ConfigError("--markdown: --json, --junit or --html has the standard output; name a file there")
    request = ReportRequest(tuple(files), profile, folders, baseline, expected, tuple(allow or ()), *outputs)
    result = make_report(request)

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
    profile: Annotated[
        str | None,
        argument(
            "PROFILE",
            "Hardware, a file of profiles/; without a name, all profiles are listed.",
            autocompletion=options.completed("profiles"),
        ),
    ] = None,
    nodes: Annotated[
        int | None, option("--nodes NUMBER", "Hosts; by default those of one NVLink domain.", min=1, max=MOST)
    ] = None,
    check: options.CheckOption = False,
    profiles: options.ProfilesOption = None,
    json_file: options.JsonOption = None,
) -> None:
    """Show what hardware can do at best, and what was measured on it."""
    from imagebuild.bench.ceilings import limit_table
    from imagebuild.bench.profiles import find_profile, load_profiles
    from imagebuild.core.console import out, print_table

    known = load_profiles(*options.data_folders(profiles, "profiles"))
    if check and nodes is not None:
        raise ConfigError("--nodes: is not for --check, which looks at all references")
    if check:
        checked = {profile: find_profile(known, profile)} if profile is not None else known
        mistakes = _mistakes_in(checked)
        verdict = f"{plural(len(checked), 'profile')}: every reference is below its ceiling."
        shown = "\n".join(mistakes) or verdict
        options.print_result(json_file, mistakes, lambda: out.print(shown, markup=False))
        if mistakes:
            raise typer.Exit(1)
    elif profile is not None:
        table = limit_table(find_profile(known, profile).model, nodes)
        options.print_result(json_file, table, lambda: _show(table))
    elif nodes is not None:
        raise ConfigError("--nodes: name a profile, too")
    else:
        titles = {name: document.model.title for name, document in known.items()}
        options.print_result(
            json_file,
            lambda: json.dumps([{"profile": name, "title": title} for name, title in titles.items()], indent=1),
            lambda: print_table(("profile", "what it is"), list(titles.items())),
        )


def _mistakes_in(profiles: Profiles) -> list[str]:
    """Return the mistakes in references, such as one above its ceiling; each once."""
    from imagebuild.bench.ceilings import lint_profile
    from imagebuild.core.errors import Mistakes

    mistakes = Mistakes()
    for document in profiles.values():
        lint_profile(document, mistakes)
    return list(dict.fromkeys(mistakes.texts))


def _show(table: LimitTable) -> None:
    from imagebuild.core.console import out, print_table

    network = f"; W = {table.network_gb_s:g} GB/s for the network of one domain" if table.network_gb_s else ""
    out.print(f"{table.title}: {plural(table.ranks, 'rank')} on {plural(table.nodes, 'node')}", markup=False)
    out.print(
        f"n = {table.ranks} ranks, k = {plural(table.domains, 'NVLink domain')}, g = {table.ranks // table.domains} "
        f"ranks each; link = {table.link_gb_s:g} GB/s one way{network}\n",
        markup=False,
    )
    columns = ("collective", "algorithm", "ceiling GB/s", "formula", "measured GB/s", "of ceiling", "source")
    print_table(columns, [line for row in table.rows for line in _lines(row)])
    if table.domains > 1 and not table.rows:
        out.print("Nothing is known about the network between these nodes.")
    out.print("\n* the hard ceiling of the collective: what is measured above it is a mistake", markup=False)
    copies = [(", ".join(c.tests), f"{c.rate:g} GB/s", f"{c.tolerance:.0%}", _cite(c)) for c in table.copies]
    wires = [
        (f"{', '.join(w.tests)}, {w.memory} memory", f"{w.rate * 8:g} Gb/s", f"{w.tolerance:.0%}", _cite(w))
        for w in table.wires
    ]
    if copies or wires:
        out.print()
        print_table(("one copy or card", "measured", "passes from", "source"), [*copies, *wires])


def _lines(row: LimitRow) -> list[tuple[str, ...]]:
    """Return the lines of a ceiling: one for each measurement below it, or one alone."""
    head = (row.collective, row.algorithm, f"{row.ceiling_gb_s:.1f}{' *' if row.hardest else ''}", row.formula)
    if not row.references:
        return [(*head, "", "", "")]
    first, *rest = [(f"{r.rate:g}", f"{r.rate / row.ceiling_gb_s:.0%}", _cite(r)) for r in row.references]
    return [(*head, *first), *(("", "", "", "", *more) for more in rest)]


def _cite(measured: Measured) -> str:
    return f"{measured.source}, {measured.date}"
