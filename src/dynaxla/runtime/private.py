"""The private entry points of torch, JAX and jaxlib: no other module names one.

Private is everything in `torch._C`, `jax._src` and `jaxlib`, and what has an underscore on torch's and JAX's public modules and classes.
Not meant is what every backend of torch.compile is written against (`torch._dynamo`, `torch._functorch`, `torch._inductor`,
`torch._guards`, `torch._subclasses`, `torch._ops`, decompositions, prims, `torch.utils._pytree` and `_python_dispatch`), and what ops are
called and say of themselves (`aten._softmax`, `op._schema`). tests/test_sources.py has the same definition, and reads the sources.

Each entry point is looked for once, when this module is imported. Those with a public way beside them are in `Fast`, and None where this
torch or jaxlib lacks them. For the others there is no other way: where one is missing, its first use raises UnsupportedVersion.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.lib
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from .. import forks
from ..errors import UnsupportedVersion

# The oldest and the newest releases that these entry points were tried with.
KNOWN = {"torch": ("2.11", "2.15"), "jax": ("0.10", "0.12")}


def _find(name: str) -> Any:
    """What has this dotted name. None where there is nothing."""
    with contextlib.suppress(ImportError, AttributeError):
        return pkgutil.resolve_name(name)
    return None


_storage_at: Any = _find("torch._C._construct_storage_from_data_pointer")


def _result_handler() -> Callable[..., Any] | None:
    """What makes arrays of results, from their aval and sharding, and whether they are committed. jaxlib 0.10 would check each."""
    make = _find("jaxlib._jax.array_result_handler")
    return functools.partial(make, _skip_checks=True) if "_skip_checks" in (getattr(make, "__doc__", "") or "") else make


class Fast:
    """Entry points that have a public way beside them. None where they are missing, and inside `force_public`."""

    # Handing memory over: a few microseconds less than the public DLPack functions.
    to_buffer: Callable[..., jax.Array] | None = _find("jaxlib._jax.dlpack_managed_tensor_to_buffer")
    to_capsule: Callable[..., Any] | None = _find("jaxlib._jax.buffer_to_dlpack_managed_tensor")
    torch_to_capsule: Callable[..., Any] | None = _find("torch._C._to_dlpack")
    torch_from_capsule: Callable[..., torch.Tensor] | None = _find("torch._C._from_dlpack")
    storage_at: Callable[..., torch.UntypedStorage] | None = _storage_at
    reinterpret: Callable[..., torch.Tensor] | None = _find("torch._C._dynamo.guards._reinterpret_tensor")
    # Comparing in C.
    guards: Callable[..., Any] | None = _find("torch._C._dynamo.guards.TensorGuards")
    guard_tree: Callable[..., Any] | None = _find("torch._C._dynamo.guards.RootGuardManager")
    # Programs that run in the calling thread, and remember none of its frames.
    make_cpu_client: Callable[..., Any] | None = _find("jaxlib.xla_client.make_cpu_client")
    traceback_scope: Callable[[], contextlib.AbstractContextManager[Any]] | None = _find("jaxlib._jax.TracebackScope")
    runtime_executable: Callable[..., Any] | None = _find("jax.stages.Compiled.runtime_executable")
    result_handler: Callable[..., Any] | None = _result_handler()
    pass_manager: Any = _find("jax.extend.mlir.passmanager.PassManager")


# Why an entry point of `Fast` that is here is not used, by its name there.
_gated: dict[str, str] = {}


def gate(names: Iterable[str], reason: str) -> None:
    """Use the public way in place of these entry points of `Fast`, from now on in this process."""
    for name in names:
        setattr(Fast, name, None)
        _gated[name] = reason


# What each entry point is for, and where it is found.
_FAST_PATHS = {
    "import (jaxlib._jax.dlpack_managed_tensor_to_buffer)": ("to_buffer", "torch_to_capsule"),
    "export (jaxlib._jax.buffer_to_dlpack_managed_tensor)": ("to_capsule", "torch_from_capsule"),
    "alias without ownership (torch._C._construct_storage_from_data_pointer)": ("storage_at",),
    "view of a result (torch._C._dynamo.guards._reinterpret_tensor)": ("reinterpret",),
    "argument check (torch._C._dynamo.guards.TensorGuards)": ("guards",),
    "dicts' versions (torch._C._dynamo.guards.RootGuardManager)": ("guard_tree",),
    "execute in place (jaxlib.xla_client.make_cpu_client)": ("make_cpu_client",),
    "execute without checks (jax.stages.Compiled.runtime_executable)": ("runtime_executable",),
    "results alike (jaxlib._jax.array_result_handler)": ("result_handler",),
    "programs as bytes (jax.extend.mlir.passmanager.PassManager)": ("pass_manager",),
    "short tracebacks (jaxlib._jax.TracebackScope)": ("traceback_scope",),
}


def fast_paths() -> dict[str, str]:
    """The state of each private way that has a public one: "live"; "gated: REASON", here but not used; or "missing"."""
    found = {}
    for path, names in _FAST_PATHS.items():
        reason = next((_gated[name] for name in names if name in _gated), "")
        found[path] = f"gated: {reason}" if reason else "live" if all(getattr(Fast, name) for name in names) else "missing"
    return found


@contextlib.contextmanager
def force_public() -> Iterator[None]:
    """Use the public way for everything made in this context. For tests."""
    saved = {name: getattr(Fast, name) for name in Fast.__annotations__}
    for name in saved:
        setattr(Fast, name, None)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(Fast, name, value)


def jaxlib_version() -> str:
    """The version, such as 0.10.2."""
    return jax.lib.__version__


def _versions() -> str:
    return f"torch {torch.__version__}, jax {jax.__version__} and jaxlib {jaxlib_version()}"


def newer_than_known() -> list[str]:
    """The packages, with their versions, that are newer here than the newest release in KNOWN."""
    return [
        f"{name} {version}"
        for name, version in (("torch", torch.__version__), ("jax", jax.__version__))
        if release(version) > release(KNOWN[name][1])
    ]


@functools.cache
def warn_of_newer_releases() -> None:
    """Log one warning in a process whose torch or JAX is newer than the tested releases."""
    if newer := newer_than_known():
        logging.getLogger("dynaxla").warning(
            "dynaxla is not tested with %s yet; if something fails, `dynaxla doctor` shows what is at fault", " and ".join(newer)
        )


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version."""
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0


def unsupported(message: str) -> UnsupportedVersion:
    """The exception for a failure that these versions of torch and JAX are the likely cause of."""
    return UnsupportedVersion(f"{_versions()}: {message}", hint=_hint())


def _hint() -> str:
    known = " and ".join(f"{package} {oldest} to {newest}" for package, (oldest, newest) in KNOWN.items())
    return f"install versions that are tested, {known}; `dynaxla doctor` says which are here"


def _unsupported(name: str) -> UnsupportedVersion:
    return UnsupportedVersion(f"{_versions()} have no {name}, which dynaxla needs", hint=_hint())


# The entry points without another way that are missing here.
missing: list[str] = []


def _needed(name: str) -> Any:
    """What has this dotted name. Where there is nothing, what raises UnsupportedVersion when it is called."""
    found = _find(name)
    if found is not None:
        return found
    missing.append(name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise _unsupported(name)

    return refuse


# torch's dispatcher.

_below_autograd_keys = _needed("torch._C._AutoDispatchBelowAutograd")
without_autocast = _needed("torch._C._DisableAutocast")
without_torch_function = torch.DisableTorchFunction
# The module of functions of torch.nn.functional that are written in C++, and padding there.
NATIVE_FUNCTIONS = "torch._C._nn"
native_pad: Callable[..., Any] | None = _find("torch._C._nn.pad")
# Without it, nothing is as Python says that it is made of others.
without_python_dispatcher: Callable[[], contextlib.AbstractContextManager[Any]] = (
    _find("torch._C._DisablePythonDispatcher") or contextlib.nullcontext
)
# Whether an op, by its name, has a kernel of its own for a dispatch key.
_has_kernel: Callable[[str, str], bool] = _needed("torch._C._dispatch_has_kernel_for_dispatch_key")
_key_for_device: Callable[[str], str] = _needed("torch._C._dispatch_key_for_device")
# The names of all ops that are registered, with those of TorchScript's.
op_names: Callable[[], list[str]] = _needed("torch._C._dispatch_get_all_op_names")
_impls: Any = _find("torch.library._impls") or ()


_own_libraries: list[torch.library.Library] = []


def count_as_own(*libraries: torch.library.Library) -> None:
    """What these register, now and later, is dynaxla's: its sources say what it does."""
    _own_libraries.extend(libraries)


def implemented_in_python() -> list[str]:
    """Which kernels others' Python has registered, as op/key."""
    own = {name for library in _own_libraries for name in getattr(library, "_op_impls", ())}
    return [name for name in list(_impls) if name not in own]


_dispatch_dump: Callable[[str], str] | None = _find("torch._C._dispatch_dump")


def is_registered_by_torch(kernel: str) -> bool:
    """True if one of torch's own files has registered a kernel of `implemented_in_python`. False where torch does not say."""
    namespace, op, key = kernel.split("/")
    places = re.findall(rf"^{key}: registered at (.*):\d+ :: ", _dispatch_dump(f"{namespace}::{op}"), re.M) if _dispatch_dump else []
    return bool(places) and all(Path(place).is_relative_to(_TORCH_FOLDER) for place in places)


_TORCH_FOLDER = Path(torch.__file__).parent


def innermost_mode() -> Any:
    """The dispatch mode that sees ops first, or None."""
    stack = _get_current_dispatch_mode_stack()
    return stack[-1] if stack else None


# The context without that mode.
without_innermost_mode: Callable[[], contextlib.AbstractContextManager[Any]] = _needed("torch.utils._python_dispatch._pop_mode_temporarily")


# How torch computes expressions of sizes: a class whose methods are their operations, and what walks an expression with such a class.
SizeArithmetic: Any = _find("torch.utils._sympy.reference.PythonReferenceAnalysis") or object
evaluate_size: Callable[..., Any] = _needed("torch.utils._sympy.interp.sympy_interp")


def makes_no_guards(environment: Any) -> bool:
    """Whether what is assumed of sizes now becomes no guard. environment: torch's, of symbolic sizes."""
    return bool(environment.frozen or environment._suppress_guards_tls())


def is_composite(op: Any, device: str) -> bool:
    """Whether an op is made of others on a type of device, for lack of a kernel."""
    name = op.name()
    return _has_kernel(name, "CompositeImplicitAutograd") and not _has_kernel(name, _key_for_device(device))


def functional_value(tensor: Any) -> torch.Tensor:
    """What a functional tensor wraps, with all writes. Outside of functionalization's mode."""
    value: torch.Tensor = tensor.from_functional()
    return value


# How many dispatch modes are active in this thread; tens of nanoseconds.
mode_count: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack") or (lambda: len(_get_current_dispatch_mode_stack()))


_early_mode_count: Callable[[], int] | None = _find("torch._ops._len_torch_dispatch_stack_pre_dispatch")


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, no dispatch mode of this thread sees torch's ops. Where there is none, nothing is to be done, as in most of XLA's calls."""
    if mode_count() or _early_mode_count is None or _early_mode_count():
        return _disable_current_modes()
    return contextlib.nullcontext()


class _BelowAutograd:
    """No generator's context manager, since each call of a program with late writes has one: that takes twice as long."""

    __slots__ = ("_contexts",)

    def __enter__(self) -> None:
        self._contexts = _below_autograd_keys(), without_autocast(), without_torch_function()
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


# Inside, torch's ops run as kernels: no autograd, no autocast, whatever this thread's caller had set.
below_autograd: Callable[[], contextlib.AbstractContextManager[None]] = _BelowAutograd


# Tensors and their storages.

# How often a tensor has been written to. Not for tensors made in inference mode.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
# The tensor that a view is a view of; None for others.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
# Exchange what two tensors are (data, gradient, whether one is required), but not the objects and their attributes.
swap_values: Callable[[torch.Tensor, torch.Tensor], None] = _needed("torch._C._swap_tensor_impl")
# The handle of torch's current stream on a CUDA device, by the device's index. torch.cuda.current_stream takes 9 us (host of an H200).
current_raw_stream: Callable[[int], int] = _find("torch._C._cuda_getCurrentRawStream") or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)
# What tells the tensor's storage from all others that are alive.
storage_id: Callable[[torch.Tensor], int] = _find("torch._C._storage_id") or (lambda tensor: tensor.untyped_storage()._cdata)
# Whether tensors on one storage share elements: the positions of those that do. None where torch does not say.
overlapping: Callable[..., list[int]] | None = _find("torch._C._dynamo.guards.compute_overlapping_tensors")
# True if a storage can be made without memory.
HAS_EMPTY_STORAGES = bool(Fast.storage_at)
# Has whoever asks for a tensor's address get an exception, until its storage gets other memory. It does nothing where torch cannot.
refuse_address: Callable[[torch.Tensor], None] = _find("torch._C._set_throw_on_mutable_data_ptr") or (lambda _: None)


def storage_without_memory(device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """Only where HAS_EMPTY_STORAGES."""
    return _storage_at(0, device, nbytes)


# A device of Python's own.

# Name torch's spare device, and register its module, hooks and guard: (rename, backend_module, hook, device_guard).
register_device: Callable[..., None] = _needed("torch.utils.backend_registration._setup_privateuseone_for_python_backend")
# What its hooks derive from.
DeviceHooks: Any = _find("torch._C._acc.PrivateUse1Hooks") or object
# What its guard derives from, and what that says which kind of device it guards.
DeviceGuard: Any = _find("torch._C._acc.DeviceGuard") or object
SPARE_KIND: Any = torch.autograd.DeviceType.PrivateUse1
_storage_use_count: Callable[[int], int] = _needed("torch._C._storage_Use_Count")
_cpu_keys = torch.DispatchKeySet(torch.DispatchKey.CPU)
SPARE_KEY, SPARE_AUTOCAST_KEY = "PrivateUse1", "AutocastPrivateUse1"


def spare_device_name() -> str:
    """The name of torch's spare device: "privateuseone" for as long as nobody has named it."""
    return torch.device("privateuseone").type


def ops_with_kernel(key: str) -> list[torch._ops.OpOverload]:
    """The ops of ATen that have a kernel of their own for a dispatch key."""
    names = [name.partition("::")[2] for name in op_names() if name.startswith("aten::") and _has_kernel(name, key)]
    return [getattr(getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2] or "default") for name in names]


def before_backward(context: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> bool:
    """From now on each backward pass runs inside context(its outputs), in this process. Whether torch has such a place."""
    run = _find("torch.autograd.graph._engine_run_backward")
    if run is None or _find("torch.autograd._engine_run_backward") is not run:
        return False

    def inside(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with context(t_outputs):
            return run(t_outputs, *args, **kwargs)

    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = functools.wraps(run)(unseen(inside))
    return True


def by_cpu_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What the CPU's kernel makes of tensors of whatever device: for ops that touch no memory."""
    return op.redispatch(_cpu_keys, *args, **kwargs)


def by_general_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What the kernel does that ATen has for all devices, though this one has its own."""
    return op._op_dk(torch.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def place_tensor(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, shape: Any, stride: Any) -> None:
    """Lay a tensor on a storage of its device, which is large enough."""
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_cpu_keys, tensor, storage, offset, shape, stride)


# Write a CPU storage's bytes to a file, and read them, as torch.save and torch.load do.
write_storage: Callable[..., None] = _needed("torch.UntypedStorage._write_file")
read_storage: Callable[..., torch.UntypedStorage] = _needed("torch.UntypedStorage._set_from_file")
# What tells a storage from all others that are alive.
identity_of: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors, and Python objects, refer to a storage."""
    return _storage_use_count(storage._cdata)


# torch's settings.


# Where torch's backends keep the precision of their float32 products, in public.
FLOAT32_PRECISIONS = {
    ("generic", "all"): "torch.backends",
    ("cuda", "all"): "torch.backends.cudnn",
    ("cuda", "matmul"): "torch.backends.cuda.matmul",
    ("cuda", "conv"): "torch.backends.cudnn.conv",
    ("cuda", "rnn"): "torch.backends.cudnn.rnn",
    ("mkldnn", "all"): "torch.backends.mkldnn",
    ("mkldnn", "matmul"): "torch.backends.mkldnn.matmul",
    ("mkldnn", "conv"): "torch.backends.mkldnn.conv",
    ("mkldnn", "rnn"): "torch.backends.mkldnn.rnn",
}


def _public_float32_precision(backend: str, op: str) -> str:
    return pkgutil.resolve_name(FLOAT32_PRECISIONS[backend, op]).fp32_precision


# How a backend's kernels may round the float32 operands of an op: "ieee" (not at all), "tf32", "bf16" or "none" (nobody has said). What is
# not set for an op comes from the backend's "all", and then from the generic one. torch's kernels ask this too; the older getters
# (`torch.get_float32_matmul_precision` and `allow_tf32`) raise where older and newer settings contradict each other. 0.2 microseconds.
float32_precision: Callable[[str, str], str] = _find("torch._C._get_fp32_precision_getter") or _public_float32_precision


def _setting(module: Any, name: str) -> Callable[[], Any]:
    """The getter of a setting in `torch.backends`. Its attribute is a property in Python around this getter, and takes 2 microseconds."""
    getter = getattr(inspect.getattr_static(module, name, None), "getter", None)
    return getter if callable(getter) else functools.partial(getattr, module, name)


is_forward_mode_enabled: Callable[[], bool] = _needed("torch._C._is_fwd_grad_enabled")
BACKEND_SETTINGS: tuple[Callable[[], Any], ...] = (
    _setting(torch.backends.cudnn, "enabled"),
    _setting(torch.backends.cudnn, "benchmark"),
    _setting(torch.backends.cudnn, "deterministic"),
    _setting(torch.backends.mkldnn, "enabled"),
    _setting(torch.backends.mkldnn, "deterministic"),
    _setting(torch.backends.mkldnn, "allow_tf32"),
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    torch.backends.cuda.cudnn_sdp_enabled,
    # Those that this torch has. The first five have public attributes, which take 1 to 4 microseconds each; the others have none.
    *filter(
        None,
        (
            _find("torch._C._get_linalg_preferred_backend"),
            _find("torch._C._get_blas_preferred_backend"),
            _find("torch._C._get_cublas_allow_fp16_reduced_precision_reduction"),
            _find("torch._C._get_cublas_allow_bf16_reduced_precision_reduction"),
            _find("torch._C._get_cublas_allow_fp16_accumulation"),
            _find("torch._C._get_overrideable_sdp_enabled"),
            _find("torch._C._get_nnpack_enabled"),
            _find("torch._C._is_default_mobile_cpu_allocator_set"),
        ),
    ),
)
# How deep in functorch's transforms this thread is; None where it is in none, or torch has none.
functorch_level: Callable[[], int | None] = _find("torch._C._functorch.maybe_current_level") or (lambda: None)
_top_saved_tensor_hooks: Callable[..., Any] = _find("torch._C._autograd._top_saved_tensors_default_hooks") or (lambda _: None)


def saved_tensor_hooks() -> tuple[Any, ...] | None:
    """The pair of hooks that autograd would use now for what it saves."""
    return _top_saved_tensor_hooks(True)


def is_profiling() -> bool:
    """Whether torch's profiler runs. Where torch does not tell, it may."""
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", True)


# TorchDynamo looks at every frame of Python that runs behind a break of a graph.

_set_eval_frame: Callable[[Any], Any] = _needed("torch._dynamo.eval_frame.set_eval_frame")
_eval_frame: Callable[[], Any] = _needed("torch._C._dynamo.eval_frame.get_eval_frame_callback")
_skip_code: Callable[[Any], None] = _needed("torch._dynamo.eval_frame.skip_code")


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which TorchDynamo does not try to compile, nor anything that it calls."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if _eval_frame() is None:
            return function(*args, **kwargs)
        before = _set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_eval_frame(before)

    _skip_code(run.__code__)
    return run


# What torch's tracers keep in globals.

# TorchDynamo's own lock, which a thread may take again while it has it.
capture_lock: Any = _find("torch._dynamo.convert_frame.compile_lock") or forks.lock()
forks.adopt(capture_lock)


def compiling_flag() -> Any:
    """What `torch.compiler.is_compiling()` goes by, in all threads."""
    if not hasattr(torch.compiler, "_is_compiling_flag"):
        raise _unsupported("torch.compiler._is_compiling_flag")
    return torch.compiler._is_compiling_flag


def set_compiling_flag(value: Any) -> None:
    """Set what `compiling_flag` gives."""
    torch.compiler._is_compiling_flag = value


# torch's note of what calling aten._linalg_check_errors does besides computing; an EffectType, or None for nothing.
_entry_of: Callable[[str], Any] | None = _find("torch._library.simple_registry.singleton.find")
_effect_of_checks: Any = None if _entry_of is None else _entry_of("aten::_linalg_check_errors").effect
_EffectType: Any = _find("torch._library.effects.EffectType")


@contextlib.contextmanager
def checks_have_an_effect() -> Iterator[None]:
    """Inside, AOTAutograd does not take a check of linear algebra, whose result nothing reads, for dead code.

    From torch 2.13 on it never does. Only for a thread that has the capture lock.
    """
    if _EffectType is None or _effect_of_checks is None or _effect_of_checks.effect is not None:
        yield
        return
    registration = _effect_of_checks.register(_EffectType.ORDERED)
    try:
        yield
    finally:
        registration.destroy()


_analysis: Any = _find("torch._functorch._aot_autograd.runtime_wrappers._AnalyzeCustomOpInputOutputMode")


def check_of_aliases() -> contextlib.AbstractContextManager[Any]:
    """Inside, torch warns of custom ops whose results alias their operands or each other, or raises, as its settings say.

    AOTAutograd does the same around the first call of a compiled function, but does not see ops that a program calls.
    """
    is_wanted = getattr(torch._functorch.config, "check_custom_op_aliasing", False)
    return _analysis() if is_wanted and _analysis is not None else contextlib.nullcontext()


def made_into_op(value: Any) -> Any:
    """The function that `torch.library.custom_op` has made this op of; None for anything else."""
    return value._init_fn if isinstance(value, torch.library.CustomOpDef) else None


@contextlib.contextmanager
def without_vmap_loops() -> Iterator[None]:
    """Inside, an op that torch.vmap could only call once for each sample is an error."""
    before = _vmap_loops()
    _set_vmap_loops(False)
    try:
        yield
    finally:
        _set_vmap_loops(before)


_vmap_loops: Callable[[], bool] = _needed("torch._C._functorch._is_vmap_fallback_enabled")
_set_vmap_loops: Callable[[bool], None] = _needed("torch._C._functorch._set_vmap_fallback_enabled")

# The modules of placements of tensors on a mesh, and of groups of processes.
PLACEMENTS, PROCESSES = "torch._C._distributed", "torch._C._distributed_c10d"


def local_part(tensor: Any) -> torch.Tensor:
    """What of a DTensor lies on this process, itself: `to_local` gives a view."""
    found: torch.Tensor = tensor._local_tensor
    return found


def done_work() -> Any:
    """Work that is done."""
    return torch._C._distributed_c10d.FakeWork()


def finished_work() -> Any:
    """What an op of torch.distributed gives for work that is done."""
    return torch.distributed.Work.boxed(done_work())


# Groups of processes. Each has what works for a kind of device; a group that a debugging mode wraps does not tell of it.


_resolve_group: Callable[[str], Any] = _needed("torch.distributed.distributed_c10d._resolve_process_group")


def process_group(name: str) -> Any:
    """The group that has this name now."""
    return _resolve_group(name)


def store_of(group: Any) -> Any:
    """What a group's processes have in common; None for a group that is there for a look at it, and for one that does not tell."""
    is_fake = "fake" in (group.name(), torch.distributed.get_backend(group))
    return None if is_fake else group.get_group_store()


def timeout_of(group: Any) -> float:
    """How long a collective of CPU tensors may take, in seconds."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    found = getattr(options, "_timeout", None) or torch.distributed.constants.default_pg_timeout
    return float(found.total_seconds())


def all_gather(group: Any, output: torch.Tensor, tensor: torch.Tensor) -> Any:
    """Work that gathers one tensor of each process."""
    return group._allgather_base(output, tensor)


def reduce_scatter(group: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
    """Work that gives each process its part of a sum."""
    return group._reduce_scatter_base(output, tensor, options)


# DistributedDataParallel's insides.


def why_not_averaged(module: Any) -> str:
    """What a DistributedDataParallel does besides averaging gradients behind a backward pass; "" for nothing."""
    reasons = {
        "a communication hook": bool(getattr(module, "_comm_hooks", ())) or hasattr(module, "buffer_hook"),
        "static_graph": module.static_graph,
        "find_unused_parameters": module.find_unused_parameters,
        "join": module._join_config.enable,
        "mixed_precision": module.mixed_precision is not None,
        "delayed all-reduces": bool(getattr(module, "_delay_all_reduce_params", ())),
        "torch's reducer in Python": getattr(module, "_use_python_reducer", False),
        "optimizers in the backward pass": any(hasattr(item, "_in_backward_optimizers") for item in module._module_parameters),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def averaged_parameters(module: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Those whose gradients a DistributedDataParallel averages, with their names."""
    reduced = {id(parameter) for parameter in module._module_parameters if parameter.requires_grad}
    return [(name, parameter) for name, parameter in module.module.named_parameters() if id(parameter) in reduced]


@contextlib.contextmanager
def without_reducer(module: Any, share_buffers: Callable[[list[torch.Tensor]], object]) -> Iterator[None]:
    """Inside, a DistributedDataParallel calls its module, and averages no gradients. share_buffers: is called with the buffers that all
    processes are to have alike, before that."""

    def pre_forward(*inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if module.will_sync_module_buffers():  # no buffer_hook asks for another time: see `why_not_averaged`
            share_buffers([item for name, item in module.module.named_buffers() if name not in module.parameters_to_ignore])
        module.require_forward_param_sync = torch.is_grad_enabled() and module.require_backward_grad_sync
        if not module.device_ids:
            return inputs, kwargs
        place = torch.device(module.device_type, module.device_ids[0])
        given, named = torch.distributed.utils._to_kwargs(inputs, kwargs, place, module.use_side_stream_for_tensor_copies)
        return given[0], named[0]

    was = module._use_python_reducer
    module._use_python_reducer, module._pre_forward = True, pre_forward
    try:
        yield
    finally:
        module._use_python_reducer = was
        del module._pre_forward


_queue_callback: Callable[[Callable[[], object]], None] = _needed("torch.autograd.Variable._execution_engine.queue_callback")


def at_end_of_backward(function: Callable[[], object]) -> None:
    """Have autograd call this when the backward pass that runs has given all gradients."""
    _queue_callback(function)


def codes_of_placement() -> tuple[types.CodeType, ...]:
    """Of what says, inside of an op on DTensors, where its results lie, and caches it; none if this process has no DTensors."""
    dispatcher = getattr(sys.modules.get("torch.distributed.tensor._dispatch"), "OpDispatcher", None)
    function = getattr(dispatcher, "_propagate_op_sharding_dispatch_slow_path", None)
    return () if function is None else (function.__code__,)


# JAX's and jaxlib's insides.


_CompileOptions, _DeviceList = _find("jaxlib.xla_client.CompileOptions"), _find("jaxlib.xla_client.DeviceList")
if Fast.make_cpu_client and (_CompileOptions is None or _DeviceList is None):  # a client of ours could not be told what to compile for
    gate(["make_cpu_client"], "jaxlib.xla_client lacks CompileOptions or DeviceList")


def make_cpu_client(devices: int = 1) -> Any | None:
    """A PJRT client for the CPU whose programs run in the thread that calls them; None where jaxlib lacks the means."""
    if Fast.make_cpu_client is None:
        return None
    try:
        return Fast.make_cpu_client(asynchronous=False, **({} if devices == 1 else {"num_devices": devices}))
    except TypeError as error:  # it takes other arguments now
        gate(["make_cpu_client"], f"TypeError: {error}")
        return None


def compile_options(device: jax.Device, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """As a client of ours takes them: what it compiles a program with, and for. options: XLA's, by name."""
    found = _CompileOptions()
    found.num_replicas = found.num_partitions = 1
    found.env_option_overrides = list(options.items())
    return found, _DeviceList((device,))


# Inside, JAX makes no client of its own in another thread.
client_lock: contextlib.AbstractContextManager[Any] = _find("jax._src.xla_bridge._backend_lock") or contextlib.nullcontext()


def mlir_threads() -> Any | None:
    """MLIR's pool of threads, if JAX has made one. It imports nothing: it is asked in a child, right after a fork."""
    return getattr(sys.modules.get("jax._src.interpreters.mlir"), "global_thread_pool", None)


# From JAX 0.11 on the entry of a program that keeps unused arguments (`keep_unused=True`) has the program itself, by which it is found
# weakly: it would stay, with all constants and kernels of the program.
_forget_kept: Callable[[Any], object] | None = _find("jax._src.interpreters.pxla._dce_jaxpr.evict_weakref")


def lower(traced: jax.stages.Traced) -> jax.stages.Lowered:
    """A traced program as StableHLO. JAX's caches hold it for no longer than somebody else does."""
    lowered = traced.lower()
    if _forget_kept is not None:
        _forget_kept(traced.jaxpr)
    return lowered


def host_callbacks(lowered: jax.stages.Lowered) -> Any:
    """What a lowered program may call back."""
    try:
        return lowered._lowering.compile_args["host_callbacks"]
    except (AttributeError, KeyError):
        raise _unsupported("jax.stages.Lowered._lowering.compile_args['host_callbacks']") from None


def varying_axes(aval: Any) -> frozenset[str]:
    """The axes of a mesh along which what has this type differs, inside of `jax.shard_map`. JAX has changed the name more than once."""
    for name in ("manual_axis_type", "mat"):
        if (kind := getattr(aval, name, None)) is not None:
            return frozenset(kind.varying)
    return frozenset(getattr(aval, "vma", ()))


def uncompiled(function: Any) -> Any:
    """What `torch.compile` was given, if it made this module or function; else the function."""
    if isinstance(function, torch._dynamo.eval_frame.OptimizedModule):
        return uncompiled(function._orig_mod)
    original = getattr(function, "_torchdynamo_orig_callable", None)
    return function if original is None else uncompiled(original)


_innermost_backend = _needed("torch._dynamo.eval_frame.innermost_backend")


def compiler_of(function: Any) -> Any:
    """What `torch.compile` calls for the graphs of a module or function that it made, or of a module that compiles its own call; None for
    others."""
    context = getattr(function, "dynamo_ctx", None)
    if context is not None:
        return _innermost_backend(context.callback)
    made = getattr(function, "_compiled_call_impl", None) if isinstance(function, torch.nn.Module) else function
    if made is None or not hasattr(made, "_torchdynamo_orig_callable"):
        return None
    callback = inspect.getclosurevars(made).nonlocals.get("callback")
    return _innermost_backend(callback) if callback is not None else None


def uncompiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """A call of a module, hooks included, that does not go to what `module.compile()` has made."""
    return lambda *args, **kwargs: module._call_impl(*args, **kwargs)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether autograd calls something of the user's (`register_hook`) with this tensor's gradient, or after it has been added."""
    return bool(getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None))


_current_node: Callable[[], Any] = _needed("torch._C._current_autograd_node")
_next_number: Callable[[], int] = _needed("torch.autograd._get_sequence_nr")


def autograd_place() -> tuple[int, bool]:
    """The number of the last node that autograd has made, and False; in a backward pass that of the node whose turn it is, and True."""
    node = _current_node()
    return (_next_number() - 1, False) if node is None else (node._sequence_nr(), True)


# The number of the backward pass that this thread is in; -1 outside of any.
graph_task: Callable[[], int] = _needed("torch._C._current_graph_task_id")


def forward_of(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """The code of a graph. A module that makes it at its first call has another `forward` until then, which calls the module."""
    make = getattr(module, "real_recompile", None)
    if make is not None:
        make()
    return module.forward


def names_in_op_db() -> set[str]:
    """The entries of PyTorch's database of operators. To import it takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {entry.name for entry in op_db}


_profiler_session: Any = _find("jaxlib._profiler.ProfilerSession")


def profile() -> Callable[[], bytes] | None:
    """Begin a profile of what XLA does. Returns: what ends it, and gives it as `jax.profiler.ProfileData` reads it; None where this jaxlib
    has no such thing. `jax.profiler.start_trace` would start JAX's own client, and leave files."""
    if _profiler_session is None:
        return None
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return _profiler_session(options).stop
