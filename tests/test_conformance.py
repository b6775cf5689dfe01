"""Every installed backend against the conformance suite; one that cannot run here is skipped with its reason."""

import pytest

from weightbus.registry import known
from weightbus.testing.conformance import BackendConformance


def bind(name: str) -> type[BackendConformance]:
    @pytest.fixture
    def backend(self: BackendConformance) -> str:
        return name

    return type(f"Test{name.capitalize()}", (BackendConformance,), {"backend": backend, "__module__": __name__})


globals().update({suite.__name__: suite for suite in map(bind, known("weightbus.backends"))})


class TestLoopbackMulticast(BackendConformance):
    options = {"multicast": True}  # noqa: RUF012

    @pytest.fixture
    def backend(self) -> str:
        return "loopback"


@pytest.mark.parametrize("change", ["override", "delete"])
def test_a_suite_that_drops_a_test_needs_a_reason(change: str) -> None:
    def test_closing_twice_is_one_closing(self: BackendConformance) -> None:
        return

    mine = test_closing_twice_is_one_closing if change == "override" else None
    with pytest.raises(TypeError, match="overrides test_closing_twice_is_one_closing without a reason"):
        type("TestMine", (BackendConformance,), {"test_closing_twice_is_one_closing": mine})


def test_a_suite_may_change_a_test_for_a_stated_reason() -> None:
    def test_closing_twice_is_one_closing(self: BackendConformance) -> None:
        return

    test_closing_twice_is_one_closing.reason = "the library closes by itself"  # type: ignore[attr-defined]
    members = {"test_closing_twice_is_one_closing": test_closing_twice_is_one_closing}
    assert issubclass(type("TestMine", (BackendConformance,), members), BackendConformance)
