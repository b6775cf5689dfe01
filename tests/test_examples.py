"""The examples run, and end as they say."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from weightbus.cli import bench, tables

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def example(*words: str, timeout: float = 300) -> str:
    """Run ``python words``; its standard output. A bad exit code fails with everything it said."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "backends"), str(ROOT / "adapters")])
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart() -> None:
    lines = example("examples/quickstart.py").splitlines()
    assert lines[:3] == [f"inference: version {v}, first weight {v}" for v in (1, 2, 3)]
    assert lines[3].startswith("version 3: 2 tensors, 4.2 MB in 2 buckets")


def test_torchrun_ranks_with_fsdp2_feed_two_engines() -> None:
    out = example("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/torchrun_fsdp2.py")
    told = sorted(line for line in out.splitlines() if " computes " in line)
    assert [line.split(" computes ")[0] for line in told] == [f"version {v}: e{e}" for v in (1, 2, 3) for e in (0, 1)]
    assert all(line.endswith("same: True") for line in told)
    answers = {line.rpartition("the trainer ")[2] for line in told}
    assert len(answers) == 3, "three versions compute three things"


def test_ray_actors_and_one_that_is_killed_and_restarted() -> None:
    pytest.importorskip("ray")
    lines = [line for line in example("examples/ray_actors.py").splitlines() if line.startswith(("version", "killed"))]
    assert [line.split(" (")[0].split(":")[0] for line in lines] == ["version 1", "killed e1", "version 1", "version 2"]
    assert "'e0': 'ALREADY'" in lines[2] and "'e1': 'READY(1)'" in lines[2], "only the newcomer was fed"
    assert "'e0': 'READY(2)'" in lines[3] and "'e1': 'READY(2)'" in lines[3]
    assert all(line.endswith("answers equal: True") for line in lines if line.startswith("version"))


def test_memory_descriptors_and_threads_stay_flat() -> None:
    lines = example("examples/bench_memory.py", "60").splitlines()
    assert lines[0] == "60 refits over local, 16.8 MB each"
    assert [line.split(":")[0] for line in lines[1:]] == ["trainer", "inference"]
    assert all(line.endswith("grown: nothing") for line in lines[1:])


def test_what_grows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    grown = runpy.run_path(str(EXAMPLES / "bench_memory.py"))["grown"]
    before = {"resident MB": 100.0, "descriptors": 9, "threads": 4}
    assert not grown("x", [before, {**before, "resident MB": 103.0}])
    assert grown("x", [before] * 21 + [{**before, "resident MB": 105.0}])
    assert grown("x", [before] * 21 + [{**before, "descriptors": 10}])
    assert capsys.readouterr().out.splitlines()[-1].endswith("grown: descriptors")


@pytest.mark.parametrize("name", ["bench_local", "bench_tiny"])
def test_the_benchmarks_are_settings_of_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bench.Settings] = []

    def run(settings: bench.Settings, console: object) -> bench.Result:
        seen.append(settings)
        return bench.Result(settings=settings, host={}, rows=())

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(tables, "show", lambda result, console: None)
    monkeypatch.setattr(sys, "argv", [name, "--rounds", "2"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert seen[0].rounds == 2, "further options win"
    assert seen[0].models and seen[0].backends == ["local"] and "copy" in (seen[0].baselines or [])
