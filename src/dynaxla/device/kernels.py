"""Registers the device's kernels with torch's dispatcher.

Most ops use one general kernel, `eager_mode.kernel`. This module has kernels of ops about memory, Python numbers and other devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ..runtime import meshes, private
from ..runtime.guards import is_not_observed
from ..runtime.layout import row_major
from ..torch_ops import aten
from ..training import fused_steps
from . import autocasting, copies, eager_mode, pjrt_devices, storages
from .strided_memory import StridedView


def _strides(shape: Sequence[int], memory_format: torch.memory_format | None) -> tuple[int, ...]:
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        return row_major(tuple(shape))
    return tuple(torch.empty(tuple(shape), device="meta", memory_format=memory_format).stride())


def _checked_dtype(dtype: torch.dtype | None, layout: torch.layout | None, pin_memory: bool | None) -> torch.dtype:
    """Returns the dtype of a new tensor. Raises: NotImplementedError or RuntimeError for options that the device does not have."""
    if layout not in (None, torch.strided):
        raise NotImplementedError(f"the device jax does not support the layout {layout}: keep such tensors on the CPU")
    if pin_memory:
        raise RuntimeError("Cannot pin a tensor on the device jax: only dense CPU tensors can be pinned")
    dtype = dtype or torch.get_default_dtype()
    if not eager_mode.dtypes.is_supported(dtype):
        raise RuntimeError(f"JAX has no dtype {dtype}, so the device jax does not support it: use another dtype")
    return dtype


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    return empty_strided(size, _strides(size, memory_format), dtype=dtype, layout=layout, device=device, pin_memory=pin_memory)


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    dtype = _checked_dtype(dtype, layout, pin_memory)
    if any(length < 0 for length in size):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(size)}: {list(size)}")
    return storages.new_tensor(size, stride, dtype, pjrt_devices.with_index(device or torch.device(storages.NAME)))


def empty_like(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Implements empty_like. A result with the strides of `tensor` gets its sharding. Ops that fill the result (`zeros_like`) keep it."""
    result = private.call_composite_kernel(
        aten.empty_like.default, tensor, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory, memory_format=memory_format
    )
    if meshes.may_have_sharded_arrays() and result.device == tensor.device and result.stride() == tensor.stride():
        shape, sharding = storages.shape_and_sharding(tensor.untyped_storage())
        if sharding is not None and shape == StridedView.of(result).layout.packed_shape:
            storages.set_content(result.untyped_storage(), copies.zeros(shape, result.dtype, sharding))
        shape, sharding = storages.virtual_sharding_of(tensor.untyped_storage())
        if shape is not None and sharding is not None:
            storages.set_virtual_sharding(result.untyped_storage(), shape, sharding)
    return result


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Implements target.copy_(source), where at least one of the tensors is on the device.

    A copy from or to the CPU waits until it is done, even with non_blocking.
    """
    if not storages.is_jax_tensor(target):
        host = copies.to_cpu(source)
        target.copy_(host if target.device.type == "cpu" else host.to(target.device))
        return target
    if storages.is_jax_tensor(source) and source.device == target.device:
        if not copies.share(source, target):
            eager_mode.run_or_fall_back(aten.clone.default, (source,), [target])
        return target
    host = copies.to_cpu(source) if storages.is_jax_tensor(source) else source.detach().cpu()
    host = host.to(target.dtype).expand(target.shape)
    if isinstance(storages.content_of(target.untyped_storage()), storages.StorageContent) and not StridedView.of(target).fills(
        target.untyped_storage().nbytes()
    ):  # recorded ops must not run for this copy
        eager_mode.run_or_fall_back(aten.clone.default, (copies.from_cpu(host, target.device),), [target])
    else:
        copies.write_from_cpu(target, host)
    return target


def to_copy(tensor: torch.Tensor, *, non_blocking: bool = False, **options: Any) -> torch.Tensor:
    """Implements _to_copy for tensors of the device. Ignores non_blocking, for which torch would require pinned memory."""
    return private.call_composite_kernel(aten._to_copy.default, tensor, **options)


def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if storages.is_jax_tensor(target):
        eager_mode.resize_output(target, tuple(source.shape), row_major(tuple(source.shape)))
    else:
        target.resize_(source.shape)
    return copy_from(source, target)


def item(tensor: torch.Tensor) -> Any:
    return copies.to_cpu(tensor).item()


def equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.device != other.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {tensor.device} and {other.device}!"
        )
    return tensor.shape == other.shape and bool(tensor.eq(other).all())


def set_storage(
    tensor: torch.Tensor, source: torch.UntypedStorage, storage_offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    """Implements tensor.set_(source, ...). Raises: RuntimeError for a storage on another device, or for a storage that is too small."""
    if source.device != tensor.device:
        raise RuntimeError(
            f'Attempted to set the storage of a tensor on device "{tensor.device}" to a storage on different device "{source.device}".'
        )
    steps = tuple(stride) or row_major(tuple(size))
    needed = (storage_offset + storages.storage_extent(tuple(size), steps)) * tensor.element_size()
    if math.prod(size) and needed > source.nbytes():
        raise RuntimeError(f"a storage of {source.nbytes()} bytes on {source.device} is too small for a tensor that reads {needed} bytes")
    private.set_storage(tensor, source, storage_offset, tuple(size), steps)
    return tensor


def set_whole_storage(tensor: torch.Tensor, source: torch.UntypedStorage) -> torch.Tensor:
    """Implements tensor.set_(source): the tensor becomes a vector of all elements of the storage."""
    return set_storage(tensor, source, 0, (source.nbytes() // tensor.element_size(),), (1,))


def set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return set_storage(tensor, source.untyped_storage(), int(source.storage_offset()), tuple(source.shape), tuple(source.stride()))


def set_empty_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Implements tensor.set_() without arguments: the tensor becomes an empty vector on a new storage."""
    return set_storage(tensor, storages.make_storage(0, tensor.device), 0, (0,), (1,))


def resize(tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    if tuple(tensor.shape) != tuple(size):
        storages.resize(tensor, tuple(size), _strides(size, memory_format))
    return tensor


def as_strided_copy(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> torch.Tensor:
    """Implements as_strided_copy. It may read memory of the operand's storage outside of the operand."""
    return tensor.as_strided(size, stride, storage_offset).clone(memory_format=torch.contiguous_format)


def as_strided_scatter(
    tensor: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Implements as_strided_scatter, which may write outside of its operand. So the result is a view of a copy of the operand's storage.

    An expanded operand (stride 0) is copied alone. Source: ATen native/TensorFactories.cpp, clone_preserve_strides
    """
    if any(length > 1 and not step for length, step in zip(tensor.shape, tensor.stride(), strict=True)):
        copied = tensor.clone()
    else:
        memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        copied = memory.clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    part = copied.as_strided(size, stride, storage_offset)
    if part.shape != source.shape:
        raise RuntimeError(f"expected src to have a size equal to the slice of self. src size = {source.shape}, slice size = {part.shape}")
    part.copy_(source)
    return copied


def native_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Implements native_batch_norm. It writes to the running statistics, although its schema does not say so."""
    if not training and running_mean is not None:
        op = aten._native_batch_norm_legit_no_training.default
        return eager_mode.run_or_fall_back(op, (x, weight, bias, running_mean, running_var, momentum, eps))
    old = [running_mean, running_var]
    if running_mean is None or running_var is None:
        dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        old = [torch.zeros(x.shape[1], dtype=dtype, device=x.device) for _ in range(2)]
    functional = aten._native_batch_norm_legit_functional.default
    *results, mean, var = eager_mode.run_or_fall_back(functional, (x, weight, bias, *old, True, momentum, eps))
    if running_mean is not None and running_var is not None:
        copy_from(mean, running_mean)
        copy_from(var, running_var)
    return tuple(results)


def native_batch_norm_out(*args: Any, out: torch.Tensor, save_mean: torch.Tensor, save_invstd: torch.Tensor) -> Any:
    targets = (out, save_mean, save_invstd)
    for target, value in zip(targets, native_batch_norm(*args), strict=True):
        eager_mode.resize_output(target, tuple(value.shape), tuple(value.stride()))
        copy_from(value, target)
    return targets


def rrelu_with_noise(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Implements rrelu_with_noise, which returns the result and, in training, writes the slopes to `noise`.

    The general kernel requires a functional op with one result for each written argument. This functional op also returns the result.
    """
    op = aten.rrelu_with_noise_functional.default
    result, slopes = eager_mode.run_or_fall_back(op, (x, noise, lower, upper, training, generator))
    if training:
        copy_from(slopes, noise)
    return result


def rrelu_with_noise_(x: torch.Tensor, noise: torch.Tensor, *args: Any) -> torch.Tensor:
    return copy_from(rrelu_with_noise(x, noise, *args), x)


def rrelu_with_noise_out(x: torch.Tensor, noise: torch.Tensor, *args: Any, out: torch.Tensor) -> torch.Tensor:
    result = rrelu_with_noise(x, noise, *args)
    eager_mode.resize_output(out, tuple(result.shape), tuple(result.stride()))
    return copy_from(result, out)


def fused_step_kernel(op: Any) -> Any:
    """Returns a kernel that runs an optimizer's fused step as one program.

    The learning rate is an input of the program. Other floats are inputs unless they are 0: the program of a step with a weight decay of 0,
    for example, has no code for weight decay.
    """
    step = fused_steps.fused_step(op)
    assert step is not None

    def kernel(*lists: Sequence[torch.Tensor], **settings: Any) -> None:
        numbers = {name: value for name, value in settings.items() if isinstance(value, float) and (value != 0 or name == "lr")}
        step(*lists, **settings | {name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in numbers.items()})

    return kernel


def check_and_unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Implements the unscaling of torch.amp.GradScaler: multiplies gradients by inv_scale; sets found_inf to 1 if a value is not finite."""
    for gradient in gradients:
        found_inf.copy_(torch.maximum(found_inf, gradient.isfinite().all().logical_not().to(found_inf.dtype)))
        gradient.mul_(inv_scale)


def pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Returns a pinned copy of a CPU tensor if there is a GPU, else an ordinary copy.

    Without this kernel, torch would request pinned memory from the device jax, which has none.
    """
    if torch.cuda.is_available():
        return private.call_composite_kernel(aten._pin_memory.default, tensor, torch.device("cuda"))
    return tensor.clone(memory_format=torch.contiguous_format)


def choose_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Chooses the ops that compute scaled_dot_product_attention: the fused op (OVERRIDEABLE), or torch's matmuls and softmax (MATH).

    MATH broadcasts batches and heads, raises torch's errors for wrong calls, and takes float64, for which the fused op's log-sum-exp is too
    imprecise. MATH is also chosen inside `torch.nn.attention.sdpa_kernel(MATH)`, where only the math flag is on and the flags of the named
    kernels (flash, memory-efficient, cuDNN) are off.

    Returns: The value of a member of torch.nn.attention.SDPBackend.
    """
    flags = torch.backends.cuda
    has_kernels = flags.flash_sdp_enabled() or flags.mem_efficient_sdp_enabled() or flags.cudnn_sdp_enabled()
    is_supported = (
        query.dim() == key.dim() == value.dim() == 4
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
        and key.shape[:3] == value.shape[:3]
        and (query.shape[1] == key.shape[1] or (enable_gqa and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0))
    )
    if attn_mask is not None:
        sizes = (*query.shape[:3], key.shape[2])[4 - attn_mask.dim() :] if is_supported and attn_mask.dim() <= 4 else ()
        is_supported = (
            not is_causal
            and attn_mask.dtype in (torch.bool, query.dtype)
            and len(sizes) == attn_mask.dim() >= 2
            and all(mask_size in (1, size) for mask_size, size in zip(attn_mask.shape, sizes, strict=True))
        )
    return _FUSED if is_supported and (has_kernels or not flags.math_sdp_enabled()) else _MATH


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Implements scaled_dot_product_attention above autograd: autograd differentiates the ops that this function calls.

    ATen's own implementation chooses these ops by a stub in C++, and Python cannot register `choose_attention` for this stub.
    """
    settings: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if choose_attention(query, key, value, attn_mask, dropout_p, is_causal, **settings) == _MATH:
        return aten.scaled_dot_product_attention.default.decompose(query, key, value, attn_mask, dropout_p, is_causal, **settings)
    fused = aten._scaled_dot_product_fused_attention_overrideable.default
    return fused(query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale)[0]


def unsupported_kernel(op: Any) -> Any:
    """Returns a kernel that raises NotImplementedError."""

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{op} is not supported on the device jax: it writes to operands, and its schema does not say so")

    return kernel


# Values of torch.nn.attention.SDPBackend.
_MATH, _FUSED = int(SDPBackend.MATH.value), int(SDPBackend.OVERRIDEABLE.value)

_FUSED_STEPS = (
    aten._fused_adam_.default, aten._fused_adam_.tensor_lr, aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr,
    aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr,
)  # fmt: skip
_KERNELS: dict[Any, Any] = {
    aten.empty.memory_format: empty,
    aten.empty_strided.default: empty_strided,
    aten.empty_like.default: empty_like,
    aten._to_copy.default: to_copy,
    aten._copy_from.default: copy_from,
    aten._copy_from_and_resize.default: copy_from_and_resize,
    aten._local_scalar_dense.default: item,
    aten.equal.default: equal,
    aten.set_.source_Storage_storage_offset: set_storage,
    aten.set_.source_Storage: set_whole_storage,
    aten.set_.source_Tensor: set_tensor,
    aten.set_.default: set_empty_storage,
    aten.resize_.default: resize,
    aten.as_strided_copy.default: as_strided_copy,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten._amp_foreach_non_finite_check_and_unscale_.default: check_and_unscale,
    aten.rrelu_with_noise.default: rrelu_with_noise,
    aten.rrelu_with_noise.out: rrelu_with_noise_out,
    aten.rrelu_with_noise_.default: rrelu_with_noise_,
    **{op: fused_step_kernel(op) for op in _FUSED_STEPS},
    aten.native_batch_norm.default: native_batch_norm,
    aten.native_batch_norm.out: native_batch_norm_out,
    aten._native_batch_norm_legit.default: native_batch_norm,
    aten._native_batch_norm_legit.out: native_batch_norm_out,
    aten.batch_norm_update_stats.default: unsupported_kernel(aten.batch_norm_update_stats.default),
    aten.batch_norm_gather_stats.default: unsupported_kernel(aten.batch_norm_gather_stats.default),
    aten.batch_norm_gather_stats_with_counts.default: unsupported_kernel(aten.batch_norm_gather_stats_with_counts.default),
}
# Ops for which the general kernel is registered explicitly, in place of an ATen kernel that would serve every device. ATen's kernels of the
# first two call other kernels that the device must have. Those of the others split the op into several ops, or raise.
_GENERAL_KERNEL_OPS = (
    aten.convolution.default, aten.convolution_backward.default, aten.native_layer_norm.default, aten.native_group_norm.default,
    aten.embedding.default, aten.constant_pad_nd.default, aten.logsumexp.default, aten.repeat.default, aten.stack.default,
    aten.slice_backward.default, aten.diagonal_backward.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default,
    aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, aten.mode.values, aten.masked_scatter.default, aten.rot90.default,
    aten.dist.default, aten.count_nonzero.default, aten._safe_softmax.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.linspace.default,
    aten.cholesky_solve.default, aten._grouped_mm.default,
    aten._scaled_dot_product_fused_attention_overrideable.default, aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)  # fmt: skip
# The dispatch key of ATen's kernels of structured ops for every device. These kernels need the operands' addresses, which do not exist.
_STRUCTURED_KERNELS = "CompositeExplicitAutogradNonFunctional"

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Registers the device's kernels with torch, for the life of the process."""
    aten_library, dynaxla_library, all_libraries = (torch.library.Library(name, "IMPL") for name in ("aten", "dynaxla", "_"))
    _libraries[:] = [aten_library, dynaxla_library, all_libraries]  # torch removes the kernels of a library that is freed
    private.register_own_libraries(aten_library, dynaxla_library, all_libraries)
    for op, function in _KERNELS.items():
        aten_library.impl(op, _kernel(function), private.PRIVATEUSE1_KEY)
    for op in {*_GENERAL_KERNEL_OPS, *private.ops_with_kernel(_STRUCTURED_KERNELS)} - _KERNELS.keys():
        aten_library.impl(op, _general_kernel(op), private.PRIVATEUSE1_KEY)
    for op in (torch.ops.dynaxla.fused_adam.default, torch.ops.dynaxla.fused_sgd.default, torch.ops.dynaxla.sharding_constraint.default):
        dynaxla_library.impl(op, _general_kernel(op), private.PRIVATEUSE1_KEY)
    for key in ("Conjugate", "Negative"):  # torch's own kernel of this key would resolve the bit by a copy, which calls this op again
        aten_library.impl(aten._copy_from.default, torch.library.fallthrough_kernel, key)
    aten_library.impl(aten._pin_memory.default, _kernel(pin_memory), "CPU")
    all_libraries.fallback(torch.library.fallthrough_kernel, private.PRIVATEUSE1_AUTOCAST_KEY)
    autocasting.register(aten_library)
    aten_library.impl(aten._fused_sdp_choice.default, choose_attention, private.PRIVATEUSE1_KEY)
    for key in (private.PRIVATEUSE1_KEY, private.PRIVATEUSE1_AUTOGRAD_KEY):
        aten_library.impl(aten.scaled_dot_product_attention.default, attention, key)
    all_libraries.fallback(_kernel(eager_mode.kernel), private.PRIVATEUSE1_KEY)


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as a kernel for torch. TorchDynamo does not compile it, and the observation for guards ignores its code."""
    return private.skipped_by_dynamo(is_not_observed(function))


def _general_kernel(op: Any) -> Any:
    """Returns the general kernel, bound to an op."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return eager_mode.kernel(op, *args, **kwargs)

    return _kernel(kernel)
