"""With eight devices: reports of collectives and memory in each mode, and the source lines that they name."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.errors import ArgumentError
from dynaxla.sharding import Mesh, mark_sharding, report, shard_module

MESH = Mesh((8,), ("tp",))
_FILE = Path(__file__).name


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        hidden = torch.relu(hidden)
        return self.down(hidden)


def _line(text: str, function: str) -> str:
    """Returns the location of a line of this file, as reports write it."""
    number = next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip() == text)
    return f"{_FILE}:{number}, in {function}"


def _training() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    model = shard_module(nn.Sequential(_Layer(), _Layer()), MESH, {"*.up.weight": ("tp",), "*.down.weight": (None, "tp")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, (mark_sharding(torch.randn(8, 16).to("jax"), MESH, ()), torch.randn(8, 16).to("jax"))


UP, DOWN = _line("hidden = self.up(x)", "forward"), _line("return self.down(hidden)", "forward")
BACKWARD = _line("loss.backward()", "step")


def check_recorded_steps() -> None:
    """All-reduces of the backward pass have the lines of the forward pass. The input of the first layer has no gradient."""
    for fullgraph in (True, False):
        step, args = _training()
        compiled = dynaxla.compile_step(step, fullgraph=fullgraph)
        if fullgraph:
            compiled(*args)  # a step that has not run has the same report
        (moved,) = report(compiled, *args).collectives
        assert (moved.kind, moved.axes, moved.count, moved.lines) == ("all-reduce", "tp", 3, tuple(sorted((UP, DOWN))))


def check_eager_mode() -> None:
    """Collectives are listed by op, with the number of runs."""
    step, args = _training()
    step(*args)
    eager_report = report(step, *args)
    assert [(item.program, item.kind, item.axes, item.count, item.bytes, item.lines) for item in eager_report.collectives] == [
        ("aten::mm", "all-reduce", "tp", 3, 3 * 8 * 16 * 4, tuple(sorted((DOWN, BACKWARD))))
    ]
    products = next(memory for memory in eager_report.memory if memory.program == "aten::mm")
    assert products.runs == 11, "four in the forward pass, seven in the backward pass: the input of the first layer has no gradient"
    assert "aten::relu" in str(eager_report)


def check_lazy_mode() -> None:
    step, args = _training()

    def lazily() -> None:
        with dynaxla.device.lazy():
            step(*args)

    for _ in range(2):
        lazily()
    lazy_report = report(lazily)
    assert [(item.program, item.kind, item.axes, item.count) for item in lazy_report.collectives] == [
        ("recorded_ops", "all-reduce", "tp", 3)
    ]
    assert lazy_report.collectives[0].lines == tuple(sorted((DOWN, BACKWARD)))
    assert len(lazy_report.memory) == 1
    before = dynaxla.metrics.snapshot()["compile"]
    lazily()  # without a report, a recording uses the earlier program
    assert dynaxla.metrics.snapshot()["compile"] == before


def check_compiled_graphs() -> None:
    """If a program runs twice in a call, its collectives count twice."""
    x = mark_sharding(torch.randn(8, 16).to("jax"), MESH, ("tp",))

    @torch.compile(backend="dynaxla")
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    total(x)
    (once,) = report(lambda: total(x)).collectives
    twice = report(lambda: (total(x), total(x)))
    assert (twice.collectives[0].count, twice.collectives[0].bytes) == (2 * once.count, 2 * once.bytes)
    assert twice.memory[0].runs == 2
    assert once.lines == (_line("return x.sum()", "total"),)


def check_pictures() -> None:
    step, args = _training()
    eager_report = report(step, *args)
    with tempfile.TemporaryDirectory() as folder:
        for ending, first_bytes in {"png": b"\x89PNG", "svg": b"<?xml"}.items():
            path = Path(folder) / f"picture.{ending}"
            eager_report.picture(path)
            assert path.read_bytes().startswith(first_bytes)
        with pytest.raises(ArgumentError, match="does not know"):
            eager_report.picture(Path(folder) / "picture.words")
        with mock.patch.dict(sys.modules, {"matplotlib.figure": None}), pytest.raises(ArgumentError, match="needs matplotlib"):
            eager_report.picture(path)
