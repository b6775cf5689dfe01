"""Finds backends and adapters by name: an entry point, or ``"module:Class"``. Imports happen on use."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import pkgutil
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from weightbus.adapter import Adapter
from weightbus.backend import Backend
from weightbus.errors import AmbiguousPlugin, BackendUnavailable, ConfigError, UnknownPlugin, WeightBusError

BACKENDS = "weightbus.backends"
ADAPTERS = "weightbus.adapters"
_SUFFIX = {BACKENDS: "Backend", ADAPTERS: "Adapter"}
_KIND = {BACKENDS: "backend", ADAPTERS: "adapter"}

Plugin = TypeVar("Plugin", Backend, Adapter)


def load_backend(name: str, options: Mapping[str, Any] | None = None) -> Backend:
    """Make the backend of this name.

    Args:
        name: an entry point of group ``weightbus.backends``, or ``"module:Class"``.
        options: keyword arguments of its class.

    Raises:
        UnknownPlugin: nothing of this name is installed; lists what is.
        AmbiguousPlugin: two distributions offer it; names both.
        BackendUnavailable: its import failed; the cause is kept.
        ConfigError: not a backend, or options it refuses.
    """
    return _make(_find(BACKENDS, name), Backend, BACKENDS, name, options)  # type: ignore[type-abstract]


def load_adapter(name: str, options: Mapping[str, Any] | None = None) -> Adapter:
    """Make the adapter of this name, as `load_backend` does for backends, from group ``weightbus.adapters``.

    Raises:
        EngineError: the adapter talked to its engine and failed.
    """
    return _make(_find(ADAPTERS, name), Adapter, ADAPTERS, name, options)  # type: ignore[type-abstract]


def known(group: str) -> list[str]:
    """Sorted names that `load_backend` (``"weightbus.backends"``) or `load_adapter` can find. Imports no plugin."""
    names = {point.name for point in entry_points(group=group)}
    modules = [m.name for m in pkgutil.iter_modules() if m.name.startswith("weightbus_")]
    names.update(name for name in (m.removeprefix("weightbus_") for m in modules) if _by_convention(group, name))
    core = importlib.import_module("weightbus")
    names.update(module.name for module in pkgutil.iter_modules(core.__path__) if _by_convention(group, module.name))
    return sorted(names)


def _find(group: str, name: str) -> EntryPoint:
    if not isinstance(name, str) or not name:
        raise UnknownPlugin(f"a {_KIND[group]} is named by a non-empty text, not {name!r}", advice=_advice(group))
    if ":" in name:
        return EntryPoint(name, name, group)
    points = {_distribution(point): point for point in entry_points(group=group, name=name)}
    if len(points) > 1:
        raise AmbiguousPlugin(
            f"{_KIND[group]} {name!r} is offered by {' and '.join(sorted(points))}",
            advice="uninstall all but one, or name the class as 'module:Class'",
        )
    found = next(iter(points.values()), None) or _by_convention(group, name)
    if found is None:
        raise UnknownPlugin(f"no {_KIND[group]} {name!r} is installed", advice=_advice(group))
    return found


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def _by_convention(group: str, name: str) -> EntryPoint | None:
    """What a checkout on PYTHONPATH offers without entry points: class ``FooBackend`` of module ``weightbus_foo``.

    Core itself holds backends only. The class must be mentioned in the module's source: nothing is imported to find it.
    """
    class_name = "".join(part.capitalize() for part in name.split("_")) + _SUFFIX[group]
    for module in (f"weightbus_{name}", f"weightbus.{name}")[: 2 if group == BACKENDS else 1]:
        try:
            spec = importlib.util.find_spec(module)
            source = spec.loader.get_source(module) if spec and isinstance(spec.loader, _SourceLoader) else None
        except (ImportError, ValueError):
            continue
        if source and class_name in source:
            return EntryPoint(name, f"{module}:{class_name}", group)
    return None


_SourceLoader = importlib.machinery.SourceFileLoader


def _advice(group: str) -> str:
    return f"known {_KIND[group]}s: {', '.join(known(group)) or 'none'}; or name a class as 'module:Class'"


def _make(point: EntryPoint, base: type[Plugin], group: str, name: str, options: Mapping[str, Any] | None) -> Plugin:
    found = _import(point, group, name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{_KIND[group]} {name!r} is {point.value}, which is no subclass of {base.__module__}.{base.__name__}"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"{_KIND[group]} {name!r} ({point.value}) lacks {missing}")
    given = dict(options or {})
    _check_options(found, group, name, given)
    try:
        return found(**given)
    except WeightBusError:
        raise
    except ImportError as exc:
        raise _unavailable(point, group, name, exc) from exc
    except Exception as exc:
        raise ConfigError(
            f"{_KIND[group]} {name!r} refused its options: {type(exc).__name__}: {exc}",
            advice=f"check {_KIND[group]}_options",
        ) from exc


def _import(point: EntryPoint, group: str, name: str) -> object:
    try:
        return point.load()
    except WeightBusError:
        raise
    except AttributeError as exc:
        raise ConfigError(f"{_KIND[group]} {name!r}: no {point.value}: {exc}", advice=_advice(group)) from exc
    except ModuleNotFoundError as exc:
        if ":" in name and exc.name and f"{point.module}.".startswith(f"{exc.name}."):
            raise UnknownPlugin(f"no module {exc.name!r} for {_KIND[group]} {name!r}", advice=_advice(group)) from exc
        raise _unavailable(point, group, name, exc) from exc
    except Exception as exc:  # a broken shared library raises anything
        raise _unavailable(point, group, name, exc) from exc


def _unavailable(point: EntryPoint, group: str, name: str, exc: Exception) -> BackendUnavailable:
    distribution = _distribution(point)
    if ":" in name:
        advice = f"install what {point.module} imports"
    elif distribution in ("", "weightbus"):
        advice = f"pip install 'weightbus[{name}]'"
    else:
        advice = f"reinstall {distribution} with its dependencies"
    return BackendUnavailable(f"{_KIND[group]} {name!r} cannot be imported: {type(exc).__name__}: {exc}", advice=advice)


def _check_options(found: type, group: str, name: str, options: dict[str, Any]) -> None:
    signature = inspect.signature(found)
    accepted = [p.name for p in signature.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [] if open_ended else sorted(str(key) for key in options if key not in accepted)
    needed = [p.name for p in signature.parameters.values() if p.name in accepted and p.default is p.empty]
    missing = sorted(key for key in needed if key not in options)
    if unknown or missing:
        faults = [f"unknown option {key!r}" for key in unknown] + [f"option {key!r} is required" for key in missing]
        raise ConfigError(
            f"{_KIND[group]} {name!r}: {'; '.join(faults)}", advice=f"options: {', '.join(accepted) or 'none'}"
        )
