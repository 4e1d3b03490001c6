"""Random functions that write to parts of their inputs, as source text: views, writes to whole views and by index, reads between writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

SHAPE = (3, 4, 5)


class Writer:
    """Writes the source of a function of tensors a and b (of SHAPE) and i (two integers less than three)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        lines = [self._write() for _ in range(self._random.randint(2, 6))]
        results = self._random.sample(
            ["a", "b", "a[0]", "b.transpose(0, 1)", "a.sum()", "b.clone()", "a[1:] * 2"], self._random.randint(0, 3)
        )
        if self._random.random() < 0.3:
            lines.insert(len(lines) // 2, f"middle = {self._view('a')[0]}.cos()")
            results.append("middle")
        self.source = "\n    ".join(["def function(a, b, i):", *lines, f"return ({''.join(result + ', ' for result in results)})"])

    def function(self) -> Callable[..., Any]:
        namespace: dict[str, Any] = {"torch": torch}
        exec(self.source, namespace)
        return namespace["function"]

    def _view(self, name: str) -> tuple[str, list[int]]:
        """Returns a view of an input, and its shape."""
        text, shape = name, list(SHAPE)
        for _ in range(self._random.randint(0, 3)):
            dim = self._random.randrange(len(shape))
            size = shape[dim]
            match self._random.randrange(6):
                case 0 if len(shape) > 1:
                    text += f".select({dim}, {self._random.randrange(-size, size)})"
                    del shape[dim]
                case 1 | 2:
                    start = self._random.randrange(size)
                    shape[dim] = self._random.randint(1, size - start)
                    text += f".narrow({dim}, {start}, {shape[dim]})"
                case 3:
                    other = self._random.randrange(len(shape))
                    shape[dim], shape[other] = shape[other], shape[dim]
                    text += f".transpose({dim}, {other})"
                case 4 if size > 1:
                    text += f".split({size - 1}, {dim})[0]"
                    shape[dim] = size - 1
                case 5:
                    text += f".unsqueeze({dim})"
                    shape.insert(dim, 1)
        return text, shape

    def _value(self, name: str, shape: list[int]) -> str:
        """Returns a value that has the shape or is broadcast to it. A view of the input with this name, which is written, is cloned."""
        text, view_shape = self._view(other := self._random.choice("ab"))
        count = torch.Size(shape).numel()
        match self._random.randrange(4):
            case 0:
                return f"({text}.sum() * 0.1)"
            case 1:
                return f"(torch.arange({count}).reshape({shape}) * 0.5)"
            case 2 if view_shape == shape:
                return text if name != other else f"{text}.clone()"
        return f"({other} * 0.5 + 1).reshape(-1)[:{count}].reshape({shape})" if count <= 60 else f"{text}.mean()"

    def _write(self) -> str:
        name = self._random.choice("ab")
        text, shape = self._view(name)
        dim = self._random.randrange(len(shape))
        size = shape[dim]
        count = self._random.randint(1, min(2, size))
        chosen = self._random.sample(range(size), count)
        index = f"torch.tensor({chosen})" if size < 3 or self._random.random() < 0.5 else f"((i + {chosen[0]}) % {size})[:{count}]"
        part = [*shape[:dim], count, *shape[dim + 1 :]]
        source = f"{self._value(name, part)}.to(a.dtype).expand({part})"
        match self._random.randrange(10):
            case 0 | 1:
                return f"{text}.copy_({self._value(name, shape)})"
            case 2:
                return f"{text}.fill_({self._random.random():.3f})"
            case 3:
                return f"{text}.add_({self._value(name, shape)})"
            case 4:
                return f"{text}.index_copy_({dim}, {index}, {source})"
            case 5:
                rest = [count, *shape[1:]]
                index = f"torch.tensor({[self._random.randrange(-shape[0], shape[0])] * count})"
                return f"{text}.index_put_(({index},), {self._value(name, rest)}.to(a.dtype).sum(), accumulate=True)"
            case 6:
                return f"{text}.index_fill_({dim}, {index}, -1.5)"
            case 7:
                return f"{text}.index_add_({dim}, {index}, {source}, alpha=2)"
            case 8:
                lifted = [1] * len(shape)
                lifted[dim] = count
                return f"{text}.scatter_({dim}, {index}.reshape({lifted}).expand({part}), {source})"
            case _:
                return f"{text}[{index}] = {self._random.random():.3f}" if dim == 0 else f"{text}.zero_()"
