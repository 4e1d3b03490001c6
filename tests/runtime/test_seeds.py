"""A program's seed comes from torch's generator: another one at every call, the same ones after `torch.manual_seed`."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from dynaxla.runtime import clients, transfer
from dynaxla.runtime.seeds import seed


def seeds(count: int) -> list[list[int]]:
    torch.manual_seed(5)
    made = [seed(torch.device("cpu"), clients.cpu_device()) for _ in range(count)]
    assert all(item.dtype == np.int32 and item.shape == (2,) for item in made)
    return [np.asarray(item).tolist() for item in made]


def test_torchs_seed_rules() -> None:
    first = seeds(50)
    assert seeds(50) == first
    assert len({tuple(item) for item in first}) == 50
    assert min(map(min, first)) < 0 < max(map(max, first))


def test_the_generator_goes_on() -> None:
    torch.manual_seed(5)
    seed(torch.device("cpu"), clients.cpu_device())
    after = torch.rand(3)
    torch.manual_seed(5)
    assert not torch.equal(torch.rand(3), after)


def test_a_gpus_own_generator_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the device's index, or of the current device; not the first GPU's."""

    class Generator:
        taken = 0

        def initial_seed(self) -> int:
            return 5

        def get_offset(self) -> int:
            return self.taken

        def set_offset(self, offset: int) -> None:
            self.taken = offset

    class Device:
        def get_stream_for_external_ready_events(self) -> int:
            return 7

    generators = (Generator(), Generator(), Generator())
    streams = []
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: (stream, device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(streams.append(stream)))
    monkeypatch.setattr(transfer, "import_tensor", lambda tensor, device, stream: tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    made: Any = [seed(torch.device("cuda", 1), Device()) for _ in range(2)]  # type: ignore[arg-type]
    assert [generator.taken for generator in generators] == [0, 8, 0]
    assert not torch.equal(made[0], made[1])
    assert streams == [(7, torch.device("cuda:1"))] * 2
    seed(torch.device("cuda"), Device())  # type: ignore[arg-type]
    assert [generator.taken for generator in generators] == [0, 8, 4]
