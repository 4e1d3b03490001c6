"""Calls exported models in a process in which `import torch` fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dynaxla.artifact.model import ExportedModel
from support.processes.scripts import run_script

_SCRIPT = """
import sys
from pathlib import Path

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("there is no torch here")

sys.meta_path.insert(0, NoTorch())
import dynaxla
import jax
import numpy as np

folder = Path(sys.argv[1])
assert not jax.config.jax_enable_x64
for place in sorted(folder.iterdir()):
    model = dynaxla.load(place / "model")
    for case in sorted(place.glob("*.npz")):
        saved = np.load(case)
        given = [saved[name] for name in sorted(saved.files) if name.startswith("given")]
        found = model.call(*given)
        found = list(found.values()) if isinstance(found, dict) else jax.tree.leaves(found)
        arrays = [np.asarray(item.astype("float32") if item.dtype == "bfloat16" else item) for item in found]
        np.savez(case.with_suffix(".found"), *arrays, dtypes=[str(item.dtype) for item in found])
        (place / (case.stem + ".found.npz")).rename(place / (case.stem + ".found"))
assert not jax.config.jax_enable_x64
try:
    import torch
except ImportError:
    print("no torch")
try:
    dynaxla.load(folder / "nothing")
except dynaxla.errors.ArtifactError as error:
    print(str(error).splitlines()[1].strip())
"""


def compare_without_torch(
    folder: Path, models: Mapping[str, tuple[Any, ExportedModel, Sequence[tuple[torch.Tensor, ...]]]], tolerance: float = 2e-5
) -> None:
    """Without torch, each exported model has the results of eager mode.

    Args:
        folder: a folder for the models and their results.
        models: by name: a module, its exported model, and the arguments of some calls.
        tolerance: the relative and absolute tolerance; for bfloat16, a thousand times larger.
    """
    expected = {}
    for name, (module, exported, calls) in models.items():
        exported.save(folder / name / "model")
        for index, args in enumerate(calls):
            np.savez(folder / name / f"{index}.npz", **{f"given{position}": arg.numpy() for position, arg in enumerate(args)})
            with torch.no_grad():
                expected[name, index] = pytree.tree_leaves(module(*args))
    output = run_script(_SCRIPT, [str(folder)], own=True).splitlines()
    assert output == ["no torch", "try:    pass the directory that save wrote"]
    for (name, index), tensors in expected.items():
        saved = np.load(folder / name / f"{index}.found")
        assert [f"torch.{dtype}" for dtype in saved["dtypes"]] == [str(tensor.dtype) for tensor in tensors]
        found = [torch.from_numpy(saved[item]) for item in saved.files if item != "dtypes"]
        for array, tensor in zip(found, tensors, strict=True):
            reference = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            scale = 1000 if tensor.dtype == torch.bfloat16 else 1
            torch.testing.assert_close(array, reference, rtol=tolerance * scale, atol=tolerance * scale)
