"""Stands in for SGLang's CUDA kernels on a CPU: every name and submodule imports, and calling one raises."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

__version__ = "0.0.0+stub"
_ABSENT = {"sgl_kernel.scalar_type"}  # sglang has a fallback of its own for these


def _names(module: str) -> Callable[[str], Any]:
    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*_: object, **__: object) -> None:
            raise NotImplementedError(f"{module}.{name} needs a GPU")

        return kernel

    return attribute


class _Submodules:
    """Finder and loader of every submodule."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        if not fullname.startswith("sgl_kernel.") or fullname in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _names(spec.name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Submodules())  # type: ignore[arg-type]
__getattr__ = _names("sgl_kernel")
