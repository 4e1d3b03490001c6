"""The ten models of the benchmark in lazy mode: what the CPU gives, one program each, found again."""

from __future__ import annotations

import copy

import torch
from torch import nn

import dynaxla
from dynaxla.bench import suites

from .recordings import _counts


def check_forward() -> None:
    for case in suites.MODELS:
        model = suites.make_model(case, 0, torch.float32, torch.device("cpu"))
        inputs = suites.make_inputs(case, 1, torch.Generator().manual_seed(1), torch.float32, torch.device("cpu"))
        expected = model(*inputs)
        model.to("jax")
        moved = [tensor.to("jax") for tensor in inputs]
        for is_first in (True, False):
            found: list[torch.Tensor] = []

            def run(found: list[torch.Tensor] = found, model: nn.Module = model, moved: list[torch.Tensor] = moved) -> None:
                with dynaxla.device.lazy():
                    result = model(*moved)
                    found += result if isinstance(result, tuple) else [result]

            done = _counts(run)
            assert (done["execute"], done.get("compile", 0)) == (1, int(is_first)), (case.name, done)
            for one, other in zip(found, expected if isinstance(expected, tuple) else [expected], strict=True):
                scale = float(other.abs().max())
                torch.testing.assert_close(one.cpu() / scale, other / scale, rtol=0, atol=1e-4, msg=case.name)


def check_training() -> None:
    for name in ("resnet18", "squeezenet1_1"):
        torch.manual_seed(0)
        theirs = suites.torchvision_model(name).train()
        for module in theirs.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        mine, data, losses = copy.deepcopy(theirs).to("jax"), torch.randn(4, 3, 64, 64), []
        for model, place in ((theirs, "cpu"), (mine, "jax")):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
            for _ in range(4):
                with dynaxla.device.lazy():
                    optimizer.zero_grad()
                    loss = model(data.to(place)).square().mean()
                    loss.backward()
                    optimizer.step()
                losses.append(loss.item())
        torch.testing.assert_close(losses[4:], losses[:4], rtol=1e-3, atol=1e-6)
