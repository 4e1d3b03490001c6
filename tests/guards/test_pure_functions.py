"""Tests of guards/pure_functions.py: C functions that only compute. All others count as impure, so that no recording drops an effect."""

from __future__ import annotations

import array
import collections
import datetime
import io
import itertools
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dynaxla.guards.pure_functions import constructor_effect_of, effect_of

X = torch.ones(2)
PURE: list[Callable[..., Any]] = [
    *(len, sorted, getattr, math.sqrt, "a".upper, [].append, {}.update, itertools.chain.from_iterable, dict.fromkeys, sys.getsizeof),
    *(array.array("i").append, collections.deque().rotate, datetime.date(2020, 1, 1).isoformat),
    *(np.zeros, np.ones(2).sum, np.float32(1).item, np.add.reduce, ValueError().with_traceback),
    *(torch.relu, torch.rand, X.add_, X.random_, X.register_hook, torch.bernoulli, torch._foreach_add, torch._fused_adamw_),
]
IMPURE: list[Callable[..., Any]] = [
    *(print, input, exec, open, time.time, time.sleep, os.getcwd, os.putenv, random.random, random.seed, sys.settrace),
    *(io.BytesIO().write, threading.Lock().acquire, datetime.datetime.now, datetime.date.today),
    *(np.ones(2).tofile, np.fromfile, np.random.rand, np.random.default_rng(0).normal),
    *(torch.Generator().manual_seed, torch.set_num_threads, torch.from_file),
    *(id, threading.get_ident),
]


@pytest.mark.parametrize("function", PURE, ids=lambda function: getattr(function, "__qualname__", str(function)))
def test_pure_functions(function: Callable[..., Any]) -> None:
    assert effect_of(function, within_torch=False) == ""


@pytest.mark.parametrize("function", IMPURE, ids=lambda function: getattr(function, "__qualname__", str(function)))
def test_impure_functions(function: Callable[..., Any]) -> None:
    assert function.__name__ in effect_of(function, within_torch=False)


def test_functions_that_torch_may_call() -> None:
    """torch may use locks, clocks and generated code, but not files or random numbers."""
    for function in (exec, time.time, threading.Lock().acquire, sys.settrace):
        assert effect_of(function, within_torch=True) == ""
    for function in (print, open, random.random, io.BytesIO().write):
        assert effect_of(function, within_torch=True)


def test_functions_that_trusted_code_may_call() -> None:
    """The standard library may look up objects by identity, and locks by thread."""
    for function in (id, threading.get_ident):
        assert effect_of(function, within_torch=False, within_trusted=True) == ""
    assert effect_of(time.time, within_torch=False, within_trusted=True)


def test_constructors() -> None:
    for kind in (list, ValueError, np.ndarray, torch.Tensor, collections.deque, datetime.date, type("Own", (), {})):
        assert constructor_effect_of(kind) == ""
    assert constructor_effect_of(io.FileIO) == "_io.FileIO()"
    assert constructor_effect_of(type(random.Random(0)).__base__) == "_random.Random()"
