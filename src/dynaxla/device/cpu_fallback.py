"""The fallback for ops that XLA does not compute: torch's CPU kernel runs on copies in CPU memory, and its results are copied back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ..observe import coverage, metrics
from ..runtime import private
from . import copies, pjrt_devices, storages


def run_on_cpu(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> Any:
    """Runs torch's CPU kernel of an op. The fallback is counted, and logged once for each op.

    Args:
        op: the op.
        args: the op's positional arguments, with tensors on the device.
        kwargs: the op's keyword arguments.
        reason: the reason why XLA does not compute the op.

    Raises: the errors of the kernel; RuntimeError for operands on two devices. Nothing has been written to the device then.
    """
    device: torch.device | None = None
    cpu_copies: dict[int, torch.Tensor] = {}  # by the id of the tensor on the device
    originals: dict[int, torch.Tensor] = {}  # the tensors on the device, by the id of the copy
    written: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors that the op writes to, with their copies

    def to_cpu(value: Any, is_written: bool) -> Any:
        """Returns an argument for the CPU kernel. `is_written`: True if the op writes to the argument."""
        nonlocal device
        if storages.is_jax_tensor(value):
            if device is not None and device != value.device:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {device} and {value.device}!"
                )
            device = value.device
            if id(value) not in cpu_copies:
                cpu_copies[id(value)] = copies.to_cpu(value)
                originals[id(cpu_copies[id(value)])] = value
            if is_written:
                written.append((value, cpu_copies[id(value)]))
            return cpu_copies[id(value)]
        if isinstance(value, torch.Tensor) and value.dim() and value.device.type == "cpu" and is_written:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {op} writes to a tensor on {value.device}!")
        if isinstance(value, (list, tuple)):
            return [to_cpu(item, is_written) for item in value]
        if isinstance(value, torch.device) and value.type == storages.NAME:
            device = pjrt_devices.with_index(value)
            return torch.device("cpu")
        return None if isinstance(value, torch.Generator) else value

    schema = op._schema.arguments
    writes = {item.name for item in schema if item.alias_info is not None and item.alias_info.is_write}
    cpu_args = [to_cpu(value, schema[index].name in writes) for index, value in enumerate(args)]
    cpu_kwargs = {name: to_cpu(value, name in writes) for name, value in kwargs.items()}
    with private.below_autograd():
        result = op(*cpu_args, **cpu_kwargs)
    coverage.count_fallback(str(op), reason, "", "its operands on the device jax are copied to the CPU, and its results back")
    metrics.add("device_fallbacks")
    target_device = device or pjrt_devices.with_index(torch.device(storages.NAME))
    for target, value in written:
        if target.shape != value.shape:
            storages.resize(target, tuple(value.shape), tuple(value.stride()))
        copies.write_from_cpu(target, value)
    return _to_device(result, op, originals, target_device)


def _to_device(value: Any, op: OpOverload, originals: Mapping[int, torch.Tensor], device: torch.device) -> Any:
    """Copies the tensors in an op's result to the device. The CPU copy of an argument is replaced by the argument itself.

    Args:
        value: the result of the op, or an item of the result.
        op: the op.
        originals: the arguments on the device, by the id of their CPU copies.
        device: the device.
    """
    if isinstance(value, torch.Tensor):
        if id(value) in originals:
            return originals[id(value)]
        if value.layout != torch.strided:
            raise NotImplementedError(f"{op} returns a tensor of layout {value.layout}, which the device {device} does not have")
        return copies.from_cpu(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)([_to_device(item, op, originals, device) for item in value])
    return value
