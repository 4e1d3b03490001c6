"""Functions that replace internals of dynaxla, to simulate a situation, or to count or record calls.

If an internal is renamed, only this module changes, and not the tests. The first argument is pytest's `monkeypatch`, which restores the
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
from dynaxla.lowering.cpu import gemv, split_k_gemv, torch_kernels
from dynaxla.lowering.implementations import Implementation, Implementations
from dynaxla.lowering.ops import (
    attention_implementations,
    elementwise,
    matmul,
    products_of_updates,
    quantized_weights,
    weight_gradients,
)
from dynaxla.lowering.ops.gradients_of_slices import sum_of_slice_gradients
from dynaxla.lowering.registry import Registry, lower_table
from dynaxla.lowering.settings import Settings
from dynaxla.lowering.tpu import pallas_attention
from dynaxla.passes import pipeline
from dynaxla.passes.aten import late_writes, repeated_blocks
from dynaxla.passes.jaxpr import open_layouts
from dynaxla.runtime import (
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
    """Simulates this version of jaxlib."""
    patch.setattr(private, "jaxlib_version", lambda: version)


def tested_releases(patch: Patch, releases: Mapping[str, tuple[str, str]]) -> None:
    """Sets the tested releases: by package, the oldest and the newest one."""
    patch.setattr(private, "KNOWN", releases)
    private.warn_of_newer_releases.cache_clear()


def processor(patch: Patch, *, avx2_alone: bool | None = None, intel: bool | None = None, wide_vectors: bool | None = None) -> None:
    """Simulates a processor.

    Args:
        patch: pytest's monkeypatch.
        avx2_alone: True if it has AVX2 and not AVX-512.
        intel: True if it is from Intel.
        wide_vectors: True if it has vectors of 512 bits.
    """
    for name, value in (("has_avx2_alone", avx2_alone), ("is_intel", intel), ("has_wide_vectors", wide_vectors)):
        if value is not None:
            patch.setattr(machine, name, lambda value=value: value)
    patch.setattr(stored, "_live_programs", type(stored._live_programs)())  # without programs of the real processor


# Facts on which stored programs and graphs depend: the function that returns each of them, and another value.
_FACTS: dict[str, tuple[Any, str, Any]] = {
    "versions": (machine, "versions", ("another",)),
    "sources": (machine, "sources", "another"),
    "processor": (machine, "processor_facts", "another"),
    "kernels": (torch.backends.cpu, "get_cpu_capability", "another"),
}


def other(fact: str) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a function that makes a context, in which one fact about the machine or the installed code differs."""
    target, name, answer = _FACTS[fact]
    return lambda: mock.patch.object(target, name, return_value=answer)


def libc(patch: Patch, function: Callable[[str], Callable[..., Any]]) -> None:
    """Replaces the functions of the C library that change settings of the heap."""
    patch.setattr(heap, "_function", function)


def root_user(patch: Patch, number: int) -> None:
    """Replaces the user id of root, whose cache directories are trusted."""
    patch.setattr(store, "_ROOT", number)


def accelerators(patch: Patch, found: Sequence[Any]) -> None:
    """Replaces the accelerators that JAX finds."""
    patch.setattr(devices, "_without_preallocation", lambda start: found)
    devices._accelerator.cache_clear()


def no_other_devices(patch: Patch) -> None:
    """Removes all registered devices except for torch's own."""
    patch.setattr(device_kinds, "_kinds", {})
    patch.setattr(devices, "_array_devices", {})


def torch_settings(patch: Patch, settings: Settings) -> None:
    """Replaces the settings of torch that lowerings read, on each platform."""
    patch.setattr(Settings, "current", staticmethod(lambda _: settings))


def findings_of_doctor(patch: Patch, examine: Callable[[bool], list[doctor.Finding]]) -> None:
    patch.setattr(doctor, "examine", examine)


# Compilation and programs


def compiler(patch: Patch, compile_lowered: Callable[..., Any]) -> None:
    """Replaces XLA's compiler, which compiles a lowered module."""
    patch.setattr(programs, "compile_lowered", compile_lowered)


def compiled_programs(patch: Patch) -> list[programs.XlaProgram]:
    """Returns a list that gets each program that XLA compiles."""
    compiled: list[programs.XlaProgram] = []
    real = programs.compile_lowered

    def compile_and_record(*args: Any, **kwargs: Any) -> programs.XlaProgram:
        compiled.append(real(*args, **kwargs))
        return compiled[-1]

    patch.setattr(build, "compile_lowered", compile_and_record)
    return compiled


def no_compilation_of_blocks(patch: Patch) -> None:
    """Equal blocks of a model do not become programs of their own."""
    patch.setattr(build, "compile_blocks", lambda *args: None)


def memory_to_give_back(patch: Patch, gives: bool) -> None:
    """Simulates torch's allocator.

    Args:
        patch: pytest's monkeypatch.
        gives: True if it has cached memory that it can return for XLA.
    """
    patch.setattr(streams, "give_back_memory", lambda _: gives)


def xla_is_lost(patch: Patch) -> None:
    """Simulates a fork of a process that has used XLA."""
    patch.setattr(forks, "has_lost_xla", lambda: True)


def objects_kept_from_destruction(patch: Patch, found: list[object]) -> None:
    """The list `found` gets XLA's objects that a fork must not destroy."""
    patch.setattr(forks, "leak", found.append)


def array_layout(patch: Patch, layout: Format) -> None:
    """Arguments with open layouts get this layout. On the CPU, XLA would choose the row-major layout."""
    patch.setattr(open_layouts, "_open", lambda _: layout)


def devices_of_graphs(patch: Patch, device: torch.device) -> None:
    """The scheduler finds this device for all graphs."""
    patch.setattr(scheduler, "graph_devices", lambda *_: {device})


def recorded_graphs_run_by_torch(patch: Patch) -> None:
    """torch's kernels run the graphs that compile_step records."""

    def run_by_torch(module: Callable[..., Any], examples: Sequence[torch.Tensor], options: config.Options) -> Callable[..., Any]:
        return module

    patch.setattr(recorded_graph, "compile_graph", run_by_torch)


def garbage_is_collected_after_traces(patch: Patch) -> None:
    """Collects garbage after each trace of a PyTorch function under JAX, instead of a check of its constants."""
    patch.setattr(torch_graphs, "_check_constants", lambda _: gc.collect())


def seen_options(patch: Patch) -> list[config.Options]:
    """Returns a list that gets the options of each compiled graph."""
    seen: list[config.Options] = []
    compile_graph = backend._compile

    def record(module: GraphModule, inputs: Sequence[Any], options: config.Options, **rest: Any) -> Callable[..., Any]:
        seen.append(options)
        return compile_graph(module, inputs, options, **rest)

    patch.setattr(backend, "_compile", record)
    return seen


def no_pickled_programs(patch: Patch) -> None:
    """Simulates a torch that cannot pickle the compiled result of a backend."""
    patch.setattr(artifact, "IS_POSSIBLE", False)


# Lowerings and implementations of ops


def without_lowering(patch: Patch, op: torch._ops.OpOverload) -> None:
    """Removes the lowering of an op."""
    find = registry.find
    patch.setattr(registry, "find", lambda node_op, *rest: None if node_op is op else find(node_op, *rest))


def replace_lowering(patch: Patch, op: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    """Replaces the lowering of an op on all platforms."""
    registry.fill()
    patch.setattr(registry, "_rules", {key: rule for key, rule in registry._rules.items() if key[0] is not op})
    registry.register(op, function)


def own_names_of_registry(patch: Patch) -> None:
    """Removes the lowerings that the test registers by name after the test."""
    patch.setattr(registry, "_named", dict(registry._named))


def lowerings_of_users(patch: Patch) -> None:
    """Simulates that a user has registered a lowering."""
    patch.setattr(registry, "external_lowerings", lambda: None)


def failing_load_of_lowerings(patch: Patch, load: Callable[[], None]) -> None:
    patch.setattr(lowerings, "load", load)


def empty_registry(patch: Patch) -> Registry:
    """Returns an empty registry, which `lower_table` fills, and whose content decides on decompositions."""
    empty = Registry()
    patch.setitem(lower_table.__globals__, "registry", empty)
    patch.setattr(decompositions, "registry", empty)
    return empty


def python_kernels(patch: Patch, names: Callable[[], list[str]]) -> None:
    """Replaces the list of ops with kernels in Python."""
    patch.setattr(private, "implemented_in_python", names)


def implementations_of(patch: Patch, table: Implementations[Any], by_name: Mapping[str, Implementation[Any]]) -> None:
    """Replaces the implementations of an op. The most specific one comes first."""
    patch.setattr(table, "by_name", dict(by_name))


def no_other_implementations(patch: Patch) -> None:
    """Removes all tables of implementations, so that those of the test are the only ones."""
    patch.setattr(implementations, "IMPLEMENTATIONS", {})


def needed_fallbacks(patch: Patch) -> None:
    """torch's kernels run all graphs."""
    patch.setattr(eager_fallback, "is_needed", lambda _: True)


def no_refusals(patch: Patch) -> None:
    """torch's kernels reject no operands."""
    patch.setattr(kernel_refusals, "refusal_of_node", lambda node: "")


def support_of_ops(patch: Patch, op_support: Callable[[str], list[op_table.OpSupport]]) -> None:
    """Replaces the table of ops of a platform."""
    patch.setattr(op_table, "op_support", op_support)


# Thresholds and times that are too large for tests


def late_writes_of(patch: Patch, smallest_bytes: int) -> None:
    """Sets the size from which writes become late writes."""
    patch.setattr(late_writes, "MIN_BYTES_PER_WRITE", smallest_bytes)


def late_writes_without_checks(patch: Patch) -> None:
    """Calls do not wait for checks before they write, as on a GPU."""
    patch.setattr(late_writes, "has_late_checks", lambda _: True)


def repeated_blocks_of(patch: Patch, smallest_bytes: int) -> None:
    """Sets the number of bytes, read by matrix products, from which equal blocks become one program."""
    patch.setattr(repeated_blocks, "MIN_PRODUCT_BYTES", smallest_bytes)


def most_guarded_values(patch: Patch, count: int) -> None:
    """Sets the maximum number of values that guards on Python state compare."""
    patch.setattr(snapshot, "_MAX_VALUES", count)


def all_operands_are_large(patch: Patch, asked: list[int] | None = None) -> None:
    """Treats all operands as too large for a trial of torch's kernels.

    Args:
        patch: pytest's monkeypatch.
        asked: gets the maximum number of elements of each smaller trial; 0 if there is no maximum.
    """
    patch.setattr(eager_strides, "_MAX_ELEMENTS", 0)
    patch.setattr(eager_strides, "_cached_results", {})
    if asked is not None:
        run = eager_strides._run_trial

        def counted(op: Any, args: Any, kwargs: Any, most: int | None, fake: bool) -> Any:
            asked.append(most or 0)
            return run(op, args, kwargs, most, fake)

        patch.setattr(eager_strides, "_run_trial", counted)


def rows_of_attention_blocks(patch: Patch, count: int) -> None:
    patch.setattr(attention_implementations, "_block_rows", lambda _: count)


def blocks_of_pallas_attention(patch: Patch, rows: int, columns: int) -> None:
    patch.setattr(pallas_attention, "_BLOCKS", (rows, columns))


def bytes_of_weight_gradient_blocks(patch: Patch, count: int) -> None:
    """Sets the size of a block for each thread."""
    patch.setattr(weight_gradients, "_BLOCK_BYTES_PER_THREAD", count)


def bytes_of_quantized_blocks(patch: Patch, count: int) -> None:
    patch.setattr(quantized_weights, "_BLOCK_BYTES", count)


def length_of_split_k_blocks(patch: Patch, length: int) -> None:
    patch.setattr(split_k_gemv, "_BLOCK", length)


def requests_before_compilation(patch: Patch, count: int) -> None:
    """Sets the number of calls after which a background compilation starts."""
    patch.setattr(program_cache, "_MIN_REQUESTS", count)


def programs_are_faster(patch: Patch) -> None:
    """Simulates measurements in which XLA's programs are faster than torch's kernels."""
    patch.setattr(EagerTimings, "prefers_kernels", lambda self, valid_fraction: False)


def programs_are_slower(patch: Patch) -> None:
    """Simulates measurements in which XLA's programs take hours."""
    add_program = EagerTimings.add_program
    patch.setattr(EagerTimings, "add_program", lambda self, seconds: add_program(self, seconds + 1e6))


def background_rests(patch: Patch) -> list[tuple[float, str]]:
    """Returns a list that gets the seconds and the thread of each pause of background compilations. No time passes in a pause."""
    pauses: list[tuple[float, str]] = []
    patch.setattr(background.time, "sleep", lambda seconds: pauses.append((seconds, threading.current_thread().name)))
    patch.setattr(background, "_RUN_SECONDS", 0.0)
    return pauses


def clock_of_contests(patch: Patch, now: Callable[[torch.device], float]) -> None:
    patch.setattr(contest, "now", now)


def choice_of_engine(patch: Patch, decide: Callable[[Mapping[str, float]], str]) -> None:
    """Replaces the decision of a contest, made from the seconds of each engine."""
    patch.setattr(SingleProcessBallot, "decide", lambda self, sizes, seconds: decide(seconds))


def no_pause_between_votes(patch: Patch) -> None:
    patch.setattr(engine_agreement, "_PAUSE", 0.0)


# Failures of checks


def failed_checks(patch: Patch, fails: bool) -> None:
    """Sets the device's answer: True if a check has failed that Python does not know yet."""
    patch.setattr(late_checks, "any_failed", lambda _: torch.tensor(float(fails)))


def late_report(patch: Patch, device: torch.device, report: Any) -> None:
    """Replaces the checks of a device whose results are pending."""
    patch.setitem(late_checks._reports, device, report)


def wrong_decoder_of_floats(patch: Patch) -> None:
    """Decodes each float of a stored graph as zero."""
    patch.setitem(graph_json._DECODERS, "float", lambda text: 0.0)


def file_of_callbacks(patch: Patch, file: str) -> None:
    """Replaces the file whose frames are removed from the tracebacks of callbacks."""
    patch.setattr(callbacks, "_DYNAXLA_FOLDER", file)


# Counts and records of calls


def _record_calls(patch: Patch, owner: Any, name: str, record: Callable[..., None]) -> None:
    real = getattr(owner, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        record(*args)
        return real(*args, **kwargs)

    patch.setattr(owner, name, recorded)


def object_walks(patch: Patch) -> list[list[Any]]:
    """Returns a list that gets the roots of each walk through Python objects, for recorded steps and for functions under JAX."""
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
    _record_calls(patch, torch_kernels, "call", lambda *_: found.append(1))
    return found


def checks(patch: Patch) -> list[str]:
    """Returns a list that gets the message of each check in a program. No check is compiled."""
    found: list[str] = []
    patch.setattr(Context, "require", lambda self, condition, error, message: found.append(message))
    return found


def small_products(patch: Patch) -> list[str]:
    """Returns a list that gets the names of the loops for products of few rows. These loops do not compute."""
    found: list[str] = []
    for module, name in ((gemv, "_by_lanes"), (gemv, "_by_slices"), (split_k_gemv, "product")):
        patch.setattr(module, name, lambda x, y, name=name: found.append(name))
    return found


def large_products_of_half_types(patch: Patch, is_supported: bool) -> list[str]:
    """Returns a list that gets an entry for each product that oneDNN would compute. These products are not computed.

    Args:
        is_supported: True if oneDNN supports half types.
    """
    found: list[str] = []
    patch.setattr(gemv.onednn_support, "supports", lambda dtype: is_supported)
    patch.setattr(gemv, "_by_onednn", lambda x, y, *_: found.append("onednn"))
    return found


def sums_of_slices(patch: Patch) -> list[bool]:
    """Returns a list with an entry for each chain of sums: True if it is computed as one sum of gradients of slices."""
    found: list[bool] = []

    def record(ctx: Context) -> Any:
        result = sum_of_slice_gradients(ctx)
        found.append(result is not None)
        return result

    patch.setattr(elementwise, "sum_of_slice_gradients", record)
    return found


def quantized_products(patch: Patch) -> list[bool]:
    """Returns a list with an entry for each product with quantized weights: True if it is dequantized in parts."""
    found: list[bool] = []
    real = matmul.product_of_quantized

    def record(*args: Any) -> Any:
        result = real(*args)
        found.append(result is not None)
        return result

    patch.setattr(matmul, "product_of_quantized", record)
    return found


def products_with_updated_operands(patch: Patch) -> list[torch.Tensor]:
    """Returns a list that gets the first operand of each product with an old tensor, and of each product with new slices."""
    found: list[torch.Tensor] = []
    for name in ("product", "strided_product"):
        _record_calls(patch, products_of_updates, name, lambda *args: found.append(args[0]))
    return found


def callers_of_programs(patch: Patch) -> list[set[str]]:
    """Returns a list that gets the set of names of all callers, for each call of a program."""
    found: list[set[str]] = []
    _record_calls(patch, CompiledGraph, "__call__", lambda *_: found.append({frame.name for frame in traceback.extract_stack()}))
    return found


def fast_calls(patch: Patch) -> list[bool]:
    """Returns a list with an entry for each repeated call of a graph that torch runs: True if it took the fast path."""
    found: list[bool] = []
    real = EagerExecutable.fast_path

    def record(self: EagerExecutable, args: list[Any]) -> Any:
        outputs = real(self, args)
        found.append(outputs is not None)
        assert outputs is None or args == []
        return outputs

    patch.setattr(EagerExecutable, "fast_path", record)
    return found


def background_tasks(patch: Patch) -> list[Any]:
    """Returns a list that gets each task of the background thread."""
    found: list[Any] = []
    _record_calls(patch, background, "enqueue", lambda task: found.append(task))
    return found


def returned_memory(patch: Patch, note: Callable[[], Any]) -> list[Any]:
    """Returns a list that gets `note()` instead of each return of freed memory to the system."""
    found: list[Any] = []
    patch.setattr(heap, "return_freed_memory", lambda: found.append(note()))
    return found


def kept_memory(patch: Patch) -> list[bool]:
    """Returns a list with an entry for each decision to keep freed memory."""
    found: list[bool] = []
    patch.setattr(heap, "keep_freed_memory", lambda: found.append(True))
    return found


def late_writes_found(patch: Patch) -> list[late_writes.LateWrites]:
    """Returns a list that gets the late writes of each program."""
    found: list[late_writes.LateWrites] = []

    def take(graph: Any) -> late_writes.LateWrites | None:
        if (late := late_writes.split_late_writes(graph)) is not None:
            found.append(late)
        return late

    patch.setattr(pipeline, "LATE_WRITES", take)
    return found


def reported_checks(patch: Patch) -> list[bool]:
    """Returns a list that gets True for each call whose checks all hold, and False otherwise. A failed check does not raise."""
    found: list[bool] = []
    patch.setattr(NativeBinding, "report", lambda _, code, checks, name: found.append(int(code) == len(checks)))
    return found


def inplace_updates(patch: Patch) -> list[str]:
    """Returns a list that gets the names of the ops that torch runs in place after programs."""
    found: list[str] = []
    _record_calls(patch, InplaceUpdate, "run", lambda update, *_: found.append(update.op.__name__))
    return found


def no_sizes_of_passes(patch: Patch) -> None:
    """Makes it an error to count the nodes of a graph."""
    patch.setattr(pipeline, "sizes", None)
