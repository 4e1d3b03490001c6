"""Handing memory between torch and XLA, and compiling and calling programs.

The only module that touches private functions of jaxlib and torch.

Each step has a fast way (private, a few microseconds) and a public way that needs nothing private. Which one is live is decided at
import, by looking; `force_public()` is for tests.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from platform import machine, processor
from typing import Any

import jax
import torch
from torch._dynamo import convert_frame
from torch._dynamo.guards import GuardManagerType

from .. import forks
from ..observe import metrics
from . import affinity, heap
from .layout import row_major
from .store import Store

# XLA imports memory only at this alignment, in bytes; below it, it copies.
ALIGNMENT = 64

# DLPack's number for memory of the host.
_DLPACK_CPU = 1


class _Fast:
    """Private entry points, found once. None where this jaxlib or torch lacks them."""

    to_buffer: Callable[..., jax.Array] | None = None
    to_capsule: Callable[..., Any] | None = None
    torch_to_capsule: Callable[..., Any] | None = None
    torch_from_capsule: Callable[..., torch.Tensor] | None = None
    storage_at: Callable[..., Any] | None = None
    guards: Callable[..., Any] | None = None
    guard_tree: Callable[..., Any] | None = None
    reinterpret: Callable[..., torch.Tensor] | None = None
    traceback_scope: Callable[[], contextlib.AbstractContextManager[Any]] | None = None


def _find_fast_paths() -> None:
    with contextlib.suppress(ImportError, AttributeError):
        from jaxlib import _jax

        _Fast.to_buffer = _jax.dlpack_managed_tensor_to_buffer
        _Fast.to_capsule = _jax.buffer_to_dlpack_managed_tensor
        _Fast.traceback_scope = _jax.TracebackScope
    _Fast.torch_to_capsule = getattr(torch._C, "_to_dlpack", None)
    _Fast.torch_from_capsule = getattr(torch._C, "_from_dlpack", None)
    _Fast.storage_at = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import guards

        _Fast.guards = guards.TensorGuards
        _Fast.guard_tree = guards.RootGuardManager
        _Fast.reinterpret = guards._reinterpret_tensor  # type: ignore[attr-defined]


_find_fast_paths()


def live_fast_paths() -> dict[str, bool]:
    """Which fast ways this installation has, for `dynaxla doctor`."""
    return {
        "import (jaxlib._jax.dlpack_managed_tensor_to_buffer)": bool(_Fast.to_buffer and _Fast.torch_to_capsule),
        "export (jaxlib._jax.buffer_to_dlpack_managed_tensor)": bool(_Fast.to_capsule and _Fast.torch_from_capsule),
        "alias without ownership (torch._C._construct_storage_from_data_pointer)": bool(_Fast.storage_at),
        "view of a result (torch._C._dynamo.guards._reinterpret_tensor)": bool(_Fast.reinterpret),
        "argument check (torch._C._dynamo.guards.TensorGuards)": bool(_Fast.guards),
        "dicts' versions (torch._C._dynamo.guards.RootGuardManager)": bool(_Fast.guard_tree),
        "execute in place (jaxlib.xla_client.make_cpu_client)": _is_own(cpu_device()),
        "short tracebacks (jaxlib._jax.TracebackScope)": bool(_Fast.traceback_scope),
    }


def below_caller() -> contextlib.AbstractContextManager[Any]:
    """Inside, what JAX makes (executables, arrays) remembers none of the frames outside.

    Each keeps the code of the frames that it was made under. Among them is the code that TorchDynamo generated, and as long as that lives,
    TorchDynamo keeps the program: neither would ever be freed.
    """
    return _Fast.traceback_scope() if _Fast.traceback_scope is not None else contextlib.nullcontext()


_public_only = False


@contextlib.contextmanager
def force_public() -> Iterator[None]:
    """Use the public way for everything made in this context. For tests."""
    global _public_only
    saved = {name: getattr(_Fast, name) for name in _Fast.__annotations__}
    for name in saved:
        setattr(_Fast, name, None)
    _public_only = True
    try:
        yield
    finally:
        _public_only = False
        for name, value in saved.items():
            setattr(_Fast, name, value)


def import_tensor(tensor: torch.Tensor, device: jax.Device, stream: int | None = None) -> jax.Array:
    """A jax.Array on the memory of a contiguous torch tensor. It shares the memory and keeps it alive; misaligned memory is copied.

    stream: on a GPU, XLA's stream, which already waits for the work that torch has queued on the tensor.
    """
    if _Fast.to_buffer and _Fast.torch_to_capsule:
        return _Fast.to_buffer(_Fast.torch_to_capsule(tensor), device, stream)
    with jax.enable_x64(True):
        return jax.dlpack.from_dlpack(tensor.detach())


def import_alias(tensor: torch.Tensor, shape: tuple[int, ...], device: jax.Device, stream: int | None = None) -> jax.Array:
    """A jax.Array on the aligned memory of a torch tensor, read as a row-major array of `shape`, that does not keep the memory alive.

    The caller may use it only while a live tensor has this address, and must check that before every use.
    Where torch lacks the means, the array does keep the memory alive, until the caller drops it.
    """
    strides = row_major(shape)
    if _Fast.storage_at is None:
        return import_tensor(torch.as_strided(tensor.detach(), shape, strides), device, stream)
    bytes_used = tensor.element_size()
    for size in shape:
        bytes_used *= size
    storage = _Fast.storage_at(tensor.data_ptr(), tensor.device, bytes_used)
    with torch.no_grad():
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, shape, strides)
    return import_tensor(view, device, stream)


def reinterpret(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Another tensor on the same storage; not a view to autograd. offset: elements from the tensor's own start."""
    if _Fast.reinterpret is not None:
        return _Fast.reinterpret(tensor, shape, stride, offset)
    return torch.as_strided(tensor.detach(), shape, stride, tensor.storage_offset() + offset)


def view_as(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """A tensor of another dtype on the same storage; not a view to autograd. Stride, offset (from the tensor's start): in its elements."""
    start, beyond = divmod(tensor.storage_offset() * tensor.element_size(), dtype.itemsize)
    if beyond:
        raise RuntimeError(
            f"a tensor of {tensor.dtype} that starts {beyond} bytes behind an element of {dtype} cannot be viewed as {dtype}"
        )
    with torch.no_grad():
        return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), start + offset, shape, stride)


def export_array(array: jax.Array, stream: int | None = None) -> torch.Tensor:
    """A torch tensor on the memory of a jax.Array; it shares the memory and keeps it alive. Waits until the array is computed (CPU), or
    lets `stream` wait for it (GPU)."""
    if _Fast.to_capsule and _Fast.torch_from_capsule:
        return _Fast.torch_from_capsule(_Fast.to_capsule(array, stream))
    return torch.from_dlpack(array)


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Inside, torch's ops run as kernels: no autograd, no autocast, whatever this thread's caller had set."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
        yield


def on_stream(context: Any, buffer: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, torch uses the stream on which a program calls back. context: of the callback; buffer: one of its buffers."""
    kind, index = buffer.__dlpack_device__()
    if kind == _DLPACK_CPU:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(context.stream, device=torch.device("cuda", index)))


def cpu_device() -> jax.Device:
    """The CPU device that programs compiled now run on: that of a PJRT client of our own, with as many threads as torch has now.

    JAX's own CPU client hands every program to another thread, which costs more than a small program itself, and only a global setting
    of the user's can tell it not to. Its pool has a thread for every core, whatever torch was told. And as long as nobody starts JAX's
    clients, JAX does not warn at every fork, as a DataLoader's workers would make it.

    Raises: ForkError in a child of a process that had used XLA.
    """
    if forks.is_cut_off():
        raise forks.cut_off()
    if not _public_only and (own := _own_cpu_device(torch.get_num_threads())):
        return own
    return jax.local_devices(backend="cpu")[0]


def _own_cpu_device(threads: int) -> jax.Device | None:
    """The device of our client with so many threads; it is made at the first call. None where jaxlib lacks the means."""
    own = _own_clients.get(threads)
    if own is None:
        with _making:
            own = _own_clients.get(threads) or _own_clients.setdefault(threads, _make_client(threads))
    return own.device


@dataclass(frozen=True)
class _OwnClient:
    """A PJRT client of our own. Attributes: device (None: jaxlib lacks the means); threads (of its pool)."""

    device: jax.Device | None
    threads: str = ""


# By torch's number of threads.
_own_clients: dict[int, _OwnClient] = {}
# Held while a client is made, and while an environment variable is set for that.
_making = forks.lock()


def _make_client(threads: int) -> _OwnClient:
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from jaxlib import xla_client

        if hasattr(xla_client, "CompileOptions") and hasattr(xla_client, "DeviceList"):
            # A client has no other argument for the size of its pool than this variable, which is read (by C) when it is made.
            with _no_other_client(), c_environment("PJRT_NPROC", str(threads)) as value:
                return _OwnClient(xla_client.make_cpu_client(asynchronous=False).local_devices()[0], value)
    return _OwnClient(None)


def _no_other_client() -> contextlib.AbstractContextManager[Any]:
    """Inside, JAX makes no client of its own in another thread, where it would find our variable."""
    with contextlib.suppress(ImportError):
        from jax._src import xla_bridge

        return getattr(xla_bridge, "_backend_lock", None) or contextlib.nullcontext()
    return contextlib.nullcontext()


@contextlib.contextmanager
def c_environment(name: str, value: str) -> Iterator[str]:
    """Set an environment variable for what C reads, unless the user has set it. Gives what the variable says inside.

    Other threads do not see it in `os.environ`. Only a program that another thread starts in this moment, without saying what its
    environment is to be, gets it.
    """
    if name in os.environ:
        yield os.environ[name]
        return
    os.putenv(name, value)
    try:
        yield value
    finally:
        os.unsetenv(name)


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a moment, unless the user has set it. Other threads see it; two do not set variables at once."""
    with _making:
        if name in os.environ:
            yield
            return
        os.environ[name] = value
        try:
            yield
        finally:
            os.environ.pop(name, None)


def _had_used_xla() -> bool:
    """In a child: whether there were clients of ours in the parent.

    Ours, and MLIR's pool, are never freed: that would be to wait for their threads.
    """
    devices = [own.device for own in _own_clients.values() if own.device is not None]
    for device in devices:
        forks.leave(device.client)
    if pool := getattr(sys.modules.get("jax._src.interpreters.mlir"), "global_thread_pool", None):
        forks.leave(pool)
    return bool(devices)


forks.uses_xla(_had_used_xla)


def one_at_a_time() -> contextlib.AbstractContextManager[Any]:
    """Inside, no other thread records or captures a graph: torch's tracers keep their state in globals.

    The lock is TorchDynamo's own, which a thread may take again while it has it.
    """
    return _compile_lock


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Inside, this thread alone captures a graph: torch's tracers keep their state in globals.

    The lock is TorchDynamo's own, which a thread may take again while it has it: graphs that TorchDynamo captures and others exclude each
    other. And as in TorchDynamo, `torch.compiler.is_compiling()` is true meanwhile, in all threads: if it were not, torch would take a call
    of any compiled function, in whatever thread, for one that is to be traced, and refuse it.
    """
    with _compile_lock:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


_compile_lock: Any = getattr(convert_frame, "compile_lock", None) or forks.lock()
forks.adopt(_compile_lock)


@dataclass(frozen=True)
class XlaProgram:
    """A compiled program.

    Attributes: call (arrays on the program's device to arrays; it checks nothing, so shapes, dtypes and devices must be right);
    text (gives the HLO as XLA optimized it); is_large (whether a call takes much of the C library's heap, which keeps it for that);
    calls_back (whether it may call torch's kernels).
    """

    call: Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
    text: Callable[[], str]
    is_large: bool = False
    calls_back: bool = True


def compile_lowered(
    lowered: jax.stages.Lowered, device: jax.Device, options: Mapping[str, Any], store: Store | None = None, keep_heap: bool = True
) -> XlaProgram:
    """Let XLA compile a lowered program whose arguments are all kept (`keep_unused=True`), unless the store has it compiled already.

    options: XLA's own, by name. store: for programs of `cpu_device()`, where XLA can write them to a file. keep_heap: whether glibc may be
    told to keep memory for a program that needs much.
    Raises: jax.errors.JaxRuntimeError.
    """
    affinity.processors()
    if not _is_own(device):
        compiled = lowered.compile(compiler_options=dict(options) or None)
        executable = None if _public_only else compiled.runtime_executable()
        if hasattr(executable, "execute_sharded"):
            return XlaProgram(_fast_call(executable), lambda: compiled.as_text() or "")
        return XlaProgram(lambda arrays: jax.tree.leaves(compiled(*arrays)), lambda: compiled.as_text() or "")
    from jaxlib import xla_client

    client = device.client
    compile_options = xla_client.CompileOptions()
    compile_options.num_replicas = compile_options.num_partitions = 1
    compile_options.env_option_overrides = list(options.items())
    devices = xla_client.DeviceList((device,))
    module, callbacks = lowered.compiler_ir("stablehlo"), lowered._lowering.compile_args["host_callbacks"]
    key = _store_key(module, device, options) if store is not None and not callbacks else ""
    executable = None
    if store is not None and key and (data := store.get(key)) is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is no program, or one for another machine
            executable = client.deserialize_executable(data, devices, compile_options)
            metrics.add("loads")
    if executable is None:
        executable = client.compile_and_load(module, devices, compile_options, host_callbacks=callbacks)
        if store is not None and key:
            store.put(key, client.serialize_executable(executable))
    needed = executable.get_compiled_memory_stats()
    is_large = keep_heap and needed.temp_size_in_bytes + needed.output_size_in_bytes > heap.LARGE
    if is_large:
        heap.keep_freed_memory()
    text = lambda: "\n".join(module.to_string() for module in executable.hlo_modules())  # noqa: E731
    return XlaProgram(_fast_call(executable), text, is_large, bool(callbacks))


def _store_key(module: Any, device: jax.Device, options: Mapping[str, Any]) -> str:
    """The name of a compiled program in a store: a hash of all that it was made of and for. "" for one that cannot be written to a file,
    or whose compilation is to be seen (xla_dump_to).

    oneDNN's calls cannot: jaxlib's serialization does not know them, and does not say so (std::bad_alloc, if one is lucky).
    """
    if any("dump" in name for name in (*options, os.environ.get("XLA_FLAGS", ""))):
        return ""
    copy = module.operation.clone()
    with module.context:
        copy.attributes["sym_name"] = type(copy.attributes["sym_name"]).get("program")  # graphs are numbered as they come
    code = _bytecode(copy, module.context)
    if code is None or b"__onednn$" in code:
        return ""
    facts = (jaxlib_version(), _threads_of(device), _processor(), os.environ.get("XLA_FLAGS", ""), sorted(options.items()))
    return hashlib.blake2b(code + repr(facts).encode(), digest_size=32).hexdigest()


def jaxlib_version() -> str:
    import jaxlib

    return jaxlib.__version__


def versions() -> tuple[str, ...]:
    """Of all that makes a program: dynaxla, whose forms it has, torch, whose kernels it may call, jax and jaxlib."""
    return importlib.import_module("dynaxla").__version__, torch.__version__, jax.__version__, jaxlib_version()


def machine_name(device: jax.Device) -> str:
    """What speed depends on: the device, its number of threads on a CPU, and the version of jaxlib."""
    if device.platform != "cpu":
        return f"{device.device_kind}, jaxlib {jaxlib_version()}"
    name = next((line.partition(":")[2].strip() for line in _processor().splitlines() if line.startswith("model name")), processor())
    return f"{name or machine()}, {_threads_of(device)} threads, jaxlib {jaxlib_version()}"


@functools.cache
def _processor() -> str:
    """What this machine's instructions are known by."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        kept = [line for line in file if line.startswith(("vendor_id", "model name", "flags", "Features", "CPU part"))]
        return "".join(sorted(set(kept)))
    return f"{machine()} {processor()} {torch.backends.cpu.get_cpu_capability()}"


def is_intels() -> bool:
    """Whether this machine's processor is Intel's."""
    return "GenuineIntel" in _processor()


def fingerprint(lowered: jax.stages.Lowered) -> bytes:
    """A hash of the lowered program, whatever line of Python each of its operations came from."""
    module = lowered.compiler_ir("stablehlo")
    code = None if _public_only else _bytecode(module.operation, module.context)
    return hashlib.blake2b(str(module).encode() if code is None else code).digest()


def _bytecode(operation: Any, context: Any) -> bytes | None:
    """A module as bytes, without the lines of Python that it came from (which the module loses). None where jaxlib lacks the means."""
    with contextlib.suppress(ImportError):
        from jaxlib.mlir.passmanager import PassManager

        with context:
            PassManager.parse("builtin.module(strip-debuginfo)").run(operation)
        code = io.BytesIO()
        operation.write_bytecode(code)
        return code.getvalue()
    return None


def _is_own(device: jax.Device) -> bool:
    return any(device is own.device for own in list(_own_clients.values()))


def _threads_of(device: jax.Device) -> str:
    return next((own.threads for own in list(_own_clients.values()) if device is own.device), str(os.cpu_count()))


def _fast_call(executable: Any) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    execute = executable.execute_sharded

    def call(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return [shards[0] for shards in execute(arrays).disassemble_into_single_device_arrays()]

    return call


class ArgumentCheck:
    """Whether tensors have the types, dtypes, devices, shapes, strides and flags (conjugate, negative) of those seen at construction.

    Holds no reference to the tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.matches: Callable[..., bool]
        if _Fast.guards is not None and tensors:
            sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
            self.matches = _Fast.guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        else:
            facts = [_facts(tensor) for tensor in tensors]
            self.matches = lambda *others: all(_facts(other) == fact for other, fact in zip(others, facts, strict=True))


class DictCheck:
    """Whether nothing has been put into dicts, or taken out, since construction: by the version that CPython or torch keeps of each.

    Where nobody keeps one, or after something has changed, the answer is no.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._tree = None
        if _Fast.guard_tree is not None:
            self._tree = _Fast.guard_tree()
            for index, each in enumerate(self._dicts):
                item = self._tree.list_getitem_manager(index, "", each, GuardManagerType.GUARD_MANAGER)
                item.add_dict_version_guard(each, [""], None)

    def are_unchanged(self) -> bool:
        return self._tree is not None and bool(self._tree.check(self._dicts))


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
