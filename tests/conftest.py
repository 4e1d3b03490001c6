"""Each test starts with a reset TorchDynamo, a fixed seed, and no background compilation. Tests use one thread and no cache directory."""

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

# Collection of tests creates objects that stay, and the garbage collector would visit all of them repeatedly.
gc.disable()
# A test creates thousands of objects, but few cycles: with default thresholds, the search for cycles takes 4 % of the time (2026-11-28).
gc.set_threshold(10_000, 20, 50)
torch.set_num_threads(1)
# Processes that tests start use one thread, too, unless they set another number: threads of two workers would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of these processes import dynaxla: without bytecode, each would compile its sources for half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Files of an earlier run must not change what this run tests.
os.environ["DYNAXLA_CACHE"] = ""
# Tests of lowerings compare XLA's programs, also for sizes for which torch's kernels would run.
os.environ["DYNAXLA_COMPILE"] = "now"
skip_guard_profile()
skip_trace()

# The same examples in each run. `make explore` uses the other profile, with a seed.
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
    chosen_ids = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen_ids])
    items[:] = chosen


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    background.finish()  # otherwise, background compilations would be counted in the next test


@pytest.fixture
def quick_xla(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA compiles in a sixth of the time, to other code. A test marked `optimized` gets the code that users get.

    This fixture is for tests that do not depend on XLA's optimizations. Some folders use it for all of their tests.
    """
    if request.node.get_closest_marker("optimized") is None or quick_compilation.is_asked_for:
        quick_compilation.apply(monkeypatch)


@pytest.fixture(autouse=True)
def quick_xla_in_quick_runs(request: pytest.FixtureRequest) -> None:
    """Compiles everything quickly in `make quick`."""
    if quick_compilation.is_asked_for:
        request.getfixturevalue("quick_xla")


def pytest_collection_finish() -> None:
    _freeze_objects()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _freeze_objects()
    return result


def _freeze_objects() -> None:
    """Excludes all existing objects from garbage collection: a full collection would visit millions of objects, for a second or two."""
    gc.collect()
    gc.freeze()
