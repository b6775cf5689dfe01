"""A failure shows the ends of the servers' logs: in CI nothing else is left of them."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.engines.peer import logs, tail


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"end of {log.name}", tail(log)) for log in dict.fromkeys(logs)]
    return report
