"""The facts about the installed releases that need no test: names that are gone, and ways that are not the usual ones."""

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
    """The lines of the report by heading; a heading without lines says that all is as it was in the tested releases."""
    clients.cpu_device()  # runs the self-tests of private entry points
    paths = private.fast_paths()
    return {
        "newer than the tested releases": private.newer_than_known(),
        "private names that are gone, and have no other way": private.missing,
        "private names that are gone": sorted(gone_names()),
        "attributes of FSDP2 that are gone": [found] if (found := missing_of_fsdp()) else [],
        "ops that are gone": sorted(gone_ops()),
        "fast ways that do not run": [f"{path}: {state}" for path, state in paths.items() if state != "live"],
        "oneDNN does not run": [reason] if (reason := onednn_support.why_not()) else [],
        "kernels for which no traced graph is kept": foreign_kernels(),
    }


def gone_names() -> Iterator[str]:
    """The dotted private names in dynaxla's sources that resolve to nothing."""
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
    """The ops that lowerings and passes name, and torch lacks."""
    registry.fill()
    for namespace in (torch_ops.aten, torch_ops.prims):
        for found in vars(namespace).values():
            for op in (found, *vars(found).values()) if hasattr(found, "__dict__") else (found,):
                if isinstance(op, torch_ops.MissingOp):
                    yield op.name


def missing_of_fsdp() -> str:
    """The first attribute of FSDP2 that steps need, and that is gone, "" if there is none."""
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
