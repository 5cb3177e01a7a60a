"""`imagebuild limits`: arguments and printing. What it prints is computed in `limits`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from imagebuild import console, limits, profiles
from imagebuild.config import Mistakes
from imagebuild.console import out
from imagebuild.errors import ConfigError

ProfilesOption = Annotated[Path, typer.Option("--profiles", metavar="DIR", help="Folder of the profiles.")]
DEFAULT_PROFILES = Path("profiles")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("limits")(limits_command)


def limits_command(
    profile: Annotated[str | None, typer.Argument(help="A profile; without one, all are listed.")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Hosts; by default those of one NVLink domain.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check that every reference is possible; exit status 1 if not.")
    ] = False,
    folder: ProfilesOption = DEFAULT_PROFILES,
) -> None:
    """Show what hardware can do at best, and what was measured on it."""
    known = profiles.load_profiles(folder)
    if check:
        _check(known, profile)
    elif profile is None:
        if nodes is not None:
            raise ConfigError("--nodes: name a profile too")
        _list(known, as_json=as_json)
    else:
        table = limits.table(profiles.find(known, profile).model, nodes)
        if as_json:
            out.print(table.model_dump_json(indent=1), markup=False)
        else:
            _show(table)


def _check(known: profiles.Profiles, name: str | None) -> None:
    chosen = {name: profiles.find(known, name)} if name else known
    mistakes = Mistakes()
    for document in chosen.values():
        limits.lint(document, mistakes)
    for text in dict.fromkeys(mistakes.texts):
        out.print(text, markup=False)
    if mistakes.texts:
        raise typer.Exit(1)
    out.print(f"{_count(len(chosen), 'profile')}: every reference is below its ceiling.")


def _list(known: profiles.Profiles, *, as_json: bool) -> None:
    if as_json:
        rows = [{"profile": name, "title": document.model.title} for name, document in known.items()]
        out.print(json.dumps(rows, indent=1), markup=False)
        return
    console.table(("profile", "what it is"), [(name, document.model.title) for name, document in known.items()])


def _show(table: limits.Table) -> None:
    network = f"; W = {table.network_gb_s:g} GB/s for the network of one domain" if table.network_gb_s else ""
    out.print(f"{table.title}: {_count(table.ranks, 'rank')} on {_count(table.nodes, 'node')}", markup=False)
    out.print(
        f"n = {table.ranks} ranks, k = {_count(table.domains, 'NVLink domain')}, g = {table.ranks // table.domains} "
        f"ranks each; link = {table.link_gb_s:g} GB/s one way{network}\n",
        markup=False,
    )
    columns = ("collective", "algorithm", "ceiling GB/s", "formula", "measured GB/s", "of ceiling", "source")
    console.table(columns, [line for row in table.rows for line in _lines(row)])
    if table.domains > 1 and not table.rows:
        out.print("Nothing is known about the network between these nodes.")
    out.print("\n* the hard ceiling of the collective: what is measured above it is a mistake", markup=False)
    others = [(", ".join(c.tests), f"{c.rate:g} GB/s", f"{c.tolerance:.0%}", _cited(c)) for c in table.copies]
    wires = [
        (f"{', '.join(w.tests)}, {w.memory} memory", f"{w.rate * 8:g} Gb/s", f"{w.tolerance:.0%}", _cited(w))
        for w in table.wires
    ]
    if others or wires:
        out.print()
        console.table(("one copy or card", "measured", "passes from", "source"), [*others, *wires])


def _lines(row: limits.Row) -> list[tuple[str, ...]]:
    head = (row.collective, row.algorithm, f"{row.ceiling_gb_s:.1f}{' *' if row.hardest else ''}", row.formula)
    if not row.references:
        return [(*head, "", "", "")]
    shown = [(f"{r.rate:g}", f"{r.rate / row.ceiling_gb_s:.0%}", _cited(r)) for r in row.references]
    return [(*head, *shown[0]), *(("", "", "", "", *more) for more in shown[1:])]


def _cited(measured: profiles.Measured) -> str:
    return f"{measured.source}, {measured.date}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
