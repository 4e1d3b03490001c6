"""Facts about the installed releases that need no test: missing names, and fallbacks in use."""

from __future__ import annotations

import pkgutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import torch

from dynaxla import torch_ops
from dynaxla.capture.graph_cache import foreign_kernels
from dynaxla.lowering.cpu import onednn_support
from dynaxla.lowering.registry import registry
from dynaxla.runtime import clients, private, private_fsdp
from repository import test_sources


def facts() -> dict[str, list[str]]:
    """Returns the lines of the report by heading. A heading without lines: no difference from the tested releases."""
    clients.cpu_device()  # runs the self-tests of private entry points
    paths = private.fast_paths()
    return {
        "newer than the tested releases": private.newer_than_known(),
        "private names that are gone, and have no other way": private.missing,
        "private names that are gone": sorted(gone_names()),
        "attributes of FSDP2 that are gone": [attribute] if (attribute := missing_of_fsdp()) else [],
        "ops that are gone": sorted(gone_ops()),
        "fast ways that do not run": [f"{path}: {state}" for path, state in paths.items() if state != "live"],
        "oneDNN does not run": [reason] if (reason := onednn_support.why_not()) else [],
        "kernels for which no traced graph is kept": foreign_kernels(),
    }


def gone_names() -> Iterator[str]:
    """Yields the dotted private names in dynaxla's sources that do not exist."""
    for file in test_sources.PRIVATE:
        for _, name in test_sources.in_private_modules(test_sources.SOURCES[file]):
            if not name.endswith(".") and not is_there(name):
                yield name


def is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def gone_ops() -> Iterator[str]:
    """Yields the ops that lowerings and passes name, and that torch does not have."""
    registry.fill()
    for namespace in (torch_ops.aten, torch_ops.prims):
        for packet_or_op in vars(namespace).values():
            for op in (packet_or_op, *vars(packet_or_op).values()) if hasattr(packet_or_op, "__dict__") else (packet_or_op,):
                if isinstance(op, torch_ops.MissingOp):
                    yield op.name


def missing_of_fsdp() -> str:
    """Returns the first missing attribute of FSDP2 that steps need; "" if all exist."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{Path(folder) / 'group'}", rank=0, world_size=1)
        try:
            net: Any = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
            return private_fsdp.missing_in([net])
        finally:
            torch.distributed.destroy_process_group()


def versions() -> str:
    return f"torch {torch.__version__}, jax {jax.__version__}, jaxlib {private.jaxlib_version()}"
