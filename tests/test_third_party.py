"""A backend that weightbus has never heard of is tested in one command, and a bug planted in it is found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BACKEND = """
from weightbus import loopback
class FooBackend(loopback.LoopbackBackend):
    name = "foo"
"""
BUGS = {
    "last byte lost": (
        "loopback._copy = lambda target, source: target[:-1].copy_(source[:-1])",
        "test_used_bytes_arrive_and_no_more",
    ),
    "late write": ("loopback._Receiver.close = lambda self: None", "test_nothing_lands_after_the_receiver_has_closed"),
    "length forgotten": (
        "loopback._Post.nbytes = property(lambda self: self.source.numel() or 1)",
        "test_used_bytes_arrive_and_no_more",
    ),
}


def run_suite(folder: Path, source: str, *extra: str) -> subprocess.CompletedProcess[str]:
    (folder / "foo.py").write_text(source)
    info = folder / "foo_bus-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foo-bus\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weightbus.backends]\nfoo = foo:FooBackend\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "weightbus.testing.plugin", "-p", "no:cacheprovider"]
    command += ["--pyargs", "weightbus.testing.suite", "--weightbus-backend", "foo", *extra]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_a_sound_backend_passes(tmp_path: Path) -> None:
    done = run_suite(tmp_path, BACKEND)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "failed" not in done.stdout


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(tmp_path: Path, bug: str) -> None:
    code, test = BUGS[bug]
    done = run_suite(tmp_path, BACKEND + code, "-k", test)
    assert done.returncode == 1, done.stdout
    assert test in done.stdout.split("short test summary info")[1]


def test_a_backend_that_cannot_run_is_not_a_green_suite(tmp_path: Path) -> None:
    from_probe = "    def probe(self): from weightbus.backend import Probe; return Probe(ok=False, reason='no wire')"
    done = run_suite(tmp_path, BACKEND + from_probe)
    assert done.returncode == 1
    assert "no wire" in done.stdout
