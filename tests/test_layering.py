"""Who may import whom, and other rules that are read off the sources."""

import ast
import inspect
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightbus
from weightbus import adapter, backend

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

#: Beyond the standard library, weightbus itself and core's own dependencies.
SHARED = {"torch", "attrs", "msgspec", "xxhash", "zmq"}
OWN_LIBRARIES = {
    "weightbus": {"cupy", "typer", "rich", "pytest", "matplotlib", "safetensors"},
    "weightbus_local": {"cupy"},
    "weightbus_nixl": {"nixl", "nixl_cu12", "nixl_cu13", "numpy", "cupy"},
    "weightbus_ucx": {"ucxx", "libucx", "numpy", "cupy"},
    "weightbus_nccl": set(),
    "weightbus_torch": set(),
    "weightbus_sglang": {"httpx", "sglang"},
    "weightbus_vllm": {"httpx", "vllm", "ray"},
}
#: Part of core where a library may be used at all; everywhere else core stands on SHARED alone.
CORE_PARTS = {
    "cupy": ("gpu",), "typer": ("cli",), "rich": ("cli",), "matplotlib": ("cli",), "safetensors": ("cli",),
    "pytest": ("testing",),
}  # fmt: skip
UNPICKLING = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "gather_object",
              "scatter_object_list", "recv_object_list", "send_object_list"}  # fmt: skip
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def folders(name: str) -> list[Path]:
    return sorted(path for path in (ROOT / name).iterdir() if path.is_dir() and path.name.startswith("weightbus_"))


PACKAGES = [ROOT / "weightbus", *folders("backends"), *folders("adapters")]
FILES = [(package, file) for package in PACKAGES for file in sorted(package.rglob("*.py"))]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere in a file, by statement or by `import_module` of a literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "" if not node.level else "."
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def faults(package: str, part: str, tree: ast.AST) -> list[str]:
    """What breaks the dependency rule in one file of `package`; `part` is its module below the package."""
    found = []
    for module in imports(tree):
        top = module.split(".")[0]
        if module == ".":
            found.append("a relative import")
        elif top in sys.stdlib_module_names or top in SHARED or top in ("weightbus", package):
            if module.startswith("torch.distributed") and package == "weightbus":
                found.append(f"core imports {module}")
        elif top not in OWN_LIBRARIES[package]:
            found.append(f"{package} imports {module}")
        elif package == "weightbus" and part not in CORE_PARTS[top]:
            found.append(f"weightbus.{part} imports {module}")
    return found


def unpickling(package: str, tree: ast.AST) -> list[str]:
    """Pickles that are consumed, or produced outside the one adapter whose engine demands them."""
    found = [f"imports {m}" for m in imports(tree) if m.split(".")[0] in PICKLES and package != "weightbus_sglang"]
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            from_pickle = node.module in PICKLES and names & {"load", "loads", "Unpickler"}
            if names & UNPICKLING or from_pickle:
                found.append(f"imports {sorted(names)} from {node.module}")
        elif name in UNPICKLING or name == "Unpickler":
            found.append(f"uses {name}")
        elif name in ("load", "loads") and getattr(getattr(node, "value", None), "id", "") in PICKLES | {"torch"}:
            found.append(f"uses {ast.unparse(node)}")
    return found


def parsed(file: Path) -> ast.AST:
    return ast.parse(file.read_text(), str(file))


def label(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


@pytest.mark.parametrize(("package", "file"), FILES, ids=label)
def test_the_dependency_rule(package: Path, file: Path) -> None:
    part = file.relative_to(package).with_suffix("").parts[0]
    assert faults(package.name, part, parsed(file)) == []


@pytest.mark.parametrize(("package", "file"), FILES, ids=label)
def test_no_pickle_is_consumed(package: Path, file: Path) -> None:
    assert unpickling(package.name, parsed(file)) == []


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("weightbus", "import weightbus_nixl"),
        ("weightbus", "def f():\n    from weightbus_torch.adapter import TorchAdapter"),
        ("weightbus", "import importlib\nimportlib.import_module('weightbus_local.host')"),
        ("weightbus", "import vllm"),
        ("weightbus", "import rich"),
        ("weightbus", "from . import errors"),
        ("weightbus", "import torch.distributed as dist"),
        ("weightbus_nixl", "from weightbus_ucx import UcxBackend"),
        ("weightbus_local", "import nixl_cu12"),
        ("weightbus_torch", "import vllm"),
        ("weightbus_vllm", "import weightbus_nccl"),
    ],
)
def test_the_dependency_rule_sees_what_it_forbids(package: str, text: str) -> None:
    assert len(faults(package, "bus", ast.parse(text))) == 1


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("weightbus", "import pickle"),
        ("weightbus_vllm", "from cloudpickle import dumps"),
        ("weightbus_sglang", "import pickle\npickle.loads(b'')"),
        ("weightbus_sglang", "from pickle import loads"),
        ("weightbus_sglang", "import pickle\nclass U(pickle.Unpickler): pass"),
        ("weightbus", "socket.recv_pyobj()"),
        ("weightbus_nccl", "import torch.distributed as d\nd.broadcast_object_list([])"),
        ("weightbus_torch", "import torch\ntorch.load('x')"),
    ],
)
def test_the_pickle_rule_sees_what_it_forbids(package: str, text: str) -> None:
    assert len(unpickling(package, ast.parse(text))) == 1


def test_every_plugin_folder_is_in_the_tables_the_wheel_and_the_entry_points() -> None:
    listed = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(listed) == sorted(str(package.relative_to(ROOT)) for package in PACKAGES)
    assert set(OWN_LIBRARIES) == {package.name for package in PACKAGES}
    for group, parent in (("weightbus.backends", "backends"), ("weightbus.adapters", "adapters")):
        points = PROJECT["project"]["entry-points"][group]
        modules = {value.split(":")[0] for value in points.values()} - {"weightbus.loopback"}
        assert modules == {package.name for package in folders(parent)}
        extras = set(PROJECT["project"]["optional-dependencies"])
        assert set(points) - extras == ({"loopback"} if parent == "backends" else set())
        assert all(
            value == f"weightbus_{name}:{value.split(':')[1]}" for name, value in points.items() if name != "loopback"
        )


def test_plugin_folders_are_plain_and_typed() -> None:
    for parent in ("backends", "adapters"):
        assert not (ROOT / parent / "__init__.py").exists()
        strays = [path.name for path in (ROOT / parent).glob("*") if path.name[0] not in "._" and path not in PACKAGES]
        assert strays == []
    assert [package.name for package in PACKAGES if not (package / "py.typed").exists()] == []


def coroutine_members(cls: type) -> list[str]:
    """Members, inherited ones too, for which Ray would make an actor an asyncio actor."""
    return [
        name
        for name, member in inspect.getmembers(cls)
        if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
    ]


def test_no_public_class_has_a_coroutine_member() -> None:
    public = [getattr(weightbus, name) for name in weightbus.__all__]
    public += [value for module in (adapter, backend) for value in vars(module).values()]
    classes = [value for value in public if inspect.isclass(value)]
    assert weightbus.WeightBus in classes and backend.Endpoint in classes
    assert {cls.__name__: coroutine_members(cls) for cls in classes if coroutine_members(cls)} == {}


def test_a_coroutine_member_would_be_seen() -> None:
    class Base:
        async def wait(self) -> None: ...

        async def stream(self):  # type: ignore[no-untyped-def]
            yield 1

    assert coroutine_members(type("Child", (Base,), {})) == ["stream", "wait"]
