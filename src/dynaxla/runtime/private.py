"""Private entry points of torch, JAX and jaxlib. Only this module and those named `private_*` use such entry points.

A *private entry point* is any name in `torch._C`, `jax._src` or `jaxlib`, or a name with an underscore on torch's and JAX's public modules
and classes. Exceptions are the modules that every backend of torch.compile uses (`torch._dynamo`, `torch._functorch`, `torch._inductor`,
`torch._guards`, `torch._subclasses`, `torch._ops`, decompositions, prims, `torch.utils._pytree` and `_python_dispatch`), and the names and
properties of ops (`aten._softmax`, `op._schema`). tests/repository/test_sources.py checks all other sources, but ignores names that dynaxla
defines itself.

Most functions and classes are looked up once, when this module is imported; attributes of objects are looked up at each use. Entry points
that the modules which use them can do without are in `Fast`, and None if this torch or jaxlib lacks them. Others (`_find`) have an
alternative next to them here, or a feature is left out without them. Entry points without an alternative (`_require`) raise
UnsupportedVersion at each use if they are missing.
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

# The oldest and the newest releases with which these entry points are tested.
KNOWN = {"torch": ("2.11", "2.15"), "jax": ("0.10", "0.12")}


def _find(name: str) -> Any:
    """Returns the object with this dotted name; None if there is none."""
    with contextlib.suppress(ImportError, AttributeError):
        return pkgutil.resolve_name(name)
    return None


_storage_at: Any = _find("torch._C._construct_storage_from_data_pointer")


def _result_handler() -> Callable[..., Any] | None:
    """Returns jaxlib's factory of result handlers. A result handler makes an array of one of a program's results.

    The factory takes the array's aval, its sharding, and `committed`. If it has the argument `_skip_checks` (jaxlib 0.10), that is set, so
    that handlers do not check each result.
    """
    make = _find("jaxlib._jax.array_result_handler")
    return functools.partial(make, _skip_checks=True) if "_skip_checks" in (getattr(make, "__doc__", "") or "") else make


class Fast:
    """Entry points that dynaxla can do without. A missing or disabled one (`gate`, `force_public`) is None."""

    # Zero-copy transfer: a few microseconds faster than the public DLPack functions.
    to_buffer: Callable[..., jax.Array] | None = _find("jaxlib._jax.dlpack_managed_tensor_to_buffer")
    to_capsule: Callable[..., Any] | None = _find("jaxlib._jax.buffer_to_dlpack_managed_tensor")
    torch_to_capsule: Callable[..., Any] | None = _find("torch._C._to_dlpack")
    torch_from_capsule: Callable[..., torch.Tensor] | None = _find("torch._C._from_dlpack")
    storage_at: Callable[..., torch.UntypedStorage] | None = _storage_at
    reinterpret: Callable[..., torch.Tensor] | None = _find("torch._C._dynamo.guards._reinterpret_tensor")
    # Comparisons in C.
    guards: Callable[..., Any] | None = _find("torch._C._dynamo.guards.TensorGuards")
    guard_tree: Callable[..., Any] | None = _find("torch._C._dynamo.guards.RootGuardManager")
    # The compilation of programs, and calls that run in the calling thread and record no Python frames.
    make_cpu_client: Callable[..., Any] | None = _find("jaxlib.xla_client.make_cpu_client")
    traceback_scope: Callable[[], contextlib.AbstractContextManager[Any]] | None = _find("jaxlib._jax.TracebackScope")
    runtime_executable: Callable[..., Any] | None = _find("jax.stages.Compiled.runtime_executable")
    result_handler: Callable[..., Any] | None = _result_handler()
    pass_manager: Any = _find("jax.extend.mlir.passmanager.PassManager")


# The reasons for which entry points of `Fast` are disabled, by attribute name.
_gated: dict[str, str] = {}


def gate(names: Iterable[str], reason: str) -> None:
    """Disables these entry points of `Fast` in this process, so that their public alternatives are used from now on."""
    for name in names:
        setattr(Fast, name, None)
        _gated[name] = reason


# For each fast path, its description (the purpose, and the full name of an entry point), and the names of its entry points in `Fast`.
_FAST_PATHS = {
    "import (jaxlib._jax.dlpack_managed_tensor_to_buffer)": ("to_buffer", "torch_to_capsule"),
    "export (jaxlib._jax.buffer_to_dlpack_managed_tensor)": ("to_capsule", "torch_from_capsule"),
    "alias without ownership (torch._C._construct_storage_from_data_pointer)": ("storage_at",),
    "view of a result (torch._C._dynamo.guards._reinterpret_tensor)": ("reinterpret",),
    "argument check (torch._C._dynamo.guards.TensorGuards)": ("guards",),
    "check of unchanged dicts (torch._C._dynamo.guards.RootGuardManager)": ("guard_tree",),
    "execute in the calling thread (jaxlib.xla_client.make_cpu_client)": ("make_cpu_client",),
    "execute without checks (jax.stages.Compiled.runtime_executable)": ("runtime_executable",),
    "arrays for results (jaxlib._jax.array_result_handler)": ("result_handler",),
    "programs as bytes (jax.extend.mlir.passmanager.PassManager)": ("pass_manager",),
    "short tracebacks (jaxlib._jax.TracebackScope)": ("traceback_scope",),
}


def fast_paths() -> dict[str, str]:
    """Returns the state of each fast path: "live"; "gated: REASON" if it exists but is not used; or "missing"."""
    states = {}
    for path, names in _FAST_PATHS.items():
        reason = next((_gated[name] for name in names if name in _gated), "")
        states[path] = f"gated: {reason}" if reason else "live" if all(getattr(Fast, name) for name in names) else "missing"
    return states


@contextlib.contextmanager
def force_public() -> Iterator[None]:
    """Disables all entry points of `Fast` inside the context, so that objects created there use the public alternatives. For tests."""
    saved = {name: getattr(Fast, name) for name in Fast.__annotations__}
    for name in saved:
        setattr(Fast, name, None)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(Fast, name, value)


def jaxlib_version() -> str:
    """Returns jaxlib's version, such as 0.10.2."""
    return jax.lib.__version__


def _versions() -> str:
    return f"torch {torch.__version__}, jax {jax.__version__} and jaxlib {jaxlib_version()}"


def newer_than_known() -> list[str]:
    """Returns the installed packages (name and version) that are newer than the newest release in KNOWN."""
    return [
        f"{name} {version}"
        for name, version in (("torch", torch.__version__), ("jax", jax.__version__))
        if release(version) > release(KNOWN[name][1])
    ]


@functools.cache
def warn_of_newer_releases() -> None:
    """Logs one warning per process if torch or JAX is newer than the tested releases."""
    if newer := newer_than_known():
        logging.getLogger("dynaxla").warning(
            "dynaxla is not tested with %s yet; if something fails, `dynaxla doctor` shows the cause", " and ".join(newer)
        )


def release(version: str) -> tuple[int, int]:
    """Returns the major and minor number of a version."""
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0


def unsupported(message: str) -> UnsupportedVersion:
    """Returns the exception for a failure that is probably caused by the versions of torch and JAX."""
    return UnsupportedVersion(f"{_versions()}: {message}", hint=_hint())


def _hint() -> str:
    known = " and ".join(f"{package} {oldest} to {newest}" for package, (oldest, newest) in KNOWN.items())
    return f"install tested versions, {known}; `dynaxla doctor` shows the installed ones"


def _lacks(name: str) -> UnsupportedVersion:
    return UnsupportedVersion(f"{_versions()} have no {name}, which dynaxla needs", hint=_hint())


# The names of entry points that this torch or jaxlib lacks, and that have no alternative.
missing: list[str] = []


def _require(name: str) -> Any:
    """Returns the object with this dotted name. If there is none, returns a function that raises UnsupportedVersion."""
    found = _find(name)
    if found is not None:
        return found
    missing.append(name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise _lacks(name)

    return refuse


# torch's dispatcher

_below_autograd_keys = _require("torch._C._AutoDispatchBelowAutograd")
without_autocast = _require("torch._C._DisableAutocast")
without_torch_function = torch.DisableTorchFunction
# The module of the functions of torch.nn.functional that are written in C++, and its pad function.
NATIVE_FUNCTIONS = "torch._C._nn"
native_pad: Callable[..., Any] | None = _find("torch._C._nn.pad")
# A context in which the dispatcher ignores decompositions that are registered in Python.
without_python_dispatcher: Callable[[], contextlib.AbstractContextManager[Any]] = (
    _find("torch._C._DisablePythonDispatcher") or contextlib.nullcontext
)
# Called with the names of an op and of a dispatch key; returns true if the op has its own kernel for the key.
_has_kernel: Callable[[str, str], bool] = _require("torch._C._dispatch_has_kernel_for_dispatch_key")
# Returns the name of the dispatch key of a device type.
_key_for_device: Callable[[str], str] = _require("torch._C._dispatch_key_for_device")
# Returns the names of all registered ops, including TorchScript's.
op_names: Callable[[], list[str]] = _require("torch._C._dispatch_get_all_op_names")
# The kernels that Python code has registered, as namespace/op/key.
_impls: Any = _find("torch.library._impls") or ()


_own_libraries: list[torch.library.Library] = []


def register_own_libraries(*libraries: torch.library.Library) -> None:
    """Marks libraries as dynaxla's own, so that `implemented_in_python` omits the kernels registered through them, now or later."""
    _own_libraries.extend(libraries)


def implemented_in_python() -> list[str]:
    """Returns the kernels that Python code other than dynaxla's has registered, as namespace/op/key."""
    registered_here = {name for library in _own_libraries for name in getattr(library, "_op_impls", ())}
    return [name for name in list(_impls) if name not in registered_here]


_dispatch_dump: Callable[[str], str] | None = _find("torch._C._dispatch_dump")


def is_registered_by_torch(kernel: str) -> bool:
    """True if torch's own files have registered this kernel of `implemented_in_python`. False if torch does not report the file."""
    namespace, op, key = kernel.split("/")
    files = re.findall(rf"^{key}: registered at (.*):\d+ :: ", _dispatch_dump(f"{namespace}::{op}"), re.M) if _dispatch_dump else []
    return bool(files) and all(Path(file).is_relative_to(_TORCH_FOLDER) for file in files)


_TORCH_FOLDER = Path(torch.__file__).parent


def innermost_mode() -> Any:
    """Returns the dispatch mode that handles ops first, or None."""
    stack = _get_current_dispatch_mode_stack()
    return stack[-1] if stack else None


# A context without the innermost dispatch mode.
without_innermost_mode: Callable[[], contextlib.AbstractContextManager[Any]] = _require(
    "torch.utils._python_dispatch._pop_mode_temporarily"
)


# torch's evaluation of size expressions: a class whose methods are the operations, and a function that applies them to an expression.
SizeArithmetic: Any = _find("torch.utils._sympy.reference.PythonReferenceAnalysis") or object
evaluate_size: Callable[..., Any] = _require("torch.utils._sympy.interp.sympy_interp")


def guards_are_suppressed(shape_env: Any) -> bool:
    """True if this ShapeEnv of torch does not record assumptions on sizes as guards at present."""
    return bool(shape_env.frozen or shape_env._suppress_guards_tls())


def is_composite(op: Any, device: str) -> bool:
    """True if an op has no kernel for a device type and decomposes into other ops there (CompositeImplicitAutograd)."""
    name = op.name()
    return _has_kernel(name, "CompositeImplicitAutograd") and not _has_kernel(name, _key_for_device(device))


def functional_value(tensor: Any) -> torch.Tensor:
    """Returns the tensor that a functional tensor wraps, with all pending writes. Only outside of FunctionalTensorMode."""
    value: torch.Tensor = tensor.from_functional()
    return value


# Returns the number of active dispatch modes in this thread. A call takes a few tens of nanoseconds.
mode_count: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack") or (lambda: len(_get_current_dispatch_mode_stack()))


# Returns the number of active pre-dispatch modes in this thread.
_pre_dispatch_mode_count: Callable[[], int] | None = _find("torch._ops._len_torch_dispatch_stack_pre_dispatch")


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which no dispatch mode of this thread handles torch's ops. Without active modes, it does nothing."""
    if mode_count() or _pre_dispatch_mode_count is None or _pre_dispatch_mode_count():
        return _disable_current_modes()
    return contextlib.nullcontext()


class _BelowAutograd:
    """See `below_autograd`. It is a class, because a generator's context manager takes twice as long, and many calls enter it."""

    __slots__ = ("_contexts",)

    def __enter__(self) -> None:
        self._contexts = _below_autograd_keys(), without_autocast(), without_torch_function()
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


# A context in which torch's ops run as kernels, whatever the caller has set: without autograd, autocast and `__torch_function__`.
below_autograd: Callable[[], contextlib.AbstractContextManager[None]] = _BelowAutograd


# Tensors and their storages

# Returns a tensor's version counter. Tensors made in inference mode have none.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
# Returns the base tensor of a view; None for other tensors.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
# Exchanges the data, gradient and requires_grad of two tensors, but not the Python objects and their attributes.
swap_values: Callable[[torch.Tensor, torch.Tensor], None] = _require("torch._C._swap_tensor_impl")
# Returns the handle of torch's current stream, given a CUDA device index. torch.cuda.current_stream takes 9 us (host of an H200).
current_raw_stream: Callable[[int], int] = _find("torch._C._cuda_getCurrentRawStream") or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)
# Returns an id of the tensor's storage, unique among live storages.
storage_id: Callable[[torch.Tensor], int] = _find("torch._C._storage_id") or (lambda tensor: tensor.untyped_storage()._cdata)
# Called with tensors on one storage; returns the positions of those that share elements with another one. None if this torch lacks it.
overlapping: Callable[..., list[int]] | None = _find("torch._C._dynamo.guards.compute_overlapping_tensors")
# True if a storage without memory can be created.
HAS_EMPTY_STORAGES = bool(Fast.storage_at)
# Makes reads of a tensor's address raise an exception until the tensor's storage gets other memory. Does nothing if this torch lacks it.
refuse_address: Callable[[torch.Tensor], None] = _find("torch._C._set_throw_on_mutable_data_ptr") or (lambda _: None)


def storage_without_memory(device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """Returns a storage that has this size in bytes but no memory. Requires HAS_EMPTY_STORAGES."""
    return _storage_at(0, device, nbytes)


# A device implemented in Python (PrivateUse1)

# Renames torch's PrivateUse1 device, and registers its module, hooks and guard: (rename, backend_module, hook, device_guard).
register_device: Callable[..., None] = _require("torch.utils.backend_registration._setup_privateuseone_for_python_backend")
# The base class of a device's hooks.
DeviceHooks: Any = _find("torch._C._acc.PrivateUse1Hooks") or object
# The base class of a device's guard, and the device type that the guard returns.
DeviceGuard: Any = _find("torch._C._acc.DeviceGuard") or object
PRIVATEUSE1_TYPE: Any = torch.autograd.DeviceType.PrivateUse1
_storage_use_count: Callable[[int], int] = _require("torch._C._storage_Use_Count")
_cpu_keys = torch.DispatchKeySet(torch.DispatchKey.CPU)
PRIVATEUSE1_KEY, PRIVATEUSE1_AUTOCAST_KEY, PRIVATEUSE1_AUTOGRAD_KEY = "PrivateUse1", "AutocastPrivateUse1", "AutogradPrivateUse1"


def privateuse1_name() -> str:
    """Returns the name of torch's PrivateUse1 device: "privateuseone" until it is renamed."""
    return torch.device("privateuseone").type


def ops_with_kernel(key: str) -> list[torch._ops.OpOverload]:
    """Returns the ATen ops that have their own kernel for a dispatch key."""
    names = [name.partition("::")[2] for name in op_names() if name.startswith("aten::") and _has_kernel(name, key)]
    return [getattr(getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2] or "default") for name in names]


def wrap_backward(context: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> bool:
    """Makes each backward pass of this process run inside `context(outputs)`, given the tensors from which the pass starts.

    Returns: False if this torch does not allow it; else True.
    """
    run = _find("torch.autograd.graph._engine_run_backward")
    if run is None or _find("torch.autograd._engine_run_backward") is not run:
        return False

    def inside(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with context(t_outputs):
            return run(t_outputs, *args, **kwargs)

    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = functools.wraps(run)(skipped_by_dynamo(inside))
    return True


def call_cpu_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the CPU kernel of an op with tensors of any device. The op must not access the tensors' memory."""
    return op.redispatch(_cpu_keys, *args, **kwargs)


def call_composite_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an op's CompositeExplicitAutograd kernel, even if the device has its own kernel."""
    return op._op_dk(torch.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def set_storage(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, shape: Any, stride: Any) -> None:
    """Sets a tensor's storage, offset, shape and strides. The storage must be on the tensor's device and large enough."""
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_cpu_keys, tensor, storage, offset, shape, stride)


# Functions that write a CPU storage's bytes to a file, and read them back, as torch.save and torch.load do.
write_storage: Callable[..., None] = _require("torch.UntypedStorage._write_file")
read_storage: Callable[..., torch.UntypedStorage] = _require("torch.UntypedStorage._set_from_file")
# Returns an id of a storage, unique among live storages. (`storage_id` takes a tensor instead.)
id_of_storage: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Returns the number of tensors and Python objects that refer to a storage."""
    return _storage_use_count(storage._cdata)


# torch's settings

# By backend and op, the public module that has the setting of the op's float32 precision.
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


# Called with the names of a backend and an op. Returns how the backend's kernels may round float32 operands of the op: "ieee" (not at all),
# "tf32", "bf16" or "none" (not set). An op without a setting inherits the backend's setting for "all". A backend without this setting
# inherits that of ("generic", "all"). torch's kernels use this getter, too. (The older getters, `torch.get_float32_matmul_precision` and
# `allow_tf32`, raise if older and newer settings contradict each other.) A call takes 0.2 us.
float32_precision: Callable[[str, str], str] = _find("torch._C._get_fp32_precision_getter") or _public_float32_precision


def _setting(module: Any, name: str) -> Callable[[], Any]:
    """Returns a getter of a setting in `torch.backends`: the C++ function of the public property if it has one. The property takes 2 us."""
    getter = getattr(inspect.getattr_static(module, name, None), "getter", None)
    return getter if callable(getter) else functools.partial(getattr, module, name)


is_forward_mode_enabled: Callable[[], bool] = _require("torch._C._is_fwd_grad_enabled")
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
    # Getters that not every version of torch has. The settings of the first five also have public attributes, but reading one takes 1 to
    # 4 us. The other settings have no public attribute.
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
# Returns the nesting level of functorch transforms in this thread; None outside of transforms, or if this torch lacks the function.
functorch_level: Callable[[], int | None] = _find("torch._C._functorch.maybe_current_level") or (lambda: None)
_top_saved_tensor_hooks: Callable[..., Any] = _find("torch._C._autograd._top_saved_tensors_default_hooks") or (lambda _: None)


def saved_tensor_hooks() -> tuple[Any, ...] | None:
    """Returns the hooks (pack, unpack) that autograd would apply now to saved tensors; None without hooks."""
    return _top_saved_tensor_hooks(True)


def is_profiling() -> bool:
    """True if torch's profiler runs, or if this torch does not report it."""
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", True)


# TorchDynamo's frame evaluation: between the graphs of a function with graph breaks, TorchDynamo inspects every Python frame.

_set_eval_frame: Callable[[Any], Any] = _require("torch._dynamo.eval_frame.set_eval_frame")
_eval_frame: Callable[[], Any] = _require("torch._C._dynamo.eval_frame.get_eval_frame_callback")
_skip_code: Callable[[Any], None] = _require("torch._dynamo.eval_frame.skip_code")


def skipped_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of a function. During a call of the wrapper, TorchDynamo compiles neither the function nor its callees."""

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


# Global state of torch's tracers

# TorchDynamo's own lock, which is reentrant; a new lock if this torch lacks it.
capture_lock: Any = _find("torch._dynamo.convert_frame.compile_lock") or forks.lock()
forks.reset_after_fork(capture_lock)


def compiling_flag() -> Any:
    """Returns the global flag that `torch.compiler.is_compiling()` reports in all threads."""
    if not hasattr(torch.compiler, "_is_compiling_flag"):
        raise _lacks("torch.compiler._is_compiling_flag")
    return torch.compiler._is_compiling_flag


def set_compiling_flag(value: Any) -> None:
    """Sets the flag of `compiling_flag`."""
    torch.compiler._is_compiling_flag = value


# torch's registration of the side effect of aten._linalg_check_errors. Its attribute `effect` is an EffectType, or None for no effect.
_registry_entry: Callable[[str], Any] | None = _find("torch._library.simple_registry.singleton.find")
_effect_of_checks: Any = None if _registry_entry is None else _registry_entry("aten::_linalg_check_errors").effect
_EffectType: Any = _find("torch._library.effects.EffectType")


@contextlib.contextmanager
def checks_have_side_effects() -> Iterator[None]:
    """Keeps AOTAutograd, inside the context, from removing linear-algebra checks as dead code, although no node reads their results.

    From torch 2.13 on, AOTAutograd never removes them. The calling thread must hold the capture lock.
    """
    if _EffectType is None or _effect_of_checks is None or _effect_of_checks.effect is not None:
        yield
        return
    registration = _effect_of_checks.register(_EffectType.ORDERED)
    try:
        yield
    finally:
        registration.destroy()


_AliasCheckMode: Any = _find("torch._functorch._aot_autograd.runtime_wrappers._AnalyzeCustomOpInputOutputMode")


def check_of_aliases() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which torch warns or raises, as its settings say, if results of a custom op alias operands or each other.

    AOTAutograd makes the same check in the first call of a compiled function, but does not see custom ops that an XLA program calls.
    """
    is_enabled = getattr(torch._functorch.config, "check_custom_op_aliasing", False)
    return _AliasCheckMode() if is_enabled and _AliasCheckMode is not None else contextlib.nullcontext()


def custom_op_function(value: Any) -> Any:
    """Returns the function from which `torch.library.custom_op` has created this op; None for other objects."""
    return value._init_fn if isinstance(value, torch.library.CustomOpDef) else None


@contextlib.contextmanager
def without_vmap_loops() -> Iterator[None]:
    """Makes torch.vmap raise inside the context for an op without a batching rule, instead of calling the op once for each sample."""
    before = _is_vmap_fallback_enabled()
    _set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        _set_vmap_fallback_enabled(before)


_is_vmap_fallback_enabled: Callable[[], bool] = _require("torch._C._functorch._is_vmap_fallback_enabled")
_set_vmap_fallback_enabled: Callable[[bool], None] = _require("torch._C._functorch._set_vmap_fallback_enabled")

# The names of torch's modules of DTensor placements and of process groups.
PLACEMENTS, PROCESSES = "torch._C._distributed", "torch._C._distributed_c10d"


def local_tensor(tensor: Any) -> torch.Tensor:
    """Returns a DTensor's local tensor itself; `to_local` returns a view of it."""
    local: torch.Tensor = tensor._local_tensor
    return local


def completed_work() -> Any:
    """Returns a completed Work object."""
    return torch._C._distributed_c10d.FakeWork()


def boxed_completed_work() -> Any:
    """Returns a completed Work in the boxed form that ops of torch.distributed return."""
    return torch.distributed.Work.boxed(completed_work())


# Process groups. A group has one backend for each device type. If a debugging mode of torch wraps the group, the backend is not accessible.


_resolve_group: Callable[[str], Any] = _require("torch.distributed.distributed_c10d._resolve_process_group")


def process_group(name: str) -> Any:
    """Returns the process group that currently has this name."""
    return _resolve_group(name)


def store_of(group: Any) -> Any:
    """Returns the store of a process group; None for a fake group, or if the group does not expose its store."""
    is_fake = "fake" in (group.name(), torch.distributed.get_backend(group))
    return None if is_fake else group.get_group_store()


def timeout_of(group: Any) -> float:
    """Returns the timeout of a group's collectives of CPU tensors, in seconds: torch's default if the group does not show its own."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None) or torch.distributed.constants.default_pg_timeout
    return float(timeout.total_seconds())


def all_gather(group: Any, output: torch.Tensor, tensor: torch.Tensor) -> Any:
    """Starts an all-gather of one tensor per process into `output`. Returns: its Work."""
    return group._allgather_base(output, tensor)


def reduce_scatter(group: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
    """Starts a reduce-scatter of `tensor` into `output`. Returns: its Work."""
    return group._reduce_scatter_base(output, tensor, options)


# Private parts of DistributedDataParallel


def unsupported_ddp_feature(module: Any) -> str:
    """Returns the name of a feature that this DistributedDataParallel uses, other than averaging gradients; "" if there is none."""
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
    """Returns the parameters whose gradients a DistributedDataParallel averages, with their names in the wrapped module."""
    reduced = {id(parameter) for parameter in module._module_parameters if parameter.requires_grad}
    return [(name, parameter) for name, parameter in module.module.named_parameters() if id(parameter) in reduced]


@contextlib.contextmanager
def without_reducer(module: Any, share_buffers: Callable[[list[torch.Tensor]], object]) -> Iterator[None]:
    """Makes a DistributedDataParallel, inside the context, call its module without averaging gradients.

    Args:
        module: The DistributedDataParallel.
        share_buffers: Called before the module, with the list of the buffers that must be synchronised among the processes.
    """

    def pre_forward(*inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if module.will_sync_module_buffers():  # always before the forward pass, since a buffer_hook is an unsupported feature
            share_buffers([item for name, item in module.module.named_buffers() if name not in module.parameters_to_ignore])
        module.require_forward_param_sync = torch.is_grad_enabled() and module.require_backward_grad_sync
        if not module.device_ids:
            return inputs, kwargs
        device = torch.device(module.device_type, module.device_ids[0])
        moved, named = torch.distributed.utils._to_kwargs(inputs, kwargs, device, module.use_side_stream_for_tensor_copies)
        return moved[0], named[0]

    # With `_use_python_reducer`, torch's own `_pre_forward` and `_post_forward` do nothing, and the reducer in C++ is not used. The
    # function above does the parts of `_pre_forward` that are still needed.
    before = module._use_python_reducer
    module._use_python_reducer, module._pre_forward = True, pre_forward
    try:
        yield
    finally:
        module._use_python_reducer = before
        del module._pre_forward


_queue_callback: Callable[[Callable[[], object]], None] = _require("torch.autograd.Variable._execution_engine.queue_callback")


def call_after_backward(function: Callable[[], object]) -> None:
    """Makes autograd call a function at the end of the current backward pass, after all gradients."""
    _queue_callback(function)


def op_lookup_codes() -> tuple[types.CodeType, ...]:
    """Returns the code objects of torch's functions that look up a called op, and add a cache entry at the op's first call.

    Observers of a function's effects ignore these calls (guards/observation.py). The functions belong to the registry of custom ops, and to
    DTensor's sharding propagation (if this process has DTensors).
    """
    dispatcher = getattr(sys.modules.get("torch.distributed.tensor._dispatch"), "OpDispatcher", None)
    functions = getattr(_registry_entry, "__func__", None), getattr(dispatcher, "_propagate_op_sharding_dispatch_slow_path", None)
    return tuple(function.__code__ for function in functions if function is not None)


# Private parts of JAX and jaxlib


_CompileOptions, _DeviceList = _find("jaxlib.xla_client.CompileOptions"), _find("jaxlib.xla_client.DeviceList")
if Fast.make_cpu_client and (_CompileOptions is None or _DeviceList is None):  # dynaxla's own client needs both to compile a program
    gate(["make_cpu_client"], "jaxlib.xla_client lacks CompileOptions or DeviceList")


def make_cpu_client(devices: int = 1) -> Any | None:
    """Returns a PJRT client with this many CPU devices, whose programs run in the calling thread; None if jaxlib does not support it."""
    if Fast.make_cpu_client is None:
        return None
    try:
        return Fast.make_cpu_client(asynchronous=False, **({} if devices == 1 else {"num_devices": devices}))
    except TypeError as error:  # another release of jaxlib, with other arguments
        gate(["make_cpu_client"], f"TypeError: {error}")
        return None


def compile_options(device: jax.Device, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the compile options and the device list with which dynaxla's own client compiles a program.

    Args:
        device: The device of the program.
        options: XLA's options, by name.
    """
    compile_options = _CompileOptions()
    compile_options.num_replicas = compile_options.num_partitions = 1
    compile_options.env_option_overrides = list(options.items())
    return compile_options, _DeviceList((device,))


# JAX's lock: while a thread holds it, no other thread creates one of JAX's own clients.
client_lock: contextlib.AbstractContextManager[Any] = _find("jax._src.xla_bridge._backend_lock") or contextlib.nullcontext()


def mlir_threads() -> Any | None:
    """Returns JAX's MLIR thread pool; None if there is none. Imports nothing, because a child process calls this right after a fork."""
    return getattr(sys.modules.get("jax._src.interpreters.mlir"), "global_thread_pool", None)


# Removes a jaxpr from JAX's cache of dead-code elimination, whose keys are weak references. From JAX 0.11 on, the entry of a jaxpr with
# `keep_unused=True` refers to the jaxpr itself. Without the removal, neither the jaxpr nor the program's constants and kernels would ever
# be freed.
_evict_jaxpr: Callable[[Any], object] | None = _find("jax._src.interpreters.pxla._dce_jaxpr.evict_weakref")


def lower(traced: jax.stages.Traced, platform: str | None = None) -> jax.stages.Lowered:
    """Lowers a traced program to StableHLO, so that JAX's caches do not keep the traced program alive.

    Args:
        traced: The program.
        platform: The platform; by default that of the devices of the program's arguments.
    """
    lowered = traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))
    if _evict_jaxpr is not None:
        _evict_jaxpr(traced.jaxpr)
    return lowered


def host_callbacks(lowered: jax.stages.Lowered) -> Any:
    """Returns the host callbacks of a lowered program."""
    try:
        return lowered._lowering.compile_args["host_callbacks"]
    except (AttributeError, KeyError):
        raise _lacks("jax.stages.Lowered._lowering.compile_args['host_callbacks']") from None


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the mesh axes along which a value with this aval varies inside `jax.shard_map`. JAX has renamed the attribute repeatedly."""
    for name in ("manual_axis_type", "mat"):
        if (axis_type := getattr(aval, name, None)) is not None:
            return frozenset(axis_type.varying)
    return frozenset(getattr(aval, "vma", ()))


_profiler_session: Any = _find("jaxlib._profiler.ProfilerSession")


def profile() -> Callable[[], bytes] | None:
    """Starts a profile of XLA. `jax.profiler.start_trace` would start JAX's own client, and leave files.

    Returns: a function that ends the profile and returns it as bytes for `jax.profiler.ProfileData`; None if jaxlib does not support it.
    """
    if _profiler_session is None:
        return None
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return _profiler_session(options).stop


# Private parts of torch.compile, autograd and graph modules


def uncompiled(function: Any) -> Any:
    """Returns the original of a module or function that `torch.compile` has returned; the argument itself if it is not compiled."""
    if isinstance(function, torch._dynamo.eval_frame.OptimizedModule):
        return uncompiled(function._orig_mod)
    original = getattr(function, "_torchdynamo_orig_callable", None)
    return function if original is None else uncompiled(original)


_innermost_backend = _require("torch._dynamo.eval_frame.innermost_backend")


def backend_of(function: Any) -> Any:
    """Returns the backend of a module or function that is compiled by `torch.compile` or `module.compile()`; None if it is not compiled."""
    context = getattr(function, "dynamo_ctx", None)
    if context is not None:
        return _innermost_backend(context.callback)
    compiled = getattr(function, "_compiled_call_impl", None) if isinstance(function, torch.nn.Module) else function
    if compiled is None or not hasattr(compiled, "_torchdynamo_orig_callable"):
        return None
    callback = inspect.getclosurevars(compiled).nonlocals.get("callback")
    return _innermost_backend(callback) if callback is not None else None


def uncompiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Returns a function that calls a module with its hooks, bypassing the compiled call of `module.compile()`."""
    return lambda *args, **kwargs: module._call_impl(*args, **kwargs)


def has_hooks(tensor: torch.Tensor) -> bool:
    """True if the tensor has gradient hooks (`register_hook`, `register_post_accumulate_grad_hook`)."""
    return bool(getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None))


_current_node: Callable[[], Any] = _require("torch._C._current_autograd_node")
_next_sequence_number: Callable[[], int] = _require("torch.autograd._get_sequence_nr")


def autograd_position() -> tuple[int, bool]:
    """Returns the sequence number of autograd's latest node, and False. In a backward pass: that of the current node, and True."""
    node = _current_node()
    return (_next_sequence_number() - 1, False) if node is None else (node._sequence_nr(), True)


# Returns the id of this thread's current backward pass; -1 outside of any.
backward_id: Callable[[], int] = _require("torch._C._current_graph_task_id")


def forward_of(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """Returns a graph module's `forward` with generated code. Some modules generate it lazily: until then, `forward` is a placeholder."""
    recompile = getattr(module, "real_recompile", None)
    if recompile is not None:
        recompile()
    return module.forward


def names_in_op_db() -> set[str]:
    """Returns the names in PyTorch's operator database. The import takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {entry.name for entry in op_db}
