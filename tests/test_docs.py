"""What the documents say is so: their examples run, and what they name exists, and the other way round."""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
import typer.main

import weightbus
from weightbus import errors
from weightbus.config import BUCKET_BYTES, SHARED_BUCKET_BYTES
from weightbus.control import messages, security, wire
from weightbus.digest import host_digest
from weightbus.errors import WeightBusError
from weightbus.header import Header
from weightbus.manifest import DTYPES, MAX_NAME_BYTES, MAX_TENSORS, Manifest, TensorSpec
from weightbus.plan import make_plans

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """Blocks of one language: what stands behind it, and the code."""
    return [(note.strip(), code) for found, note, code in BLOCK.findall(text(page)) if found == language]


def files_of(page: str, folder: Path) -> list[str]:
    """Write the blocks that are whole files into `folder`; their names."""
    named = [(note.removeprefix("file="), code) for note, code in blocks(page, "python") if note.startswith("file=")]
    for name, code in named:
        (folder / name).write_text(code)
    return [name for name, _ in named]


def run(folder: Path, *command: str, timeout_s: float = 180) -> str:
    paths = [ROOT, ROOT / "backends", ROOT / "adapters", folder]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = (sys.executable, *command)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- examples


def test_the_example_of_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    ((_, code),) = [block for block in blocks("README.md", "python") if "WeightBus.sender" in block[1]][:1]
    (tmp_path / "example.py").write_text(code)
    shown = blocks("README.md", "text")[0][1]
    masked = [re.sub(r"\d+\.\d+", "#", re.sub(r" +", " ", each)) for each in (run(tmp_path, "example.py"), shown)]
    assert masked[0] == masked[1]
    assert "True {}" in shown


def test_the_backend_of_the_page_passes_the_suite(tmp_path: Path) -> None:
    assert files_of("docs/backend.md", tmp_path) == ["weightbus_tcp.py", "test_tcp.py"]
    out = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_tcp.py")
    assert int(re.search(r"(\d+) passed", out)[1]) > 60  # type: ignore[index]


def test_the_adapter_of_the_page_passes_the_suite(tmp_path: Path) -> None:
    assert files_of("docs/adapter.md", tmp_path) == ["weightbus_shelf.py", "test_shelf.py"]
    out = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shelf.py")
    assert int(re.search(r"(\d+) passed", out)[1]) >= 11  # type: ignore[index]


def test_both_of_them_carry_a_refit(tmp_path: Path) -> None:
    files_of("docs/backend.md", tmp_path)
    files_of("docs/adapter.md", tmp_path)
    (tmp_path / "refit.py").write_text("""
import torch
from weightbus import WeightBus
shelf = {"weights": {"a": torch.full((70000,), float("nan"))}, "serving": True, "label": ""}
with WeightBus.sender("tcp://127.0.0.1:0", receivers=1, backend="weightbus_tcp:TcpBackend", bucket_bytes=65536) as bus:
    options = {"adapter": "weightbus_shelf:ShelfAdapter", "adapter_options": {"shelf": shelf}, "poison": True}
    with WeightBus.receiver(bus.address, backend="weightbus_tcp:TcpBackend", **options) as engine:
        waiting = engine.irecv(timeout=60)
        bus.send({"a": torch.arange(70000.0)}, version=7, timeout=60)
        report = waiting.wait(60)
assert torch.equal(shelf["weights"]["a"], torch.arange(70000.0)), shelf
print(report.version, report.buckets, shelf["serving"], shelf["label"])
""")
    assert run(tmp_path, "refit.py").split() == ["7", "5", "True", "7"]


@pytest.mark.parametrize("page", PAGES)
def test_python_on_a_page_is_python(page: str) -> None:
    for _, code in blocks(page, "python"):
        compile(code, page, "exec")


# ---- names


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", text(page))
    missing = [t for t in targets if not t.startswith("http") and not (ROOT / page).parent.joinpath(t).exists()]
    assert not missing


def test_files_that_are_named_exist() -> None:
    named = {
        (page, name)
        for page in PAGES
        for name in re.findall(r"`((?:weightbus|docs|examples|tests)/[\w/.]+)`", text(page))
    }
    assert named
    assert not [pair for pair in named if not (ROOT / pair[1]).exists()]


def test_every_error_is_on_its_page_and_every_one_there_exists() -> None:
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, WeightBusError)
    }
    rows = set(re.findall(r"^\| `(\w+)`", text("docs/errors.md"), re.MULTILINE))
    assert rows == classes
    assert classes <= set(weightbus.__all__)


def test_errors_that_pages_name_exist() -> None:
    known = {*vars(errors), *vars(builtins), *vars(messages)}
    named = {name for page in PAGES for name in re.findall(r"\b([A-Z]\w*Error)\b", text(page))}
    assert len(named) > 10
    assert named <= known


def message_rows() -> dict[str, tuple[int, str]]:
    found = re.findall(r"^\| (\d+) \| ([A-Z]\w+) \|[^|]*\|[^|]*\| (.*?) \|$", text("docs/protocol.md"), re.MULTILINE)
    return {name: (int(code), fields) for code, name, fields in found}


def field_type(value: object) -> str:
    """A field's type as the page writes it."""
    shown = str(value).replace(" | None", "?").replace("dict[str, ", "{str: ")
    shown = re.sub(r"\{str: (\w+)\]", r"{str: \1}", shown)
    return re.sub(r"(?:tuple|list)\[(\w+)(?:, \.\.\.)?\]", r"[\1]", shown)


@pytest.mark.parametrize("kind", messages.KINDS, ids=lambda kind: kind.__name__)
def test_every_message_is_in_the_protocol_with_its_code_and_fields(kind: type) -> None:
    fields = ", ".join(f"{field.name} {field_type(field.type)}" for field in attrs.fields(kind))
    assert message_rows()[kind.__name__] == (messages.KINDS.index(kind), fields)


def test_the_protocol_names_no_other_message() -> None:
    assert set(message_rows()) == {kind.__name__ for kind in messages.KINDS}
    assert f"Version {messages.PROTOCOL}." in text("docs/protocol.md")


def test_every_command_is_named_and_every_named_one_exists() -> None:
    app = importlib.import_module("weightbus.cli.app").app
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"`weightbus ([a-z]+)", "".join(map(text, PAGES))))
    assert named == commands


def test_settings_that_pages_name_exist() -> None:
    known = {
        name
        for method in ("sender", "receiver", "driver", "send", "recv", "isend")
        for name in inspect.signature(getattr(weightbus.WeightBus, method)).parameters
    }
    rows = re.findall(r"^\| `(\w+)` \|", text("docs/tuning.md").split("| setting |")[1], re.MULTILINE)
    assert len(rows) >= 8
    assert set(rows) <= known


# ---- facts of the protocol


def test_digests_of_the_page() -> None:
    page = text("docs/protocol.md")
    data = bytearray(range(256)) * 300
    for value in (host_digest(memoryview(data), len(data)), host_digest(memoryview(bytearray()), 0)):
        assert f"`{value:016x}`" in page
    manifest = Manifest([TensorSpec("a", (2, 3), "float32", ("b",), "parameter"), TensorSpec("s", (), "bfloat16")])
    (plan,) = make_plans([manifest], [], 256)
    assert f"`{manifest.digest():016x}`" in page
    assert f"`{plan.digest:016x}`" in page
    segments = [(s.tensor, s.tensor_offset, s.offset, s.nbytes) for s in plan.buckets[0].segments]
    assert f"segments {segments[0]} and {segments[1]}, {plan.buckets[0].used_bytes} used bytes" in page


def test_keys_of_the_page() -> None:
    page = text("docs/protocol.md")
    keys = security.derive("weightbus-example-token-0123456789")
    assert f"`{keys.server_public.decode()}`" in page
    assert f"`{keys.client_public.decode()}`" in page


def test_the_header_of_the_page() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (.+) \|$", text("docs/protocol.md").split("**Header**")[1], re.MULTILINE)
    values = {
        "lane key": b"K" * 16,
        "refit id": b"R" * 16,
        "plan digest": 3,
        "bucket index": 4,
        "number": 5,
        "used": 6,
        "bucket digest": 7,
    }
    header = Header(lane_key=b"K" * 16, refit_id=b"R" * 16, plan_digest=3, bucket=4, total=5, used_bytes=6, digest=7)
    packed, end = header.pack(), 0
    for offset, size, meaning in ((int(a), int(b), c) for a, b, c in rows):
        assert offset == end
        end += size
        want = next((value for start, value in values.items() if meaning.startswith(start)), None)
        if want is not None:
            have = packed[offset:end]
            assert (have if isinstance(want, bytes) else int.from_bytes(have, "little")) == want, meaning
    assert end == len(packed)
    assert packed.startswith(b"WB01")


def test_limits_of_the_pages() -> None:
    page = text("docs/protocol.md")
    assert f"{messages.MAX_FRAME_BYTES >> 20} MiB; {messages.MAX_TEXT:,} characters" in page
    assert f"{MAX_NAME_BYTES:,} bytes of UTF-8; {MAX_TENSORS:,}" in page
    assert f"| dtypes | {', '.join(DTYPES)} |" in page
    assert f"every {wire.HEARTBEAT_MS // 1000} s, timeout and TTL {wire.HEARTBEAT_TIMEOUT_MS // 1000} s" in page
    assert f"every {wire.PING_S:g} s" in page
    tuning = text("docs/tuning.md")
    sizes = f"`local` {SHARED_BUCKET_BYTES >> 20} MiB, others {BUCKET_BYTES['cpu'] >> 20} MiB; CUDA {BUCKET_BYTES['cuda'] >> 30} GiB"
    assert sizes in tuning
    defaults = {name: p.default for name, p in inspect.signature(weightbus.WeightBus.sender).parameters.items()}
    assert f"| `stall_timeout` | {defaults['stall_timeout']:g} s |" in tuning
    assert f"| `finish_timeout` | {defaults['finish_timeout']:g} s |" in tuning


def test_backends_and_adapters_of_the_readme_are_those_installed() -> None:
    from weightbus.registry import ADAPTERS, BACKENDS, known

    rows = set(re.findall(r"^\| `(\w+)` \|", text("README.md"), re.MULTILINE))
    assert rows == {*known(BACKENDS), *known(ADAPTERS)}


def test_the_licence_is_the_one_that_is_declared() -> None:
    licence = text("LICENSE")
    assert "Apache License" in licence and "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert torch.__version__ and f"## [{weightbus.__version__}]" in text("CHANGELOG.md")


def test_baselines_of_the_page_are_those_of_the_command() -> None:
    from weightbus.cli.baselines import METHODS

    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", text("docs/benchmarks.md"), re.MULTILINE))
    assert rows == {name: method.covers for name, method in METHODS.items()}
