"""Compiles programs with XLA, and calls them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from ..observe import metrics
from . import heap, interruptible, private, private_processes
from .clients import is_own, threads_of
from .machine import processor_facts
from .private import Fast
from .store import StoreProtocol


def without_outer_frames() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which objects that JAX creates (executables, arrays) do not record the Python frames outside of the context.

    Otherwise each object would keep alive the code objects of the frames that created it. Among these is the code that TorchDynamo has
    generated, which in turn keeps the program alive. So neither the code nor the program would ever be freed.
    """
    return Fast.traceback_scope() if Fast.traceback_scope is not None else contextlib.nullcontext()


# Memory orders by array index: dimension i in memory is dimension orders[index][i] of the array.
Orders = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class XlaProgram:
    """A compiled program.

    Attributes:
        call: Runs the program on arrays and returns arrays. The caller must pass the right shapes, dtypes and devices: nothing checks them.
        text: Returns the optimized HLO.
        is_large: True if a call needs so much heap memory that glibc was set to keep freed memory (heap.py).
        calls_back: True if the program may call torch's kernels.
        orders: Returns the memory orders of the arguments, and those of the results. Both are empty on dynaxla's own clients, whose arrays
            are all row-major.
        execute: Runs the program in a single C++ call, and returns the argument of `results`; None if that is not supported.
        results: Returns the result arrays of an execution, which `execute` has returned.
        mesh: The mesh on which the program runs; None on one device.
        memory: Returns XLA's memory statistics for one device; None if the program consists of several XLA programs.
        result_shardings: Returns the shapes and shardings of the results; empty if they are unknown.
        costs: Returns XLA's cost analysis for one device, by name, such as "flops"; empty if there is none.
    """

    call: Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
    text: Callable[[], str]
    is_large: bool = False
    calls_back: bool = True
    orders: Callable[[], tuple[Orders, Orders]] = lambda: ({}, {})
    execute: Callable[[Sequence[jax.Array]], Any] | None = None
    results: Callable[[Any], Sequence[jax.Array]] = list
    mesh: Mesh | None = None
    memory: Callable[[], Any] = lambda: None
    result_shardings: Callable[[], Sequence[tuple[tuple[int, ...], Sharding]]] = lambda: ()
    costs: Callable[[], Mapping[str, float]] = lambda: {}


def compile_lowered(
    lowered: jax.stages.Lowered,
    device: jax.Device,
    options: Mapping[str, Any],
    store: StoreProtocol | None = None,
    keep_heap: bool = True,
    processes: Sequence[jax.Device] = (),
) -> XlaProgram:
    """Compiles a lowered program with XLA, or loads it from the store.

    Args:
        lowered: The program. Unused arguments must not have been dropped (`keep_unused=True`).
        device: The device on which the program runs.
        options: XLA's options, by name.
        store: A store of compiled programs; None for none. Only programs on dynaxla's own clients that XLA can serialise are stored.
        keep_heap: True if glibc may be set to keep freed memory, in case the program needs much of it (heap.py).
        processes: One device of each process, for a program with XLA's own collectives.

    Raises: jax.errors.JaxRuntimeError; NotImplementedError for features that JAX's own compiler lacks on this platform.
    """
    if not is_own(device) and not processes:
        return _compile_with_jax(lowered, options, device.platform == "cpu")
    client = device.client
    compile_options, devices = private.compile_options(device, options)
    if processes:
        compile_options, devices = private_processes.as_replicas(compile_options, processes), private_processes.device_list(processes)
    module, callbacks = lowered.compiler_ir("stablehlo"), private.host_callbacks(lowered)
    key = _store_key(module, device, options) if store is not None and not callbacks and not processes else ""
    executable = None
    if store is not None and key and (data := store.get(key)) is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # XLA cannot load the entry, e.g. because it is for another processor
            executable = client.deserialize_executable(data, devices, compile_options)
            metrics.add("loads")
    if executable is None:
        compiling = functools.partial(client.compile_and_load, module, devices, compile_options, host_callbacks=callbacks)
        executable = interruptible.call(compiling)
        if store is not None and key:
            store.put(key, client.serialize_executable(executable))
    return _program(executable, keep_heap, bool(callbacks))


def compile_parts(
    lowered: jax.stages.Lowered,
    device: jax.Device,
    processes: Sequence[jax.Device],
    options: Mapping[str, Any],
    mesh: Mesh,
    keep_heap: bool = True,
) -> XlaProgram:
    """Compiles a lowered program with XLA's SPMD partitioner. The returned program runs this process's partition.

    Args:
        lowered: The program.
        device: This process's device.
        processes: One device of each process, in the mesh's order.
        options: XLA's options, by name.
        mesh: The mesh for which the program was lowered.
        keep_heap: See `compile_lowered`.

    Raises: as `compile_lowered` does.
    """
    compile_options, _ = private.compile_options(device, options)
    compile_options, devices = private_processes.as_partitions(compile_options, processes), private_processes.device_list(processes)
    compiling = functools.partial(device.client.compile_and_load, lowered.compiler_ir("stablehlo"), devices, compile_options)
    executable = interruptible.call(compiling)
    program = _program(executable, keep_heap, False)
    return dataclasses.replace(program, mesh=mesh, result_shardings=functools.partial(private_processes.shardings_of, executable, mesh))


def _program(executable: Any, keep_heap: bool, calls_back: bool) -> XlaProgram:
    """Returns the program of an executable that one of dynaxla's own clients has compiled or loaded."""
    memory = executable.get_compiled_memory_stats()
    is_large = keep_heap and memory.temp_size_in_bytes + memory.output_size_in_bytes > heap.LARGE_BYTES
    if is_large:
        heap.keep_freed_memory()

    def text() -> str:
        return "\n".join(module.to_string() for module in executable.hlo_modules())

    return XlaProgram(_call(executable), text, is_large, calls_back, memory=lambda: memory)


# Matches the targets of custom calls in StableHLO text.
_CUSTOM_CALL_TARGET = re.compile(r'custom_call @"?([^"(]+)|call_target_name = "([^"]+)"')
# The prefixes of the two kinds of references: the key of a compiled program in a store, and the bytecode of a lowered program.
_STORED, _LOWERED = b"stored:", b"lowered:"


def reference_to(lowered: jax.stages.Lowered, device: jax.Device, options: Mapping[str, Any]) -> bytes | None:
    """Returns a reference to a program that `compile_lowered` has just compiled with a store. `from_reference` loads the program again.

    Returns None for programs that cannot be loaded without lowering them again: those on JAX's own clients, with host callbacks, or with
    custom calls that JAX initialises when it lowers a program (such as LAPACK's).
    """
    if not is_own(device) or private.host_callbacks(lowered):
        return None
    module = lowered.compiler_ir("stablehlo")
    text = module.operation.get_asm(large_elements_limit=16)
    if not all(name.startswith("__onednn$") for names in _CUSTOM_CALL_TARGET.findall(text) for name in names if name):
        return None
    if key := _store_key(module, device, options):
        return _STORED + key.encode()
    code = io.BytesIO()
    module.operation.write_bytecode(code)  # with the Python source locations, from which XLA derives names of instructions
    return _LOWERED + code.getvalue()


def is_stored(reference: bytes) -> bool:
    """True if a reference is to a compiled program in a store, not to a lowered program."""
    return reference.startswith(_STORED)


def from_reference(
    reference: bytes, device: jax.Device, options: Mapping[str, Any], store: StoreProtocol, keep_heap: bool = True
) -> XlaProgram | None:
    """Returns the program of a reference; None if the store no longer has the program.

    Args:
        reference: The reference.
        device, options, store, keep_heap: See `compile_lowered`.

    Raises: jax.errors.JaxRuntimeError.
    """
    compile_options, devices = private.compile_options(device, options)
    if reference.startswith(_LOWERED):
        code = reference.removeprefix(_LOWERED)
        executable = interruptible.call(functools.partial(device.client.compile_and_load, code, devices, compile_options))
        return _program(executable, keep_heap, False)
    compiled = store.get(reference.removeprefix(_STORED).decode())
    if compiled is None:
        return None
    executable = device.client.deserialize_executable(compiled, devices, compile_options)
    metrics.add("loads")
    return _program(executable, keep_heap, False)


def compile_for_inspection(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> XlaProgram:
    """Compiles a program for the devices of a topology (topologies.py). The program cannot be called.

    Raises: jax.errors.JaxRuntimeError, also if the program needs more memory than a device has.
    """
    compiled = interruptible.call(functools.partial(lowered.compile, compiler_options=dict(options) or None))

    def call(_: Sequence[jax.Array]) -> Sequence[jax.Array]:
        raise AssertionError("a program for a topology cannot run")

    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return XlaProgram(
        call,
        lambda: compiled.as_text() or "",
        mesh=next((sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)), None),
        memory=compiled.memory_analysis,
        result_shardings=functools.partial(_result_shardings, compiled),
        costs=lambda: compiled.cost_analysis() or {},
    )


def _compile_with_jax(lowered: jax.stages.Lowered, options: Mapping[str, Any], is_cpu: bool) -> XlaProgram:
    """Compiles a program for a device of one of JAX's own clients."""
    calls_back = bool(private.host_callbacks(lowered))
    compiled = lowered.compile(compiler_options=dict(options) or None)
    executable = Fast.runtime_executable(compiled) if Fast.runtime_executable is not None else None

    def call(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return jax.tree.leaves(compiled(*arrays))

    def text() -> str:
        return compiled.as_text() or ""

    def orders() -> tuple[Orders, Orders]:
        return _orders(compiled.input_formats), _orders(compiled.output_formats)

    if executable is None or not hasattr(executable, "execute_sharded"):
        return XlaProgram(call, text, calls_back=calls_back, orders=orders)
    devices = executable.local_devices()
    in_flight = [_in_flight.setdefault(device, deque(maxlen=_MAX_IN_FLIGHT)) for device in devices]
    execute = functools.partial(executable.execute_sharded, with_tokens=True)
    mesh = None if len(devices) == 1 else _mesh_of(compiled)
    fields: dict[str, Any] = {"calls_back": calls_back, "orders": orders, "mesh": mesh, "memory": executable.get_compiled_memory_stats}
    fields |= {"result_shardings": functools.partial(_result_shardings, compiled), "costs": lambda: compiled.cost_analysis() or {}}
    if len(devices) > 1 and Fast.result_handler is None:
        return XlaProgram(call, text, **fields)
    assemble = _result_assembler() if len(devices) == 1 else _mesh_result_assembler(compiled)

    def results(execution: Any) -> Sequence[jax.Array]:
        token = execution.consume_token()
        for tokens in in_flight:
            tokens.append(token)
        return assemble(execution)

    def run(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return results(execute(arrays))

    def wait(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return jax.block_until_ready(run(arrays))

    # JAX's own CPU client runs a program in another thread. If a torch kernel may raise an exception there, the call waits, so that it can
    # raise this exception.
    if calls_back and is_cpu:
        return XlaProgram(wait, text, **fields)
    return XlaProgram(run, text, execute=execute, results=results, **fields)


# By device, the completion tokens of the device's latest programs. A token is kept even if nothing refers to the program's results. XLA has
# at most 32 programs in flight on a device (openxla/xla, max_inflight_computations), so this many tokens suffice.
_in_flight: dict[jax.Device, deque[Any]] = {}
_MAX_IN_FLIGHT = 64


def wait_for(device: jax.Device) -> None:
    """Waits until all programs that were dispatched to a device of JAX's own client are done, even those whose results are freed.

    Raises: the error of a program that has failed.
    """
    in_flight = _in_flight.get(device, deque())
    for token in list(in_flight):
        try:
            token.block_until_ready()
        finally:
            with contextlib.suppress(ValueError):  # another thread has removed the token
                in_flight.remove(token)


def _orders(formats: Any) -> Orders:
    """Returns the memory orders of the arrays in a pytree of JAX formats, by index."""
    return {index: tuple(array_format.layout.major_to_minor) for index, array_format in enumerate(jax.tree.leaves(formats))}


def _store_key(module: Any, device: jax.Device, options: Mapping[str, Any]) -> str:
    """Returns the key of a compiled program in a store: a hash of the program, the options and the machine.

    Returns "" for programs that are not stored: those whose compilation the user wants to dump (xla_dump_to), and those that XLA cannot
    serialise. Programs with oneDNN calls cannot be serialised: jaxlib fails without an error message (std::bad_alloc at best).
    """
    if any("dump" in name for name in (*options, os.environ.get("XLA_FLAGS", ""))):
        return ""
    copy = module.operation.clone()
    with module.context:
        copy.attributes["sym_name"] = type(copy.attributes["sym_name"]).get("program")  # graph names contain a running number
    code = _bytecode(copy, module.context)
    if code is None or b"__onednn$" in code:
        return ""
    parts = (private.jaxlib_version(), threads_of(device), processor_facts(), os.environ.get("XLA_FLAGS", ""), sorted(options.items()))
    return hashlib.blake2b(code + repr(parts).encode(), digest_size=32).hexdigest()


def fingerprint(lowered: jax.stages.Lowered) -> bytes:
    """Returns a hash of the lowered program without its Python source locations, which are removed from `lowered` itself, too."""
    module = lowered.compiler_ir("stablehlo")
    code = _bytecode(module.operation, module.context)
    return hashlib.blake2b(str(module).encode() if code is None else code).digest()


def _bytecode(operation: Any, context: Any) -> bytes | None:
    """Returns a module as bytecode without source locations. None if jaxlib does not support it.

    The locations are also removed from the module itself.
    """
    if Fast.pass_manager is None:
        return None
    try:
        with context:
            Fast.pass_manager.parse("builtin.module(strip-debuginfo)").run(operation)
    except Exception as error:
        private.gate(["pass_manager"], f"{type(error).__name__}: {error}")
        return None
    code = io.BytesIO()
    operation.write_bytecode(code)
    return code.getvalue()


def _results(execution: Any) -> Sequence[jax.Array]:
    """Returns the arrays of an execution on one device."""
    return [shards[0] for shards in execution.disassemble_into_single_device_arrays()]


def _mesh_of(compiled: jax.stages.Compiled) -> Mesh:
    """Returns the mesh on which a program runs."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next(sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))


def _result_shardings(compiled: jax.stages.Compiled) -> list[tuple[tuple[int, ...], Sharding]]:
    """Returns the shape and sharding of each result."""
    infos = jax.tree.leaves(compiled.out_info)
    return [(info.shape, sharding) for info, sharding in zip(infos, jax.tree.leaves(compiled.output_shardings), strict=True)]


def _mesh_result_assembler(compiled: jax.stages.Compiled) -> Callable[[Any], Sequence[jax.Array]]:
    """Returns a function that converts an execution on several devices to the arrays of its results."""
    make = Fast.result_handler
    assert make is not None
    results = zip(jax.tree.leaves(compiled.out_info), jax.tree.leaves(compiled.output_shardings), strict=True)
    handlers = [make(jax.core.ShapedArray(info.shape, info.dtype), sharding, committed=True) for info, sharding in results]
    return lambda execution: execution.consume_with_handlers(handlers)


def _handlers(results: Sequence[jax.Array]) -> list[Any] | None:
    """Returns jaxlib's result handlers, which create the result arrays of a later execution with the types and shardings of these results.

    Returns None if jaxlib has no working handlers.
    """
    make = Fast.result_handler
    if make is None:
        return None
    try:
        handlers = [make(result.aval, result.sharding, committed=result.committed) for result in results]
        arrays = [handler(result) for handler, result in zip(handlers, results, strict=True)]
        if all(array.aval == result.aval and array.sharding == result.sharding for array, result in zip(arrays, results, strict=True)):
            return handlers
        reason = "it makes arrays of another kind"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    private.gate(["result_handler"], reason)
    return None


def _call(executable: Any) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    """Returns a function that runs an executable on one device."""
    execute, results = executable.execute_sharded, _result_assembler()
    return lambda arrays: results(execute(arrays))


def _result_assembler() -> Callable[[Any], Sequence[jax.Array]]:
    """Returns a function that converts an execution on one device to the arrays of its results.

    From the second execution on, the arrays get the types and shardings of the first execution's results. That is faster.
    """
    handlers: list[Any] | None = None

    def results(execution: Any) -> Sequence[jax.Array]:
        nonlocal handlers
        if handlers is not None:
            return execution.consume_with_handlers(handlers)
        arrays = _results(execution)
        handlers = _handlers(arrays)
        return arrays

    return results
