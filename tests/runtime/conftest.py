"""Fixture of tests that run with the fast private entry points, and with the public ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynaxla.runtime import clients, private


@pytest.fixture(params=["fast", "public"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "public":
        with private.force_public():
            assert not clients.is_own(clients.cpu_device())
            yield request.param
    else:
        assert set(private.fast_paths().values()) == {"live"}, private.fast_paths()
        assert clients.is_own(clients.cpu_device())
        yield request.param
