"""Random programs of chained views of a few tensors and writes between them, as source text. Each alias must show each write.

    PYTHONPATH=tests python -m cases.aliased_views COUNT SEED [eager] [lazy] [compiled]

compares COUNT programs on the device "jax" with the CPU. All values are integers, so every dtype is compared exactly.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import dynaxla
from cases.conformance.judge import significant_strides

MODES = ("eager", "lazy", "compiled")
_RAISES, _LAYOUTS = "raises", "have the layouts"
_BASES = (
    "torch.arange(24, dtype=torch.float32, device=device).reshape(2, 3, 4)",
    "torch.arange(36, dtype=torch.int32, device=device).reshape(6, 6)",
    "torch.complex(torch.arange(12., device=device), 1 - torch.arange(12., device=device)).reshape(3, 4)",
    "torch.arange(16, dtype=torch.float64, device=device).reshape(4, 4).t()",
)


def addresses(tensor: torch.Tensor) -> list[int]:
    """Returns, for each element, the offset of the first byte in the storage."""
    ranges = [range(0, size * step, step) if step else [0] * size for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return [(tensor.storage_offset() + sum(offsets)) * tensor.element_size() for offsets in itertools.product(*ranges)]


def _bytes(tensor: torch.Tensor) -> set[tuple[int, int]]:
    storage = tensor.untyped_storage()._cdata
    return {(storage, first + index) for first in addresses(tensor) for index in range(tensor.element_size())}


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        bases: Source text of the base tensors.
        lines: Source text of the views and writes.
        names: The name of the tensor that each line creates; "" for a write.
    """

    seed: int
    bases: tuple[str, ...]
    lines: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def base_names(self) -> tuple[str, ...]:
        return tuple("ab"[: len(self.bases)])

    def source(self) -> str:
        """Returns a function of the bases and a device. It returns all values after each write, and all tensors at the end."""
        text, known = [f"def function({', '.join(self.base_names)}, device):", "    seen = []"], list(self.base_names)
        for line, name in zip(self.lines, self.names, strict=True):
            text.append(f"    {line}")
            known += [name] if name else []
            text += [] if name else [f"    seen.append([{', '.join(f'{item}.clone()' for item in known)}])"]
        return "\n".join([*text, f"    return seen, [{', '.join(known)}]"])

    def make(self, device: str) -> list[torch.Tensor]:
        return [eval(base, {"torch": torch, "device": device}) for base in self.bases]

    def function(self) -> Any:
        namespace: dict[str, Any] = {"torch": torch}
        exec(self.source(), namespace)
        return namespace["function"]


class _Writer:
    def __init__(self, seed: int, steps: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.bases = tuple(self.random.sample(_BASES, 2 if self.random.random() < 0.3 else 1))
        self.lines: list[str] = []
        self.names: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        for name, base in zip("ab", self.bases, strict=False):
            self.tensors[name] = eval(base, {"torch": torch, "device": "cpu"})
        written = False
        for step in range(steps):
            # After the first write, views and writes are mixed. The last step is a write.
            if step == steps - 1 or self.random.random() < (0.5 if written or step > 1 else 0):
                written |= self._write()
            else:
                self._view()

    def program(self) -> Program:
        return Program(self.seed, self.bases, tuple(self.lines), tuple(self.names))

    def _run(self, line: str) -> bool:
        """Adds a line to the program and returns True, if the CPU accepts the line."""
        variables = {"torch": torch, "device": "cpu", **self.tensors}
        try:
            exec(line, variables)
        except (RuntimeError, IndexError, ValueError):
            return False
        name = line.partition(" = ")[0] if line.partition(" = ")[0].isidentifier() else ""
        if name:
            created = variables[name]
            if not 0 < created.numel() <= 60:
                return False
            self.tensors[name] = created
        self.lines.append(line)
        self.names.append(name)
        return True

    def _pick(self) -> tuple[str, torch.Tensor]:
        # The newest tensors are at the ends of the longest chains.
        names = list(self.tensors)
        name = names[-1] if self.random.random() < 0.4 else self.random.choice(names)
        return name, self.tensors[name]

    def _view(self) -> None:
        for _ in range(20):
            name, tensor = self._pick()
            if self._run(f"v{len(self.tensors)} = {name}{self._random_view(name, tensor)}"):
                return

    def _random_view(self, name: str, x: torch.Tensor) -> str:
        rng = self.random
        if not x.dim():
            return rng.choice([".reshape(1)", "[None]", ".expand(2)"])
        dim = rng.randrange(x.dim())
        other = rng.randrange(x.dim())
        size = x.shape[dim]
        start = rng.randrange(size)
        length = rng.randint(1, size - start)
        views = [
            f"[{':, ' * dim}{start}:{start + length}]",
            f"[{':, ' * dim}{rng.randrange(2)}::2]",
            f"[..., {rng.randrange(-x.shape[-1], x.shape[-1])}]",
            f".transpose({dim}, {other})",
            f".permute({rng.sample(range(x.dim()), x.dim())})",
            f".select({dim}, {start})",
            f".narrow({dim}, {start}, {length})",
            f".split({max(1, size - 1)}, {dim})[-1]",
            f".chunk(2, {dim})[-1]",
            f".unbind({dim})[{start}]",
            f".unsqueeze({dim})",
            ".squeeze()",
            f".squeeze({dim})",
            ".view(-1)",
            ".reshape(-1)",
            ".detach()",
            f".diagonal({rng.randrange(-1, 2)}, {dim}, {other})",
            f".unfold({dim}, {rng.randint(1, size)}, {rng.randint(1, 3)})",
            f"[None].expand(2, {', '.join(map(str, x.shape))}).clone()",
            f".unflatten({dim}, (-1, {rng.randint(1, 2)}))",
            ".clone()",
        ]
        if name in ("a", "b") and not x.is_complex():
            views += [f".as_strided({rng.choice(['(2, 3), (6, 1), 1', '(3,), (2,)', '(2, 2), (1, 4), 2', '(4,), (3,), 3'])})"] * 2
        if x.is_complex():
            views += [".real", ".imag", ".conj()", ".mH", ".resolve_conj()"] * 2
            views += ["__as_real"] * 3
        if x.dtype == torch.float32:
            views += ["__as_complex"] * 2
        if not x.is_floating_point() and not x.is_complex():
            views += [f".view(torch.{rng.choice(['int16', 'int32', 'uint8', 'int64'])})"] * 4
        view = rng.choice(views)
        if view.startswith("__as"):
            return f"[...]; v{len(self.tensors)} = torch.view{view[1:]}({name})"
        return view

    def _write(self) -> bool:
        for _ in range(30):
            name, tensor = self._pick()
            offsets = addresses(tensor)
            bytes_of_tensor = _bytes(tensor)
            if len(bytes_of_tensor) == len(offsets) * tensor.element_size() and self._run(self._change(name, tensor, bytes_of_tensor)):
                return True
        return False

    def _value(self, tensor: torch.Tensor, bytes_of_tensor: set[tuple[int, int]]) -> str:
        """Returns a value of the tensor's shape and dtype: another tensor, which is cloned if they share memory, or new numbers."""
        candidates = [(n, t) for n, t in self.tensors.items() if t.shape == tensor.shape and t.dtype == tensor.dtype]
        if candidates and self.random.random() < 0.7:
            name, candidate = self.random.choice(candidates)
            return name if bytes_of_tensor.isdisjoint(_bytes(candidate)) else f"{name}.clone()"
        return f"torch.arange({tensor.numel()}, device=device).reshape({tuple(tensor.shape)}).to({tensor.dtype})"

    def _change(self, name: str, x: torch.Tensor, bytes_of_tensor: set[tuple[int, int]]) -> str:
        rng, shape = self.random, tuple(x.shape)
        number = rng.randint(1, 9)
        value = self._value(x, bytes_of_tensor)
        mask = f"(torch.arange({x.numel()}, device=device) % {rng.randint(2, 3)} == 0).reshape({shape})"
        changes = [
            f"{name}.add_({number})", f"{name}.add_({value})", f"{name}.copy_({value})", f"{name}.fill_({number})", f"{name}.zero_()",
            f"{name}.mul_(2)", f"{name}.sub_({value}, alpha=2)", f"{name}.masked_fill_({mask}, {number})", f"{name}[...] = {number}",
            f"torch.add({value}, {number}, out={name})", f"torch.mul({value}, 3, out={name})", f"{name}.copy_({name}.clone().neg())",
            f"torch._foreach_add_([{name}], {number})",
        ]  # fmt: skip
        if x.dim():
            size = shape[0]
            chosen = rng.sample(range(size), rng.randint(1, min(2, size)))
            index = f"torch.tensor({chosen}, device=device)"
            part = f"{value}[:{len(chosen)}].clone()"
            dim = rng.randrange(x.dim())
            position = f"torch.full({tuple(1 if d == dim else s for d, s in enumerate(shape))}, {rng.randrange(shape[dim])}, device=device)"
            changes += [
                f"{name}.index_put_(({index},), {part})",
                f"{name}.index_put_(({index},), {part}, accumulate=True)",
                f"{name}.index_copy_(0, {index}, {part})",
                f"{name}.index_add_(0, {index}, {part})",
                f"{name}.index_fill_(0, {index}, {number})",
                f"{name}.scatter_({dim}, {position}, {number})",
                f"{name}.scatter_add_({dim}, {position}, {value})",
                f"{name}[{rng.randrange(size)}] += {number}",
                f"{name}[{mask}] = {number}",
                f"{name}[{rng.randrange(size)}:].add_({number})",
            ]
        return rng.choice(changes)


def generate(seed: int, steps: int = 10) -> Program:
    return _Writer(seed, steps).program()


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual.detach().cpu().resolve_conj(), expected.detach().resolve_conj())


def _facts(tensors: Sequence[torch.Tensor], exact: bool) -> list[Any]:
    """Returns the layout of each tensor, and which tensors share a storage.

    Args:
        exact: True to include offsets, and strides of dimensions of size 1.
    """
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (
            tuple(tensor.shape), tensor.stride() if exact else significant_strides(tensor), tensor.storage_offset() if exact else 0,
            tensor.is_conj(), tensor.is_neg(), storages.index(storage),
        )
        for tensor, storage in zip(tensors, storages, strict=True)
    ]  # fmt: skip


def difference(program: Program, mode: str) -> str:
    """Returns how the device differs from the CPU in a mode; "" if it does not.

    A compiled program may raise if torch's "aot_eager" raises, and its tensors may have aot_eager's strides and conjugate bits. Its values
    must be right, even if aot_eager's are wrong.
    """
    function = program.function()
    expected = function(*program.make("cpu"), "cpu")
    problem = _raised_or_different(program, expected, lambda: _on_the_device(program, mode), mode != "compiled")
    if problem.startswith((_RAISES, _LAYOUTS)) and mode == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", dynamic=False)
        aot_problem = _raised_or_different(program, expected, lambda: compiled(*program.make("cpu"), "cpu"), False)
        if aot_problem == problem or (aot_problem.startswith(_RAISES) and problem.startswith(_RAISES)):
            return ""
    return problem


def _on_the_device(program: Program, mode: str) -> Any:
    function, bases = program.function(), program.make("jax")
    if mode == "compiled":
        torch._dynamo.reset()
        return torch.compile(function, backend="dynaxla", dynamic=False)(*bases, "jax")
    with dynaxla.device.lazy() if mode == "lazy" else contextlib.nullcontext():
        return function(*bases, "jax")


def _raised_or_different(program: Program, expected: Any, run: Callable[[], Any], exact: bool) -> str:
    try:
        actual = run()
    except Exception as error:
        return f"{_RAISES} {type(error).__name__}: {str(error)[:600]}"
    writes = [line for line, name in zip(program.lines, program.names, strict=True) if not name]
    for line, actual_tensors, expected_tensors in zip(writes, actual[0], expected[0], strict=True):
        if wrong_indices := [index for index, pair in enumerate(zip(actual_tensors, expected_tensors, strict=True)) if not _same(*pair)]:
            index = wrong_indices[0]
            return f"after {line}: tensor {index} is {actual_tensors[index].tolist()}, not {expected_tensors[index].tolist()}"
    for index, (actual_tensor, expected_tensor) in enumerate(zip(actual[1], expected[1], strict=True)):
        if not _same(actual_tensor, expected_tensor):
            return f"at the end: tensor {index} is {actual_tensor.tolist()}, not {expected_tensor.tolist()}"
    actual_facts, expected_facts = (_facts(tensors, exact) for tensors in (actual[1], expected[1]))
    if actual_facts != expected_facts:
        return f"{_LAYOUTS} {actual_facts}, not {expected_facts}"
    return ""


def failures(seeds: Sequence[int], modes: Sequence[str] = MODES) -> Iterator[str]:
    for seed in seeds:
        program = generate(seed)
        for mode in modes:
            if problem := difference(program, mode):
                yield f"seed {seed}, {mode}: {problem}\n{program.bases}\n{program.source()}"


if __name__ == "__main__":
    dynaxla.device.enable()
    count, first = map(int, sys.argv[1:3])
    total = 0
    for failure in failures(range(first, first + count), sys.argv[3:] or MODES):
        total += 1
        print(failure, flush=True)
    print(f"{count} programs, {total} failures")
    sys.exit(total > 0)
