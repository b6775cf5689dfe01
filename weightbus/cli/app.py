"""The commands and their options. What they do lies in the module of each name, imported on use."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import weightbus
from weightbus.errors import WeightBusError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Moves a model's weights from trainer processes to inference processes.",
)

BackendOption = Annotated[str, typer.Option("--backend", help="Name of an installed backend, or module:Class.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(weightbus.__version__)
        raise typer.Exit


@app.command()
def demo(
    backend: BackendOption = "local", timeout: Annotated[float, typer.Option(help="Seconds for each step.")] = 120.0
) -> None:
    """Send a trained model from a trainer process to an inference process, three versions, and compare what it says.

    The exit code is 0 when the sentence embeddings of both sides are equal after each version, else 1.
    """
    from weightbus.cli import demo as command

    raise typer.Exit(0 if command.run(Console(), backend, timeout) else 1)


@app.command()
def doctor(
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="Exit with 1 unless this backend can run; default: the embedded one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this machine offers to each backend and adapter, what is in the way, and the cure."""
    from weightbus.cli import doctor as command

    found = command.examine(backend)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        command.show(found, Console())
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def token() -> None:
    """Print a fresh token of 192 bits for WEIGHTBUS_TOKEN; keep it secret."""
    from weightbus.control.security import make_token

    print(make_token())


@app.command()
def bench(
    model: Annotated[
        list[str] | None,
        typer.Option(help="minilm, qwen3-0.6b, qwen3-8b, moe-18000 or tiny-20000; repeat it for several."),
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Repeat it for several; default: all that can run.")] = None,
    bucket: Annotated[list[str] | None, typer.Option(help='Bucket sizes, such as "256MiB".')] = None,
    slots: Annotated[int, typer.Option(help="Buckets per side.")] = 2,
    digest: Annotated[list[str] | None, typer.Option(help="on or off; repeat it for both.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    direct: Annotated[bool, typer.Option("--direct", help="Measure direct mode too.")] = False,
    rounds: Annotated[int, typer.Option(help="Refits (and baseline rounds) after the cold one.")] = 5,
    baseline: Annotated[
        list[str] | None, typer.Option(help="Names of baselines, or none; default: all that can run.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json and bench.png.")] = None,
) -> None:
    """Measure refits between two processes against what else could move the same bytes, in the same run."""
    from weightbus.cli import bench as command
    from weightbus.cli import tables

    settings = command.Settings(
        models=model or command.default_models(device),
        backends=backend,
        buckets=[*bucket] if bucket else [None],
        slots=slots,
        digests=digest or ["on"],
        device=device,
        rounds=rounds,
        baselines=baseline,
        direct=direct,
    )
    result = command.run(settings, Console())
    tables.show(result, Console(width=None if sys.stdout.isatty() else 160))
    if out is not None:
        tables.write(result, out, Console())
    raise typer.Exit(0 if command.complete(result) else 1)


def start() -> None:
    """Run the command; see `weightbus.cli.main`."""
    try:
        app()
    except WeightBusError as exc:
        Console(stderr=True).print(f"[red]{type(exc).__name__}[/red]: {escape(str(exc))}", highlight=False)
        sys.exit(1)
