"""Programs under `sizes="buckets"`: every size is rounded up, and padding spoils all that depends on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import rounded_sizes

from dynaxla import backend
from dynaxla.capture import round_up


@contextmanager
def everywhere() -> Iterator[None]:
    """Inside, sizes that may be are rounded up, by two."""
    engine_for = backend.engine_for

    def engine(options: Any, **settings: Any) -> Any:
        return engine_for(dataclasses.replace(options, sizes="buckets"), **settings)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(backend, "engine_for", engine))
        stack.enter_context(mock.patch.object(round_up, "rounded", lambda size: size + 2 if size > 1 else size))
        stack.enter_context(rounded_sizes.poisoned())
        yield
