"""The benchmark's models in lazy mode: results are the CPU's, and each call is one program, which is compiled once."""

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
        args = [tensor.to("jax") for tensor in inputs]
        for is_first in (True, False):
            results: list[torch.Tensor] = []

            def run(results: list[torch.Tensor] = results, model: nn.Module = model, args: list[torch.Tensor] = args) -> None:
                with dynaxla.device.lazy():
                    result = model(*args)
                    results += result if isinstance(result, tuple) else [result]

            counts = _counts(run)
            assert (counts["execute"], counts.get("compile", 0)) == (1, int(is_first)), (case.name, counts)
            for actual, reference in zip(results, expected if isinstance(expected, tuple) else [expected], strict=True):
                scale = float(reference.abs().max())
                torch.testing.assert_close(actual.cpu() / scale, reference / scale, rtol=0, atol=1e-4, msg=case.name)


def check_training() -> None:
    for name in ("resnet18", "squeezenet1_1"):
        torch.manual_seed(0)
        on_cpu = suites.torchvision_model(name).train()
        for module in on_cpu.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        on_device, data, losses = copy.deepcopy(on_cpu).to("jax"), torch.randn(4, 3, 64, 64), []
        for model, device in ((on_cpu, "cpu"), (on_device, "jax")):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
            for _ in range(4):
                with dynaxla.device.lazy():
                    optimizer.zero_grad()
                    loss = model(data.to(device)).square().mean()
                    loss.backward()
                    optimizer.step()
                losses.append(loss.item())
        torch.testing.assert_close(losses[4:], losses[:4], rtol=1e-3, atol=1e-6)
