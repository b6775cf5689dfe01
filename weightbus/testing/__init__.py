"""Tools for testing plugins: conformance suites, peer processes, fault injection. Needs the extra ``testing``."""

try:
    import pytest
except ModuleNotFoundError:  # peers, sides and faults work without it
    pass
else:
    pytest.register_assert_rewrite("weightbus.testing.conformance", "weightbus.testing.adapters")
