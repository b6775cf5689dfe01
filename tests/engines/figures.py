"""Tables of the engines' speed scripts: a row of seconds for each way to refit."""

from __future__ import annotations

import statistics

Row = dict[str, float]


def medians(seconds: list[Row]) -> Row:
    """Of each phase, over all refits but the first."""
    return {phase: statistics.median(s.get(phase, 0.0) for s in seconds[1:]) for phase in seconds[-1]}


def show(rows: dict[str, Row]) -> None:
    """Print them, a column a phase."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    width = max(map(len, ["seconds", *rows]))
    print(f"{'seconds':<{width}}" + "".join(f"{name:>10}" for name in names))
    for title, row in rows.items():
        cells = (f"{row[name]:>10.3f}" if name in row else f"{'':>10}" for name in names)
        print(f"{title:<{width}}" + "".join(cells), flush=True)
