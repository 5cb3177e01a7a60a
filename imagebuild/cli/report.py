"""The commands `imagebuild report` and `imagebuild limits`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagebuild.cli import options
from imagebuild.core.console import out, print_table
from imagebuild.core.errors import ConfigError, Mistakes, plural

if TYPE_CHECKING:
    from imagebuild.bench.ceilings import RankLayout
    from imagebuild.bench.profiles import Profile


@options.command()
def report(
    files: tuple[Path, ...], profile: str | None, profiles: Path | None, baseline: Path | None, ranks: int | None,
    nodes: int | None, gpus: int | None, domains: int | None, collective: str | None, least: float | None,
    algorithm: str | None, allow: tuple[str, ...], allowed_loss: float | None, json_file: str | None,
    junit: Path | None, html: Path | None, markdown: bool,
) -> None:  # fmt: skip
    from imagebuild.bench.judge import Expected
    from imagebuild.report.report import make_report
    from imagebuild.report.text import print_report, report_markdown

    algorithms = () if algorithm is None else (algorithm,)
    expected = Expected(ranks, nodes, algorithms, least, gpus, domains, collective)
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
        outputs=outputs, allowed_loss=allowed_loss,
    )  # fmt: skip

    def show() -> None:
        if markdown:
            out.file.write(report_markdown(result))
        elif not printed:
            print_report(result)

    options.print_result(json_file, result, show, result.exit_status)


@options.command()
def limits(
    profile: str | None, nodes: int | None, gpus: int | None, domains: int | None, check: bool, profiles: Path | None,
    json_file: str | None,
) -> None:  # fmt: skip
    from imagebuild.bench.ceilings import limit_layout, limit_rows, lint_profile
    from imagebuild.bench.profiles import find_profile, load_profiles

    known = load_profiles(*options.data_folders(profiles, "profiles"))
    chosen = known if profile is None else {profile: find_profile(known, profile)}
    for option, value in {"--nodes": nodes, "--gpus": gpus, "--domains": domains}.items():
        if value is not None and (check or profile is None):
            remedy = f"name a profile, or leave out {option}"
            raise ConfigError(f"{option}: needs a PROFILE and cannot be combined with --check; {remedy}")
    if check:
        mistakes = Mistakes()
        for document in chosen.values():
            lint_profile(document, mistakes)
        found = list(dict.fromkeys(mistakes.texts))
        verdict = f"{plural(len(chosen), 'profile')}: every reference is below its ceiling."
        options.print_result(json_file, found, lambda: out.print("\n".join(found) or verdict), bool(found))
    elif profile is None:
        titles = [{"profile": name, "title": document.model.title} for name, document in known.items()]
        rows = [tuple(row.values()) for row in titles]
        options.print_result(json_file, titles, lambda: print_table(("profile", "what it is"), rows))
    else:
        hardware = chosen[profile].model
        scale = limit_layout(hardware, nodes, gpus, domains)
        table = limit_rows(hardware, *scale)
        options.print_result(json_file, table, lambda: _show(hardware, *scale, table))


def _show(profile: Profile, ranks: int, nodes: int, layout: RankLayout, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rates with their sources, and a table of limits with their derivations, each ceiling only once."""
    from jinja2 import Template

    head = Template(Path(__file__).with_name("limits.txt.j2").read_text(encoding="utf-8"), trim_blocks=True)
    values = {"profile": profile, "ranks": ranks, "nodes": nodes, "layout": layout, "each": ranks // layout.domains}
    out.print(head.render(values, plural=plural))
    cells, shown = [], None
    for row in rows:
        ceiling, rate = row["ceiling"], row["rate"]
        least = f"{ceiling:.1f}{' *' * row['hardest']}" if ceiling else ""
        derived = f"{row['formula']} = {row['derivation']}" if row["derivation"] else row["formula"]
        head = (row["test"], row["algorithm"], least, derived)
        share = f"{rate / ceiling:.0%}" if rate and ceiling else ""
        measured = (f"{rate:g}", share, f"{row['source']}, {row['date']}") if rate else ("", "", "")
        cells.append((*(("",) * 4 if head == shown else head), *measured))
        shown = head
    print_table(("test", "algorithm", "ceiling GB/s", "formula", "measured GB/s", "of ceiling", "source"), cells)
    if layout.domains > 1 and layout.network is None:
        out.print("The profile does not describe the network between these nodes.")
    out.print("\n* the physical limit of the test: a speed above it is a measurement error")
