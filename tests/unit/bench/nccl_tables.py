"""Generate the output of each release of nccl-tests, with the numbers that the reader must return."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from imagebuild.bench.models import Half, NcclRow, Run
from tests.conftest import ROOT

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n, "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n, "broadcast": lambda n: 1.0, "reduce": lambda n: 1.0, "sendrecv": lambda n: 1.0,
}  # fmt: skip
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce")
DIVIDED = ("all_gather", "reduce_scatter", "alltoall")
RELEASES = ("2.10", "2.13.0", "2.13.10", "2.16.7", "2.17.3", "2.17.6", "2.19.6")


@dataclass
class Table:
    """A run to be printed."""

    release: str = "2.19.6"
    collective: str = "all_reduce"
    ranks: int = 8
    sizes: tuple[int, ...] = tuple(8 << i for i in range(0, 31, 3))
    wrong: dict[int, int] = field(default_factory=dict)
    """Maps a row to its number of wrong elements out of place."""
    validate: bool = True
    timestamps: bool = False
    per_iteration: bool = False
    cputime: bool = False
    hosts: int = 1
    seed: int = 0
    speed: Callable[[int], float] | None = None
    """Bus bandwidth for each size. None: times are random."""
    step: int = 8
    """Factor between sizes in the printed parameters."""
    device: str = "NVIDIA H100 80GB HBM3"
    first_rank: int = 0
    """Number of the first GPU of this process on its host."""

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.release.split("."))

    @property
    def average(self) -> float:
        """The average of all rows and halves, with six digits."""
        halves = [half for row in self.rows() for half in (row.out_of_place, row.in_place) if half]
        return float(f"{fmean(half.busbw_gb_s or 0 for half in halves):g}") if halves else 0.0

    @property
    def modern(self) -> bool:
        return self.number >= (2, 13)

    def fixed(self, value: float, width: int) -> str:
        for decimals in (2, 1, 0):
            text = f"{value:{width}.{decimals}f}"
            if len(text) <= width:
                return text
        return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"

    def half(self, time: float, size: int, wrong: int, checked: bool) -> tuple[str, Half]:
        algbw = size / time / 1e3
        busbw = algbw * FACTORS[self.collective](self.ranks)
        if self.number < (2, 17, 3):
            times = f"{time:7.0f}" if time >= 10000 else f"{time:7.1f}" if time >= 100 else f"{time:7.2f}"
            count = f"{wrong:5g}" if self.modern else f"{0.0 if not wrong else 1.0:5.0e}"
            cells = [times, f"{algbw:6.2f}", f"{busbw:6.2f}", count if checked else "  N/A"]
        else:
            cells = [
                self.fixed(time, 7),
                self.fixed(algbw, 6),
                self.fixed(busbw, 6),
                f"{wrong:6g}" if checked else "   N/A",
            ]
        text = "".join("  " + cell for cell in cells)
        if self.per_iteration:
            text += "".join("  " + self.fixed(value, 7) for value in (time * 0.99, time * 1.07, time * 1.06, 1.75))
        last = float(cells[3]) if checked else None
        counts = {"error": last, "wrong": None} if not self.modern else {"wrong": None if last is None else int(last)}
        figures = {"time_us": float(cells[0]), "algbw_gb_s": float(cells[1]), "busbw_gb_s": float(cells[2])}
        return text, Half.model_validate({**figures, **counts})

    def row(self, at: int, size: int) -> tuple[str, NcclRow]:
        source = random.Random(f"{self.seed}/{at}")
        count = size // 4 // (self.ranks if self.collective in DIVIDED else 1)
        if self.collective in DIVIDED:
            size = count * 4 * self.ranks
        redop = "sum" if self.collective in REDUCING else "none"
        root = self.seed % self.ranks if self.collective in ROOTED else -1
        text = f"{size:12d}  {count:12d}  {'float':>8}"
        if self.modern:
            text += f"  {redop:>6}  {root:>6}"
        else:
            blank = self.collective == "alltoall"
            if self.collective in REDUCING or blank:
                text += f"  {'' if blank else redop:>6}"
            if self.collective in ROOTED:
                text += f"  {root:6d}"
        halves = []
        for place in range(2):
            time = source.uniform(5, 60) + size / source.uniform(20e3, 400e3)
            if self.speed:
                factor = FACTORS[self.collective](self.ranks)
                time = size / (self.speed(size) / factor if factor else 100.0) / 1e3
            checked = self.validate and not (self.modern and place == 1 and self.collective == "alltoall")
            cells, half = self.half(time, size, self.wrong.get(at, 0) if place == 0 else 0, checked)
            text += cells
            halves.append(half)
        if self.timestamps:
            text += f"{'2026-11-21 07:12:33':>21}"
        shown = not self.modern and self.collective not in REDUCING
        row = NcclRow(
            size_bytes=size, count=count, dtype="float", redop=None if shown else redop,
            root=root if self.modern or self.collective in ROOTED else None, out_of_place=halves[0],
            in_place=halves[1],
        )  # fmt: skip
        return text, row

    def rows(self) -> list[NcclRow]:
        return [self.row(at, size)[1] for at, size in enumerate(self.sizes)]

    def head(self) -> list[str]:
        lines = []
        if self.number >= (2, 17, 6):
            lines.append(f"# nccl-tests version {self.release} nccl-headers=23007 nccl-library=23007")
        if self.number >= (2, 16, 7):
            lines.append(f"# Collective test starting: {self.collective}_perf")
        parameters = (
            f"nThread 1 nGpus {self.ranks} minBytes {self.sizes[0]} maxBytes {self.sizes[-1]} step: {self.step}(factor) "
            f"warmup iters: 5 iters: 20 {'agg iters: 1 ' if self.modern else ''}validation: {int(self.validate)} "
        )
        lines += [f"# {parameters}{'graph: 0' if self.modern else ''}", "#", "# Using devices"]
        for rank in range(self.ranks):
            group = "Group  0 " if self.number >= (2, 13, 8) else ""
            gpu = (rank + self.first_rank) % 8
            pid = f"Pid {4711 + rank + self.first_rank:6d} "
            host = f"node{rank * self.hosts // self.ranks + 1}"
            bus = f"[0000:{16 + gpu:x}:00]" if self.number >= (2, 15) else f"[0x{16 + gpu:x}]"
            lines.append(f"#  Rank {rank:2d} {group}{pid}on {host:>10} device {gpu:2d} {bus} {self.device}")
        return [*lines, "#", *self.header()]

    def header(self) -> list[str]:
        time = "cputime" if self.cputime else "time"
        redop = self.modern or self.collective in (*REDUCING, "alltoall")
        root = self.modern or self.collective in ROOTED
        half = [time, "algbw", "busbw", "#wrong" if self.modern else "error"]
        half += ["i_min", "i_max", "i_p99", "i_cv%"] if self.per_iteration else []
        labels = ["size", "count", "type", *(["redop"] if redop else []), *(["root"] if root else []), *half, *half]
        return [
            "#                                                              out-of-place                       in-place          ",
            "#  " + "  ".join(f"{label:>6}" for label in labels) + ("            timestamp" if self.timestamps else ""),
            "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       ",
        ]

    def foot(self) -> list[str]:
        bad = len(self.wrong)
        lines = [
            f"# Out of bounds values : {bad} {'FAILED' if bad else 'OK'}",
            f"# Avg bus bandwidth    : {self.average:g} ",
            "#",
        ]
        return [*lines, f"# Collective test concluded: {self.collective}_perf"] if self.number >= (2, 16, 7) else lines

    def body(self) -> list[str]:
        return [self.row(at, size)[0] for at, size in enumerate(self.sizes)]

    def lines(self) -> list[str]:
        return [*self.head(), *self.body(), *self.foot()]

    def text(self) -> str:
        return "\n".join(self.lines()) + "\n"


def document(table: Table, **changes: object) -> str:
    """Generate the JSON of a run, with times that are not rounded, and with changed keys."""
    results = [
        {"size": row.size_bytes, "count": row.count, "type": row.dtype, "redop": row.redop, "root": f"{row.root}",
         **{name: {"time": (half.time_us or 0) + 0.0012, "alg_bw": half.algbw_gb_s, "bus_bw": half.busbw_gb_s, "nwrong": 0}
            for name, half in zip(("out_of_place", "in_place"), row.halves, strict=True)}}
        for row in table.rows()
    ]  # fmt: skip
    config = {"nthreads": 1, "ngpus": 8, "minimum_bytes": table.sizes[0], "maximum_bytes": table.sizes[-1], "step_factor": table.step,
              "validation": 1, "devices": [{"rank": 0, "hostname": "node1", "device": 0, "device_info": table.device}]}  # fmt: skip
    average = {"bandwidth": table.average, "okay": "unchecked"}
    return json.dumps({
        "version": 3, "args": ["all_reduce_perf"], "nccl_version": 23007, "config": config, "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"}, "average_bus_bandwidth": average, **changes,
    })  # fmt: skip


Piece = str | dict[str, Any]
"""A piece of a text in tests/data/bench/runs.yaml, which explains the keys."""


def table_of(piece: dict[str, Any]) -> Table:
    options = dict(piece.get("table", {}))
    sizes = tuple(options.pop("sizes", Table.sizes)) * options.pop("times", 1)
    return Table(sizes=sizes, **options)


def text_of(pieces: Iterable[Piece]) -> str:
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        table, rows = table_of(piece), piece.get("rows")
        lines = {"head": table.head(), "body": table.body()[:rows], "foot": table.foot()}
        parts = piece.get("parts", ["head", "body"] + ["foot"] * (rows is None))
        own = "".join(f"{line}\n" for part in parts for line in lines[part])
        own = f"{document(table, **piece['document'])}\n" if "document" in piece else own
        own = (ROOT / "tests/data/bench" / piece["file"]).read_text() if "file" in piece else own
        text += substituted(own, piece.get("sub", ()))
    return text


def substituted(text: str, rows: Iterable[Any]) -> str:
    for pattern, replacement, *most in rows:
        text, times = re.subn(pattern, replacement, text, count=most[0] if most else 0)
        assert times, pattern
    return text


def same(run: Run, table: Table) -> None:
    """Return whether the printed rows equal the rows that were read."""
    assert list(run.rows) == table.rows()
    assert (run.partial_rows, run.avg_busbw_gb_s) == (0, table.average)
    assert run.ranks == table.ranks


def noise(source: random.Random) -> str:
    rank = source.randrange(8)
    return f"node{rank // 4 + 1}:{4711 + rank}:{4800 + rank} [{rank}] NCCL " + source.choice((
        f"INFO Channel 0{rank}/0 : {rank}[{rank}] -> {(rank + 1) % 8}[{(rank + 1) % 8}] via P2P/CUMEM/read",
        "INFO AllReduce: opCount 3 sendbuff 0x7f count 268435456 datatype 7 op 0 root 0 comm 0x55 [nranks=8] stream 0x1",
        "INFO Trees [0] 1/-1/-1->0->-1 [1] 1/8/-1->0->-1",
    ))  # fmt: skip


def broken_lines(lines: list[str], source: random.Random, often: float) -> list[str]:
    """Insert log lines between and inside rows, as two unsynchronised writers to one file would."""
    out = [noise(source) for _ in range(8)] + [f"node{i}:1:1 [0] NCCL INFO Bootstrap" for i in (1, 2)]
    for line in lines:
        while source.random() < often:
            out.append(noise(source))
        if line.count("  ") > 6 and not line.startswith("#") and source.random() < often:
            # The letters of a type would look like the beginning of a host name.
            at = source.choice([at for at in range(1, len(line)) if not line[at - 1].isalpha()])
            out.append(line[:at] + noise(source))
            out += [noise(source) for _ in range(source.randrange(3))]
            out.append(line[at:])
        else:
            out.append(line)
    return out


def interleaved(texts: list[list[str]], source: random.Random, often: float = 1.0) -> str:
    """Mix lines. After each line, another text may go on with the probability `often`."""
    queues = [list(text) for text in texts]
    out, queue = [], queues[0]
    while left := [queue for queue in queues if queue]:
        queue = source.choice(left) if not queue or source.random() < often else queue
        out.append(queue.pop(0))
    return "\n".join(out)
