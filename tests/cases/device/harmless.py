"""Each call of torch with a tensor of the device, or with its storage, returns or raises. None ends the process.

`python -m cases.device.harmless` makes all calls. It writes the name of each call to a file first, and restarts after a call that ends the
process.
"""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import dynaxla

# These functions access an address that is given as a number, whatever the storage.
_OF_ADDRESSES = frozenset(["_expired", "_free_weak_ref", "_new_with_weak_ptr", "_set_cdata"])
# These functions wait, end the process, start others, write files, or change settings of the whole process.
_LEFT_OUT = frozenset([
    "load", "save", "compile", "set_default_device", "set_default_dtype", "set_default_tensor_type", "from_file", "_from_file",
    "import_ir_module", "set_num_threads", "set_num_interop_threads", "fork", "wait", "use_deterministic_algorithms", "set_grad_enabled",
    "set_deterministic_debug_mode", "set_anomaly_enabled", "set_flush_denormal", "set_vital", "read_vitals", "parse_ir", "parse_schema",
    "init_num_threads", "_write_file", "seed", "manual_seed", "set_autocast_enabled", "set_autocast_cpu_enabled", "set_warn_always",
    "set_printoptions", "autocast_increment_nesting", "autocast_decrement_nesting", "_disable_functionalization",
    "_enable_functionalization",
])  # fmt: skip


def _operands() -> list[Callable[[], tuple[Any, ...]]]:
    """Functions that make the arguments after the tensor or the storage."""

    def ones(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(size, dtype=dtype, device="jax")

    return [
        lambda: (), lambda: (ones(2, 2),), lambda: (1,), lambda: (0, ones(2, dtype=torch.int64)), lambda: (ones(2, 2).bool(), 2.0),
        lambda: ([ones(2, 2)],), lambda: ("cpu",), lambda: (torch.int32,), lambda: (torch.ones(2, 2),), lambda: (0, 1),
        lambda: ((2, 2),), lambda: (ones(2, 2).untyped_storage(),), lambda: (0, ones(2, 2, dtype=torch.int64), ones(2, 2)),
    ]  # fmt: skip


def _callables(owner: Any) -> list[str]:
    """Returns the names of an object's callable attributes."""
    left_out = _LEFT_OUT | _OF_ADDRESSES
    return [name for name in dir(owner) if name not in left_out and "cuda" not in name and callable(getattr(owner, name, None))]


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the name of each call, and the call."""
    for index, operands in enumerate(_operands()):
        for name in _callables(torch.UntypedStorage):
            if not name.startswith("__") or name in ("__getitem__", "__setitem__", "__deepcopy__", "__copy__", "__reduce__", "__iter__"):
                yield f"storage.{name} {index}", lambda name=name, args=operands: getattr(_tensor().untyped_storage(), name)(*args())
        for name in _callables(torch.Tensor):
            if not name.startswith("__") or name in ("__deepcopy__", "__reduce__", "__array__", "__dlpack__", "__setstate__", "__index__"):
                yield f"tensor.{name} {index}", lambda name=name, args=operands: getattr(_tensor(), name)(*args())
        if index > 2:
            continue
        for namespace in (torch, torch._C._nn, torch._C._linalg, torch._C._fft, torch._C._special, torch.nn.functional):
            for name in _callables(namespace):
                function = getattr(namespace, name)
                if not isinstance(function, type) and not name.startswith("__") and not (namespace is torch and name.startswith("_C")):
                    yield f"{namespace.__name__}.{name} {index}", lambda function=function, args=operands: function(_tensor(), *args())


def _tensor() -> torch.Tensor:
    return torch.arange(4.0).reshape(2, 2).to("jax")


def make_calls(chosen: list[tuple[str, Callable[[], Any]]], note: Callable[[str], Any]) -> int:
    """Passes the name of each call to `note`, and makes the call. Returns the number of calls that return."""
    returned = 0
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name, call in chosen:
            note(name)
            try:
                repr(call())
            except Exception:
                continue
            returned += 1
    return returned


def check_a_sample_of_all_calls() -> None:
    all_calls = list(calls())
    storage_calls = [item for item in all_calls if item[0].startswith("storage.")]
    other_calls = random.Random(5).sample([item for item in all_calls if not item[0].startswith("storage.")], 60)
    assert make_calls([*storage_calls, *other_calls], lambda _: None) > 30
    assert _tensor().sum().item() == 6


def main(seconds: float) -> None:
    """Prints each call that ends a process, and at the end the number of calls."""
    with tempfile.TemporaryDirectory() as folder:
        path, begin, call_count = Path(folder) / "last", 0, 0
        while True:
            path.write_text("")
            done = subprocess.run(
                [sys.executable, "-m", __spec__.name, str(path), str(begin)], capture_output=True, timeout=seconds, check=False
            )
            lines = path.read_text().splitlines()
            call_count += len(lines)
            if done.returncode == 0:
                print(f"{call_count} calls; {done.stdout.decode().strip()} of the last process returned")
                return
            print(f"{lines[-1] if lines else 'the start'} ended the process: {done.returncode}: {done.stderr.decode()[-300:]}", flush=True)
            begin += len(lines)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 3600.0)
    else:
        dynaxla.device.enable()
        with open(sys.argv[1], "a", buffering=1) as file:
            print(make_calls(list(calls())[int(sys.argv[2]) :], lambda name: file.write(f"{name}\n")))
