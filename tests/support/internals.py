"""The internals of dynaxla that tests replace, each by a function that says what is simulated, lowered or counted.

If a redesign moves one of them, this module changes and the tests stay. The first argument is pytest's `monkeypatch`, which restores the
internals after the test.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from jax.experimental.layout import Format
from torch.fx import GraphModule

from dynaxla import backend, config, doctor, forks
from dynaxla.autoselect import contest, engine_agreement
from dynaxla.autoselect.contest import SingleProcessBallot
from dynaxla.buffers import device_kinds
from dynaxla.buffers.native import NativeBinding
from dynaxla.capture import decompositions, eager_strides, graph_json
from dynaxla.cli import op_table
from dynaxla.engine import artifact, build, program_cache, scheduler, stored
from dynaxla.engine.eager_executable import EagerExecutable
from dynaxla.engine.eager_timings import EagerTimings
from dynaxla.engine.xla import CompiledGraph
from dynaxla.guards import object_walker, snapshot, state_changes
from dynaxla.interop import torch_graphs
from dynaxla.lowering import implementations, kernel_refusals, registry
from dynaxla.lowering import ops as lowerings
from dynaxla.lowering.context import Context
from dynaxla.lowering.cpu import gemv, split_k_gemv, torch_kernels, weight_orders
from dynaxla.lowering.implementations import Implementation, Implementations
from dynaxla.lowering.ops import (
    attention_implementations,
    elementwise,
    matmul,
    products_of_updates,
    quantized_weights,
    weight_gradients,
)
from dynaxla.lowering.ops.gradients_of_slices import sum_of_slices
from dynaxla.lowering.registry import Registry, lower_table
from dynaxla.lowering.settings import Settings
from dynaxla.lowering.tpu import pallas_attention
from dynaxla.passes import pipeline
from dynaxla.passes.aten import late_writes, repeated_blocks
from dynaxla.passes.jaxpr import open_layouts
from dynaxla.runtime import (
    affinity,
    background,
    callbacks,
    devices,
    eager_fallback,
    heap,
    late_checks,
    machine,
    private,
    programs,
    store,
    streams,
)
from dynaxla.training import recorded_graph
from dynaxla.training.updates import InplaceUpdate

Patch = pytest.MonkeyPatch


# The machine and the installed releases


def jaxlib_release(patch: Patch, version: str) -> None:
    """jaxlib has this version."""
    patch.setattr(private, "jaxlib_version", lambda: version)


def tested_releases(patch: Patch, releases: Mapping[str, tuple[str, str]]) -> None:
    """dynaxla is tested with these: by package, the oldest and the newest."""
    patch.setattr(private, "KNOWN", releases)
    private.warn_of_newer_releases.cache_clear()


def processor(patch: Patch, *, avx2_alone: bool | None = None, intel: bool | None = None, wide_vectors: bool | None = None) -> None:
    """The processor has AVX2 and not AVX-512; it is Intel's; it has vectors of 512 bits."""
    for name, value in (("has_avx2_alone", avx2_alone), ("is_intel", intel), ("has_wide_vectors", wide_vectors)):
        if value is not None:
            patch.setattr(machine, name, lambda value=value: value)
    patch.setattr(stored, "_live_programs", type(stored._live_programs)())  # programs of the real processor


# Facts on which stored programs and graphs depend, each with the function that tells it, and another answer.
_FACTS: dict[str, tuple[Any, str, Any]] = {
    "versions": (machine, "versions", ("another",)),
    "sources": (machine, "sources", "another"),
    "processor": (machine, "processor_facts", "another"),
    "processors": (affinity, "processors", 99),
    "kernels": (torch.backends.cpu, "get_cpu_capability", "another"),
}


def other(fact: str) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a function whose context has another machine: its versions, sources, processor, processors or kernels differ."""
    target, name, answer = _FACTS[fact]
    return lambda: mock.patch.object(target, name, return_value=answer)


def threads_folder(patch: Patch, path: str) -> None:
    """The folder in which Linux lists the threads of this process."""
    patch.setattr(affinity, "_THREADS", path)


def libc(patch: Patch, function: Callable[[str], Callable[..., Any]]) -> None:
    """Functions of the C library, by name, for settings of the heap."""
    patch.setattr(heap, "_function", function)


def root_user(patch: Patch, number: int) -> None:
    """The user id of root, whose cache directories are trusted."""
    patch.setattr(store, "_ROOT", number)


def accelerators(patch: Patch, found: Sequence[Any]) -> None:
    """The accelerators that JAX sees."""
    patch.setattr(devices, "_without_preallocation", lambda start: found)
    devices._accelerator.cache_clear()


def no_other_devices(patch: Patch) -> None:
    """No device besides torch's own is registered."""
    patch.setattr(device_kinds, "_kinds", {})
    patch.setattr(devices, "_array_devices", {})


def torch_settings(patch: Patch, settings: Settings) -> None:
    """Lowerings read these settings of torch on each platform."""
    patch.setattr(Settings, "current", staticmethod(lambda _: settings))


def findings_of_doctor(patch: Patch, examine: Callable[[bool], list[doctor.Finding]]) -> None:
    patch.setattr(doctor, "examine", examine)


# Compilation and programs


def compiler(patch: Patch, compile_lowered: Callable[..., Any]) -> None:
    """XLA's compiler, which compiles a lowered module."""
    patch.setattr(programs, "compile_lowered", compile_lowered)


def compiled_programs(patch: Patch) -> list[programs.XlaProgram]:
    """Returns a list to which each program that XLA compiles is appended."""
    found: list[programs.XlaProgram] = []
    real = programs.compile_lowered

    def compile_and_keep(*args: Any, **kwargs: Any) -> programs.XlaProgram:
        found.append(real(*args, **kwargs))
        return found[-1]

    patch.setattr(build, "compile_lowered", compile_and_keep)
    return found


def no_compilation_of_blocks(patch: Patch) -> None:
    """Equal blocks of a model are one program with the rest."""
    patch.setattr(build, "compile_blocks", lambda *given: None)


def memory_to_give_back(patch: Patch, gives: bool) -> None:
    """gives: True if torch's allocator has cached memory that XLA can get."""
    patch.setattr(streams, "give_back_memory", lambda _: gives)


def xla_is_lost(patch: Patch) -> None:
    """The process is a fork of a process that has used XLA."""
    patch.setattr(forks, "has_lost_xla", lambda: True)


def objects_kept_from_destruction(patch: Patch, found: list[object]) -> None:
    """found: receives XLA's objects that a fork must not destroy."""
    patch.setattr(forks, "leak", found.append)


def array_layout(patch: Patch, layout: Format) -> None:
    """XLA chooses this layout for arguments whose layout is open; on the CPU it would choose the row-major one."""
    patch.setattr(open_layouts, "_open", lambda _: layout)


def devices_of_graphs(patch: Patch, device: torch.device) -> None:
    """Graphs are on this device for the scheduler."""
    patch.setattr(scheduler, "graph_devices", lambda *_: {device})


def recorded_graphs_run_by_torch(patch: Patch) -> None:
    """torch's kernels run the graphs of compile_step."""

    def run_by_torch(module: Callable[..., Any], examples: Sequence[torch.Tensor], options: config.Options) -> Callable[..., Any]:
        return module

    patch.setattr(recorded_graph, "compile_graph", run_by_torch)


def garbage_is_collected_after_traces(patch: Patch) -> None:
    """Python's garbage collector runs after each trace of a PyTorch function under JAX. Its constants are not checked."""
    patch.setattr(torch_graphs, "_check_constants", lambda _: gc.collect())


def seen_options(patch: Patch) -> list[config.Options]:
    """Returns a list to which the options of each compiled graph are appended."""
    found: list[config.Options] = []
    compile_graph = backend._compile

    def noted(module: GraphModule, inputs: Sequence[Any], options: config.Options, **rest: Any) -> Callable[..., Any]:
        found.append(options)
        return compile_graph(module, inputs, options, **rest)

    patch.setattr(backend, "_compile", noted)
    return found


def no_pickled_programs(patch: Patch) -> None:
    """torch offers no way to pickle the compiled result of a backend."""
    patch.setattr(artifact, "IS_POSSIBLE", False)


# Lowerings and implementations of ops


def without_lowering(patch: Patch, op: torch._ops.OpOverload) -> None:
    """An op has no lowering."""
    find = registry.find
    patch.setattr(registry, "find", lambda asked, *rest: None if asked is op else find(asked, *rest))


def replace_lowering(patch: Patch, op: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    """An op has this lowering on all platforms."""
    registry.fill()
    patch.setattr(registry, "_rules", {key: rule for key, rule in registry._rules.items() if key[0] is not op})
    registry.register(op, function)


def own_names_of_registry(patch: Patch) -> None:
    """Lowerings that the test registers by name are removed after it."""
    patch.setattr(registry, "_named", dict(registry._named))


def lowerings_of_users(patch: Patch) -> None:
    """A user has registered a lowering."""
    patch.setattr(registry, "external_lowerings", lambda: None)


def failing_load_of_lowerings(patch: Patch, load: Callable[[], None]) -> None:
    patch.setattr(lowerings, "load", load)


def empty_registry(patch: Patch) -> Registry:
    """Returns the empty registry in which `lower_table` registers, and which decides on decompositions."""
    made = Registry()
    patch.setitem(lower_table.__globals__, "registry", made)
    patch.setattr(decompositions, "registry", made)
    return made


def python_kernels(patch: Patch, names: Callable[[], list[str]]) -> None:
    """The kernels of ops that are registered from Python."""
    patch.setattr(private, "implemented_in_python", names)


def implementations_of(patch: Patch, table: Implementations[Any], by_name: Mapping[str, Implementation[Any]]) -> None:
    """An op has these implementations, the most specific one first."""
    patch.setattr(table, "by_name", dict(by_name))


def no_other_implementations(patch: Patch) -> None:
    """A table of implementations that the test makes is the only one."""
    patch.setattr(implementations, "IMPLEMENTATIONS", {})


def needed_fallbacks(patch: Patch) -> None:
    """torch's kernels run every graph."""
    patch.setattr(eager_fallback, "is_needed", lambda _: True)


def no_refusals(patch: Patch) -> None:
    """torch's kernels refuse no operands."""
    patch.setattr(kernel_refusals, "refusal_of_node", lambda node: "")


def support_of_ops(patch: Patch, op_support: Callable[[str], list[op_table.OpSupport]]) -> None:
    """The table of ops of a platform."""
    patch.setattr(op_table, "op_support", op_support)


def valid_packing(patch: Patch, is_valid: Callable[[], bool]) -> None:
    """oneDNN reads packed weights in the orders that dynaxla knows."""
    patch.setattr(weight_orders, "are_orders_valid", is_valid)


def packings(patch: Patch, found: list[weight_orders.Packing]) -> None:
    """The orders in which weights of matrix products can be packed."""
    patch.setattr(weight_orders, "_of_matrices", lambda dtype: found)


# Thresholds and times, which are too large for tests


def late_writes_of(patch: Patch, smallest_bytes: int) -> None:
    """Writes of so many bytes are taken out of programs."""
    patch.setattr(late_writes, "MIN_BYTES_PER_WRITE", smallest_bytes)


def late_writes_without_checks(patch: Patch) -> None:
    """Calls wait for no check before they write, as on a GPU."""
    patch.setattr(late_writes, "has_late_checks", lambda _: True)


def repeated_blocks_of(patch: Patch, smallest_bytes: int) -> None:
    """Equal blocks whose products read so many bytes are one program."""
    patch.setattr(repeated_blocks, "MIN_PRODUCT_BYTES", smallest_bytes)


def most_guarded_values(patch: Patch, count: int) -> None:
    """Guards on Python state refuse to look at more values."""
    patch.setattr(snapshot, "_MAX_VALUES", count)


def all_operands_are_large(patch: Patch, asked: list[int] | None = None) -> None:
    """Operands are too large for a trial of torch's kernels. asked: receives the number of elements of each smaller trial; 0 if all."""
    patch.setattr(eager_strides, "_MAX_ELEMENTS", 0)
    patch.setattr(eager_strides, "_trial_results", {})
    if asked is not None:
        run = eager_strides._try_kernel

        def counted(op: Any, args: Any, kwargs: Any, most: int | None, fake: bool) -> Any:
            asked.append(most or 0)
            return run(op, args, kwargs, most, fake)

        patch.setattr(eager_strides, "_try_kernel", counted)


def rows_of_attention_blocks(patch: Patch, count: int) -> None:
    patch.setattr(attention_implementations, "_block_rows", lambda _: count)


def blocks_of_pallas_attention(patch: Patch, rows: int, columns: int) -> None:
    patch.setattr(pallas_attention, "_BLOCKS", (rows, columns))


def bytes_of_weight_gradient_blocks(patch: Patch, count: int) -> None:
    """By thread."""
    patch.setattr(weight_gradients, "_BLOCK_BYTES_PER_THREAD", count)


def bytes_of_quantized_blocks(patch: Patch, count: int) -> None:
    patch.setattr(quantized_weights, "_BLOCK_BYTES", count)


def length_of_split_k_blocks(patch: Patch, length: int) -> None:
    patch.setattr(split_k_gemv, "_BLOCK", length)


def requests_before_compilation(patch: Patch, count: int) -> None:
    """A background compilation begins after so many calls."""
    patch.setattr(program_cache, "_MIN_REQUESTS", count)


def programs_are_faster(patch: Patch) -> None:
    """XLA's programs seem faster than torch's kernels."""
    patch.setattr(EagerTimings, "prefers_kernels", lambda self, valid_fraction: False)


def programs_are_slower(patch: Patch) -> None:
    """XLA's programs seem to take hours."""
    add_program = EagerTimings.add_program
    patch.setattr(EagerTimings, "add_program", lambda self, seconds: add_program(self, seconds + 1e6))


def background_rests(patch: Patch) -> list[tuple[float, str]]:
    """Returns a list for the seconds and the thread of each pause of background compilations, which do not wait and pause at once."""
    found: list[tuple[float, str]] = []
    patch.setattr(background.time, "sleep", lambda seconds: found.append((seconds, threading.current_thread().name)))
    patch.setattr(background, "_RUN_SECONDS", 0.0)
    return found


def clock_of_contests(patch: Patch, now: Callable[[torch.device], float]) -> None:
    patch.setattr(contest, "now", now)


def choice_of_engine(patch: Patch, decide: Callable[[Mapping[str, float]], str]) -> None:
    """The engine that a contest chooses by the seconds of each."""
    patch.setattr(SingleProcessBallot, "decide", lambda self, sizes, seconds: decide(seconds))


def no_pause_between_votes(patch: Patch) -> None:
    patch.setattr(engine_agreement, "_PAUSE", 0.0)


# Failures of checks


def failed_checks(patch: Patch, fails: bool) -> None:
    """True if the device knows a failed check that Python does not know yet."""
    patch.setattr(late_checks, "any_failed", lambda _: torch.tensor(float(fails)))


def late_report(patch: Patch, device: torch.device, report: Any) -> None:
    """The checks of a device whose results are awaited."""
    patch.setitem(late_checks._reports, device, report)


def wrong_decoder_of_floats(patch: Patch) -> None:
    """A stored graph has zero in place of each float."""
    patch.setitem(graph_json._DECODERS, "float", lambda text: 0.0)


def file_of_callbacks(patch: Patch, file: str) -> None:
    """The file whose frames are left out of the tracebacks of callbacks."""
    patch.setattr(callbacks, "_DYNAXLA_FOLDER", file)


# Counts and records of calls


def _note_calls(patch: Patch, owner: Any, name: str, note: Callable[..., None]) -> None:
    real = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args)
        return real(*args, **kwargs)

    patch.setattr(owner, name, noted)


def object_walks(patch: Patch) -> list[list[Any]]:
    """Returns a list for the roots of each walk through Python objects: of recorded steps, and of functions under JAX."""
    found: list[list[Any]] = []

    def walk(roots: Any, *rest: Any) -> Any:
        found.append(list(roots))
        return object_walker.walk(roots, *rest)

    patch.setattr(snapshot, "walk", walk)
    patch.setattr(state_changes, "walk", walk)
    return found


def torch_kernel_calls(patch: Patch) -> list[Any]:
    """Returns a list with an entry for each traced call of torch's kernels from a program."""
    found: list[Any] = []
    _note_calls(patch, torch_kernels, "call", lambda *_: found.append(1))
    return found


def checks(patch: Patch) -> list[str]:
    """Returns a list for the message of each check in a program. No check is compiled."""
    found: list[str] = []
    patch.setattr(Context, "require", lambda self, condition, error, message: found.append(message))
    return found


def small_products(patch: Patch) -> list[str]:
    """Returns a list for the names of the loops that compute products of few rows. They compute nothing."""
    found: list[str] = []
    for module, name in ((gemv, "_by_lanes"), (gemv, "_by_slices"), (split_k_gemv, "product")):
        patch.setattr(module, name, lambda x, y, name=name: found.append(name))
    return found


def sums_of_slices(patch: Patch) -> list[bool]:
    """Returns a list with an entry for each chain of sums: True if it is computed as one sum of gradients of slices."""
    found: list[bool] = []

    def noted(ctx: Context) -> Any:
        result = sum_of_slices(ctx)
        found.append(result is not None)
        return result

    patch.setattr(elementwise, "sum_of_slices", noted)
    return found


def quantized_products(patch: Patch) -> list[bool]:
    """Returns a list with an entry for each product with quantized weights: True if it is computed in blocks."""
    found: list[bool] = []
    real = matmul.product_of_quantized

    def noted(*args: Any) -> Any:
        result = real(*args)
        found.append(result is not None)
        return result

    patch.setattr(matmul, "product_of_quantized", noted)
    return found


def products_with_updated_operands(patch: Patch) -> list[torch.Tensor]:
    """Returns a list for the first operand of each product with an old tensor, and of each product with new slices."""
    found: list[torch.Tensor] = []
    for name in ("product", "strided_product"):
        _note_calls(patch, products_of_updates, name, lambda *args: found.append(args[0]))
    return found


def callers_of_programs(patch: Patch) -> list[set[str]]:
    """Returns a list for the names of the functions that call each program."""
    found: list[set[str]] = []
    _note_calls(patch, CompiledGraph, "__call__", lambda *_: found.append({frame.name for frame in traceback.extract_stack()}))
    return found


def fast_calls(patch: Patch) -> list[bool]:
    """Returns a list with an entry for each repeated call of a graph that torch runs: True if it took the fast path."""
    found: list[bool] = []
    real = EagerExecutable.fast_path

    def noted(self: EagerExecutable, args: list[Any]) -> Any:
        outputs = real(self, args)
        found.append(outputs is not None)
        assert outputs is None or args == []
        return outputs

    patch.setattr(EagerExecutable, "fast_path", noted)
    return found


def background_tasks(patch: Patch) -> list[Any]:
    """Returns a list for each task of the background thread."""
    found: list[Any] = []
    _note_calls(patch, background, "enqueue", lambda task: found.append(task))
    return found


def returned_memory(patch: Patch, note: Callable[[], Any]) -> list[Any]:
    """Returns a list for `note()` at each return of freed memory to the system, which does not happen."""
    found: list[Any] = []
    patch.setattr(heap, "return_freed_memory", lambda: found.append(note()))
    return found


def kept_memory(patch: Patch) -> list[bool]:
    """Returns a list with an entry for each decision to keep freed memory."""
    found: list[bool] = []
    patch.setattr(heap, "keep_freed_memory", lambda: found.append(True))
    return found


def late_writes_found(patch: Patch) -> list[late_writes.LateWrites]:
    """Returns a list for the writes that are taken out of each program."""
    found: list[late_writes.LateWrites] = []

    def take(graph: Any) -> late_writes.LateWrites | None:
        if (late := late_writes.split_late_writes(graph)) is not None:
            found.append(late)
        return late

    patch.setattr(pipeline, "LATE_WRITES", take)
    return found


def reported_checks(patch: Patch) -> list[bool]:
    """Returns a list with an entry for each call's checks: True if all hold. A failed check raises nothing."""
    found: list[bool] = []
    patch.setattr(NativeBinding, "report", lambda _, code, checks, name: found.append(int(code) == len(checks)))
    return found


def inplace_updates(patch: Patch) -> list[str]:
    """Returns a list for the names of the ops that torch runs in place after programs."""
    found: list[str] = []
    _note_calls(patch, InplaceUpdate, "run", lambda update, *_: found.append(update.op.__name__))
    return found


def no_sizes_of_passes(patch: Patch) -> None:
    """Counting the nodes of a graph fails."""
    patch.setattr(pipeline, "sizes", None)
