"""What `weightbus bench` prints and writes: tables, JSON, a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightbus.cli.bench import Result, Row
from weightbus.cli.optional import library

RATIOS = ("copy", "copy-flat", "gloo", "gloo-packed", "cuda-ipc")
MANY_TENSORS = 1000


def show(result: Result, console: Console) -> None:
    """A table per model, what each clock covers, and the stages against what they allow."""
    for model in dict.fromkeys(row.model for row in result.rows):
        console.print(_figures(result, model))
        for row in result.of(model):
            if row.error:
                console.print(f"[red]{row.name} {row.settings} failed:[/red] {escape(row.error)}", highlight=False)
        stages = _stages(result, model)
        if stages.row_count:
            console.print(stages)
    console.print(
        "what the clocks cover (cold: the first round, set-up of processes apart; steady: median of the rest)"
    )
    for name, covers in {row.name: row.covers for row in result.rows}.items():
        console.print(f"  [bold]{name}[/bold]: {escape(covers)}", highlight=False)
    for name, value in result.host.items():
        console.print(f"  {name}: {escape(value)}", highlight=False)


def _figures(result: Result, model: str) -> Table:
    rows = result.of(model)
    table = Table(title=f"{model}: {rows[0].tensors} tensors, {rows[0].nbytes / 1e6:,.1f} MB")
    table.add_column("what")
    table.add_column("settings")
    many = rows[0].tensors >= MANY_TENSORS
    per_tensor = ["µs/tensor first", "µs/tensor steady"] if many else []
    ratios = [f"x {name}" for name in RATIOS if result.find(model, name)]
    for name in ("cold ms", "steady ms", "min - max", "GB/s", *ratios, *per_tensor):
        table.add_column(name, justify="right")
    for row in rows:
        if row.error:
            table.add_row(row.name, row.settings, "[red]failed[/red]")
            continue
        low, high = _ms(min(row.seconds[1:])), _ms(max(row.seconds[1:]))
        cells = [_ms(row.cold_s), _ms(row.median_s), f"{low} - {high}"]
        cells += [f"{row.gbytes_per_s:.2f}", *_ratios(result, row), *(_over_raw(result, row) if many else [])]
        table.add_row(row.name, row.settings, *cells if row.equal else [*cells[:-1], "[red]WRONG BYTES[/red]"])
    return table


def _ms(seconds: float) -> str:
    """Milliseconds with three or more digits that count."""
    ms = seconds * 1e3
    return f"{ms:.1f}" if ms >= 100 else f"{ms:.2f}" if ms >= 1 else f"{ms:.4f}"


def _ratios(result: Result, row: Row) -> list[str]:
    """How much faster than each baseline; above 1 is better."""
    found = (result.find(row.model, name) for name in RATIOS)
    return [f"{base.median_s / row.median_s:.2f}" for base in found if base is not None]


def _over_raw(result: Result, row: Row) -> list[str]:
    """Microseconds a tensor beyond one copy of the same bytes: first, steady."""
    base = result.find(row.model, "copy")
    raw = base.median_s if base is not None else 0.0
    return [f"{(seconds - raw) / row.tensors * 1e6:.2f}" for seconds in (row.cold_s, row.median_s)]


def _stages(result: Result, model: str) -> Table:
    """Each stage alone, and the refit against their sum (one resource) and their maximum (resources of their own)."""
    table = Table(title=f"{model}: milliseconds of each stage alone, and the refit as a part of what they allow")
    for name in ("what", "settings", "pack", "wire", "load", "S", "B/S", "of B/S", "max", "B/max", "of B/max"):
        table.add_column(name, justify="left" if name in ("what", "settings") else "right")
    for row in result.of(model):
        if row.alone and not row.error:
            a = row.alone
            total, most = sum(a.values()), max(a["pack"], a["wire"], a["load"])
            cells = [_ms(a[stage]) for stage in ("pack", "wire", "load")]
            for limit in (total, most):
                cells += [_ms(limit), f"{row.nbytes / limit / 1e9:.2f}", f"{limit / row.median_s:.2f}"]
            table.add_row(row.name, row.settings, *cells)
    return table


def write(result: Result, folder: Path, console: Console) -> None:
    """`bench.json` and `bench.png` in `folder`.

    Raises:
        ConfigError: matplotlib is not installed; the JSON is written all the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    console.print(f"wrote {folder / 'bench.json'}")
    matplotlib = library("matplotlib", "pip install 'weightbus[bench]'", "The plot")
    matplotlib.use("Agg")
    plt = library("matplotlib.pyplot", "pip install 'weightbus[bench]'", "The plot")
    models = list(dict.fromkeys(row.model for row in result.rows if not row.error))
    lines = max([sum(not row.error for row in result.of(model)) for model in models] or [1])
    figure, axes = plt.subplots(1, max(1, len(models)), figsize=(6 * max(1, len(models)), 1.5 + 0.35 * lines))
    for axis, model in zip(axes if len(models) > 1 else [axes], models, strict=False):
        _bars(axis, [row for row in result.of(model) if not row.error], model)
    figure.suptitle(f"steady refit and baselines, median and spread; {result.host.get('processor', '')}", fontsize=9)
    figure.tight_layout()
    figure.savefig(folder / "bench.png", dpi=120)
    plt.close(figure)
    console.print(f"wrote {folder / 'bench.png'}")


def _bars(axis: object, rows: list[Row], model: str) -> None:
    """Milliseconds on a logarithmic axis, weightbus in a colour of its own."""
    draw: Any = axis
    labels = [f"{row.name} {row.settings}".strip() for row in rows]
    medians = [row.median_s * 1e3 for row in rows]
    below = [m - min(row.seconds[1:]) * 1e3 for m, row in zip(medians, rows, strict=True)]
    above = [max(row.seconds[1:]) * 1e3 - m for m, row in zip(medians, rows, strict=True)]
    colours = ["tab:blue" if row.settings else "tab:gray" for row in rows]
    draw.barh(labels, medians, xerr=[below, above], color=colours)
    draw.invert_yaxis()
    draw.set_xscale("log")
    draw.set_xlabel("milliseconds")
    draw.set_title(f"{model}, {rows[0].nbytes / 1e6:,.0f} MB")
    draw.tick_params(labelsize=8)
