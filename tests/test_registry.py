"""Plugins are found by name, each look-up in a process of its own where installed packages matter."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightbus.errors import AmbiguousPlugin, BackendUnavailable, ConfigError, UnknownPlugin
from weightbus.registry import known, load_adapter, load_backend

ROOT = Path(__file__).parent.parent
PLUGIN = """
    from weightbus.backend import Backend, Probe
    class FooBackend(Backend):
        name = "foo"
        def __init__(self, *, depth=1, width=2):
            if depth < 0:
                raise ValueError("depth is negative")
            self.depth = depth
        def probe(self):
            return Probe(ok=True)
        def endpoint(self, spec):
            raise RuntimeError
"""


def install(folder: Path, distribution: str, entry_points: str, **modules: str) -> Path:
    """Lay out an installed distribution as pip does."""
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


def python(code: str, *folders: Path) -> list[str]:
    """Lines that `code` prints in a fresh interpreter with these folders and the checkout on its path."""
    path = [*map(str, folders), *(str(ROOT / part) for part in (".", "backends", "adapters"))]
    code = f"import sys; sys.path[:0] = {path!r}\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages on this interpreter's path."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("foo_plugin", None)


ENTRY = """
    [weightbus.backends]
    foo = foo_plugin:FooBackend
"""


def test_an_installed_third_party_is_found_listed_and_made(site: Path) -> None:
    install(site, "foo-dist", ENTRY, foo_plugin=PLUGIN)
    assert "foo" in known("weightbus.backends")
    assert "foo_plugin" not in sys.modules
    assert vars(load_backend("foo", {"depth": 3})) == {"depth": 3}
    assert vars(load_backend("foo_plugin:FooBackend")) == {"depth": 1}


def test_two_distributions_with_one_name_are_both_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "foo-one", ENTRY, foo_plugin=PLUGIN)
    monkeypatch.syspath_prepend(install(site / "b", "foo-two", ENTRY))
    with pytest.raises(AmbiguousPlugin, match="backend 'foo' is offered by foo-one and foo-two"):
        load_backend("foo")
    assert vars(load_backend("foo_plugin:FooBackend")) == {"depth": 1}


def test_one_distribution_seen_twice_is_not_ambiguous(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "foo-dist", ENTRY, foo_plugin=PLUGIN)
    monkeypatch.syspath_prepend(install(site / "b", "foo-dist", ENTRY))
    assert vars(load_backend("foo")) == {"depth": 1}


@pytest.mark.parametrize(
    ("distribution", "advice"),
    [("weightbus", "pip install 'weightbus[foo]'"), ("foo-dist", "reinstall foo-dist with its dependencies")],
)
@pytest.mark.parametrize(
    ("body", "cause"),
    [("import no_such_wire_library", ModuleNotFoundError), ("raise OSError('no_such_wire_library.so')", OSError)],
)
def test_a_failing_import_keeps_the_cause_and_says_what_to_install(
    site: Path, distribution: str, advice: str, body: str, cause: type[Exception]
) -> None:
    install(site, distribution, ENTRY, foo_plugin=body)
    with pytest.raises(BackendUnavailable, match=r"backend 'foo' cannot be imported.*no_such_wire_library") as caught:
        load_backend("foo")
    assert advice in str(caught.value)
    assert type(caught.value.__cause__) is cause


def test_bad_options_are_listed_with_the_good_ones(site: Path) -> None:
    install(site, "foo-dist", ENTRY, foo_plugin=PLUGIN)
    with pytest.raises(ConfigError, match=r"'foo': unknown option 'color'; unknown option 'speed'.*: depth, width"):
        load_backend("foo", {"speed": 1, "color": 2})
    with pytest.raises(ConfigError, match="'foo' refused its options: ValueError: depth is negative"):
        load_backend("foo", {"depth": -1})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("FooBackend = 7", "no subclass of weightbus.backend.Backend"),
        ("class FooBackend: pass", "no subclass of weightbus.backend.Backend"),
        ("from weightbus.backend import Backend\nclass FooBackend(Backend): pass", "lacks endpoint, probe"),
        ("", "no foo_plugin:FooBackend"),
    ],
)
def test_what_is_no_backend_is_refused(site: Path, body: str, text: str) -> None:
    install(site, "foo-dist", ENTRY, foo_plugin=body)
    with pytest.raises(ConfigError, match=text):
        load_backend("foo")


def test_a_checkout_on_the_path_needs_no_entry_points(tmp_path: Path) -> None:
    """No metadata of weightbus: built-ins and a neighbour are found by convention, and nothing is imported for it."""
    (tmp_path / "weightbus_foo.py").write_text(textwrap.dedent(PLUGIN))
    out = python(
        """
        import weightbus.registry as registry
        print([m for m in sys.modules if m.startswith("weightbus_")])
        registry.entry_points = lambda **kwargs: ()
        print(*registry.known("weightbus.backends"))
        print(*registry.known("weightbus.adapters"))
        print([m for m in sys.modules if m.startswith("weightbus_")])
        print(registry.load_backend("foo").depth, type(registry.load_backend("loopback")).__name__)
        try:
            registry.load_backend("torch")
        except registry.UnknownPlugin as exc:
            print(exc)
        """,
        tmp_path,
    )
    assert out[0] == "[]"
    assert out[1].split() == ["foo", "local", "loopback", "nccl", "nixl", "ucx"]
    assert out[2].split() == ["sglang", "torch", "vllm"]
    assert out[3:5] == ["[]", "1 LoopbackBackend"]
    assert out[5].startswith("no backend 'torch' is installed")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UnknownPlugin) as caught:
        load_backend("carrier_pigeon")
    assert "no backend 'carrier_pigeon'" in str(caught.value)
    for name in known("weightbus.backends"):
        assert name in str(caught.value)
    with pytest.raises(UnknownPlugin, match="no adapter 'nixl'"):
        load_adapter("nixl")


@pytest.mark.parametrize("name", ["", "no_such_module:Foo", "../etc", "a b", ".", "os.path"])
def test_names_of_nothing_are_unknown(name: str) -> None:
    with pytest.raises(UnknownPlugin):
        load_backend(name)


def test_a_module_and_class_that_is_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="no subclass"):
        load_backend("os:PathLike")
    with pytest.raises(ConfigError, match="no os:Nothing"):
        load_backend("os:Nothing")


def test_a_required_option_is_named() -> None:
    with pytest.raises(ConfigError, match="option 'module' is required"):
        load_adapter("torch")
    assert not issubclass(UnknownPlugin, BackendUnavailable)
