"""A pytest plugin (-p commands.gpu_report.pytest_facts) that writes a fact when a test begins and when it ends: a crash costs one test."""

from __future__ import annotations

import pytest

from . import facts

BEGIN, END = "test begins", "test ends"


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    facts.write("pytest", BEGIN, id=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        error = {"error": str(report.longrepr)[-facts.LONGEST_TEXT :]} if report.failed else {}
        facts.write("pytest", END, id=report.nodeid, outcome=report.outcome, took_seconds=round(report.duration, 2), **error)
