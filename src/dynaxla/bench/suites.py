"""The ten models of PyTorch PR #87741, and their inputs. Weights are random, from a seed: nothing is downloaded.

TorchDynamo captures each model as one graph. `benchmarks/suites.py` in the source tree has more suites.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .argument_checks import check_names
from .benchmark_error import BenchmarkError

Inputs = Callable[[int, torch.Generator], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class BenchCase:
    """A model of the benchmark. `build` and `inputs` must be picklable: isolated measurements build the model in a separate process.

    Attributes:
        name: the model's name.
        build: creates the model with torch's default generator, on the CPU, in float32.
        inputs: creates inputs, given the batch size and a generator.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs


def make_model(case: BenchCase, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Returns a case's model, ready for inference. The same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = case.build().eval()
        calibrate_batch_norms(model, case.inputs(4, torch.Generator().manual_seed(seed)))
    return model.to(device=device, dtype=dtype).requires_grad_(False)


def make_inputs(
    case: BenchCase, batch: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    tensors = case.inputs(batch, generator)
    return tuple(tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype) for tensor in tensors)


def calibrate_batch_norms(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Gives batch norms the statistics of a batch.

    With their initial statistics and random weights, activations shrink layer by layer: mobilenet_v2's logits are about 1e-9, almost the
    same for all inputs, and comparing such results would show little.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = None
    with torch.no_grad():
        model(*inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def import_package(name: str) -> Any:
    if name in ("torchvision", "timm", "transformers"):
        _declare_torchvision_ops()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BenchmarkError(f"the benchmark's models need {name}, which is not installed: pip install 'dynaxla[bench]'") from error


_torchvision_ops: torch.library.Library | None = None


def _declare_torchvision_ops() -> None:
    """Declares the two ops without which importing torchvision fails, if its C++ library cannot be loaded.

    The library loads only with the torch build that it was compiled for (one for a CUDA build does not load with a CPU build of torch). The
    models here use neither op.
    """
    global _torchvision_ops
    if _torchvision_ops is not None:
        return
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        _torchvision_ops = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _torchvision_ops.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def torchvision_model(name: str) -> nn.Module:
    return getattr(import_package("torchvision").models, name)(weights=None)


def timm_model(name: str) -> nn.Module:
    return import_package("timm").create_model(name)


class Bert(nn.Module):
    """BERT (base) that returns plain tensors, which every engine supports. `settings` are the arguments of transformers' BertConfig."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        transformers = import_package("transformers")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self.bert = transformers.BertModel(transformers.BertConfig(**settings))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.bert(tokens, return_dict=True)
        return output.last_hidden_state, output.pooler_output


def images(batch: int, generator: torch.Generator, size: int = 224) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 3, size, size, generator=generator),)


def tokens(batch: int, generator: torch.Generator, length: int = 128, vocabulary: int = 30522) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, vocabulary, (batch, length), generator=generator),)


_VISION = ("resnet18", "resnet50", "resnext50_32x4d", "alexnet", "mobilenet_v2", "mnasnet1_0", "squeezenet1_1", "vgg16")

MODELS = [
    *[BenchCase(name, partial(torchvision_model, name), images) for name in _VISION],
    BenchCase("bert_base", Bert, tokens),
    BenchCase("vit_base_patch16_224", partial(timm_model, "vit_base_patch16_224"), images),
]

SUITES: Mapping[str, list[BenchCase]] = {"models": MODELS}

# The cases of a quick run: two convolutional networks that Inductor compiles quickly (mobilenet_v2 takes a minute), and a transformer.
QUICK: Mapping[str, list[str]] = {"models": ["resnet18", "squeezenet1_1", "bert_base"]}


def choose(suite: str, names: Iterable[str], suites: Mapping[str, list[BenchCase]] | None = None) -> list[BenchCase]:
    """Returns cases of a suite, in its order.

    Args:
        suite: the suite's name.
        names: the names of cases; all cases of the suite if there are none.
        suites: the suites by name; None for SUITES.

    Raises:
        BenchmarkError: a name is unknown.
    """
    suites = SUITES if suites is None else suites
    check_names("suite", [suite], suites)
    wanted = set(names)
    check_names("model", sorted(wanted), [case.name for case in suites[suite]], f" in the suite {suite!r}")
    return [case for case in suites[suite] if not wanted or case.name in wanted]
