"""Every test starts with a clean TorchDynamo, a known seed and no compilation of an earlier test; deterministic threads; no cache
directory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from cases import faults
from dynaxla.runtime import background
from support import levels
from support.timing import quick_compilation
from support.timing.dynamo_speed import skip_guard_profile, skip_trace

# Collecting makes objects that stay, and the garbage collector would go through all of them again and again.
gc.disable()
# A test makes many thousands of objects, and few cycles: by default 4 % of the time goes to looking for these (2026-11-28).
gc.set_threshold(10_000, 20, 50)
torch.set_num_threads(1)
# Nor do the processes that tests start use several, unless they ask for them: two workers' threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of them import dynaxla: without bytecode each compiles its sources anew, for half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What an earlier run left must not decide what this one tests.
os.environ["DYNAXLA_CACHE"] = ""
# Tests of lowerings compare XLA's programs, for all sizes, and not torch's kernels.
os.environ["DYNAXLA_COMPILE"] = "now"
skip_guard_profile()
skip_trace()

# The same examples in every run; `make explore` takes the other profile, and a seed.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck)
)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the tests marked `quick` alone, one dtype each, compiled quickly: make quick")
    parser.addoption("--everything", action="store_true", help="all parameters of all tests: make test-all")
    parser.addoption("--planted", metavar="FAULT", help="a fault that is planted in dynaxla before the first test: make faults")


def pytest_configure(config: pytest.Config) -> None:
    quick_compilation.is_asked_for = config.getoption("quick")
    if name := config.getoption("planted"):
        fault = faults.all_faults()[name]()
        fault.__enter__()
        config.add_cleanup(lambda: fault.__exit__(None, None, None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    level = "quick" if config.getoption("quick") else "everything" if config.getoption("everything") else "usual"
    chosen = levels.chosen(items, level)
    kept = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = chosen


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    background.finish()  # those in the background would be counted in the next test


@pytest.fixture
def quick_xla(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA compiles in a sixth of the time, to other code; a test marked `optimized` gets the code that users get.

    For tests whose subject is what we hand to XLA, and what becomes of the results. Some folders take it for all of their tests.
    """
    if request.node.get_closest_marker("optimized") is None or quick_compilation.is_asked_for:
        quick_compilation.apply(monkeypatch)


@pytest.fixture(autouse=True)
def quick_xla_in_quick_runs(request: pytest.FixtureRequest) -> None:
    """`make quick` compiles everything quickly."""
    if quick_compilation.is_asked_for:
        request.getfixturevalue("quick_xla")


def pytest_collection_finish() -> None:
    _leave_what_stays()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    done = yield
    if nextitem is None or nextitem.path != item.path:
        _leave_what_stays()
    return done


def _leave_what_stays() -> None:
    """Takes modules, and what the tests of other files have left, out of the garbage collector's sight: each full collection would look at
    millions of objects, which takes a second or two."""
    gc.collect()
    gc.freeze()
