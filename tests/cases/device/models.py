"""Unmodified models move to the device and give there what they give on the CPU: results, and the gradients of a training step."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dynaxla
from dynaxla.autoselect.agreement import compare, perturbed_results, results_in_float64
from dynaxla.bench.suites import MODELS, images, import_package, make_inputs, make_model, tokens
from dynaxla.bench.training import TrainingStep
from support.models import small_models

from . import compile_quickly
from .running import compile_anew


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _there(values: Any, device: str = "jax") -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)


class _Narrow(TorchDispatchMode):
    """Sees whether ops inside give float32. Attributes: found."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= any(tensor.dtype == torch.float32 for tensor in _tensors(result))
        return result


def _close(name: str, mine: torch.Tensor | None, theirs: torch.Tensor | None, tolerance: float, scale: float = 0.0) -> None:
    """tolerance: of the largest number of theirs, or of the scale if that is larger."""
    if theirs is None:
        assert mine is None, name
        return
    assert mine is not None, name
    assert (mine.device.type, mine.dtype, mine.shape) == ("jax", theirs.dtype, theirs.shape), name
    mine, theirs = mine.detach().cpu(), theirs.detach()
    if theirs.is_floating_point():
        scale = max(scale, float(theirs.abs().max()) if theirs.numel() else 0.0, 1e-12)
        assert bool(((mine - theirs).abs() <= tolerance * scale).all()), (name, float((mine - theirs).abs().max()), scale, tolerance)
    else:
        assert torch.equal(mine, theirs), name


def agrees(model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any] | None = None, *, trains: bool = False) -> None:
    """Results, then gradients, running statistics and what is left in the buffers. trains: in training mode.

    Where all is computed in float64, only the order of sums differs. Norms, rotations and routers of many of transformers' models compute
    in float32 whatever the model's dtype, and XLA's and torch's float32 round in ways of their own. Norms over small batches multiply
    the roundings of what is in front of them, so gradients in training mode have a wider tolerance.
    """
    keywords = keywords or {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(getattr(module, "drop_rate", None), float):  # of timm's models that call the function
            module.drop_rate = 0.0
    mine = copy.deepcopy(model).to("jax")
    assert {parameter.device.type for parameter in mine.parameters()} == {"jax"}
    with torch.no_grad(), _Narrow() as narrow:
        expected = _tensors(model(*inputs, **keywords))
    tolerance = 1e-5 if narrow.found else 1e-8
    with torch.no_grad():
        results = _tensors(mine(*_there(inputs), **_there(keywords))), expected
    assert len(results[0]) == len(results[1]) > 0
    for index, (one, other) in enumerate(zip(*results, strict=True)):
        assert one.stride() == other.stride(), (index, one.stride(), other.stride())
        _close(f"result {index}", one, other, tolerance)
    for network, given, named in ((mine, _there(inputs), _there(keywords)), (model, inputs, keywords)):
        network.train(trains)
        outputs = [output for output in _tensors(network(*given, **named)) if output.is_floating_point() and output.requires_grad]
        torch.stack([_loss(output) for output in outputs]).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # Gradients that are zero in mathematics are rounding alone.
    scale = 1e-2 * max(float(gradient.abs().max()) for gradient in gradients)
    for (name, one), (_, other) in zip(mine.named_parameters(), model.named_parameters(), strict=True):
        _close(f"gradient of {name}", one.grad, other.grad, max(tolerance, 1e-6) if trains else tolerance, scale)
    for (name, one), (_, other) in zip(mine.named_buffers(), model.named_buffers(), strict=True):
        _close(name, one, other, tolerance)


def _loss(output: torch.Tensor) -> torch.Tensor:
    """Another weight for each element: behind a norm, the mean of squares is the same whatever went in, and its gradient nothing but
    rounding."""
    return (output * torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape).to(output.device, output.dtype)).sum()


def timm(name: str) -> None:
    torch.manual_seed(0)
    model, (inputs, _) = small_models.timm_model(name)
    agrees(model.double(), _double(inputs), trains=True)


def transformers(name: str) -> None:
    torch.manual_seed(0)
    model, (inputs, keywords) = small_models.transformers_model(name)
    if name not in small_models.FLOAT32:
        model, inputs, keywords = model.double(), _double(inputs), _double(keywords)
    agrees(model, inputs, keywords)


def _double(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, values)


def benchmarked(name: str) -> None:
    """One of the benchmark's models in float32, inference and a step of training, as the benchmark compares."""
    (case,) = [case for case in MODELS if case.name == name]
    model = make_model(case, 0, torch.float32, torch.device("cpu"))
    inputs = make_inputs(case, 1, torch.Generator().manual_seed(1), torch.float32, torch.device("cpu"))
    for training in (False, True):
        network: nn.Module = TrainingStep(copy.deepcopy(model), "sgd") if training else model
        with torch.no_grad():
            expected = network(*inputs)
            variants = perturbed_results(network, inputs) if training else []
            reference = results_in_float64(network, [inputs])
            there: nn.Module = TrainingStep(copy.deepcopy(model).to("jax"), "sgd") if training else copy.deepcopy(model).to("jax")
            mine = _there(there(*_there(inputs)), "cpu")
        found = compare(mine, expected, reference[0] if reference else None, gradients=training, perturbed=variants)
        assert found.agrees, (name, training, found)


# Each makes of a model what runs a step of training, and a step a thing to call.
TRAINED: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any], Callable[[], Any]]] = {
    "eager": (lambda model: model, lambda step: step, contextlib.nullcontext),
    "lazy": (lambda model: model, lambda step: step, dynaxla.device.lazy),
    "compiled": (lambda model: compile_anew(model, fallback="error"), lambda step: step, contextlib.nullcontext),
    "compiled step": (lambda model: model, functools.partial(dynaxla.compile_step, fullgraph=True), contextlib.nullcontext),
}


def learns(name: str) -> None:
    """Two steps of one of the benchmark's models in float64, on two small images or short texts, in each mode: by how much they change
    parameters and running statistics."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    (case,) = [case for case in MODELS if case.name == name]
    model = import_package("timm").create_model(name, img_size=64) if name.startswith("vit") else case.build()
    inputs = tokens(2, generator, 16) if name.startswith("bert") else images(2, generator, 64)
    model, inputs = model.double().train(), _double(inputs)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    before = {key: value.clone() for key, value in model.state_dict().items()}
    moved = _two_steps(copy.deepcopy(model), inputs, before, "eager")
    scale = max(float(value.abs().max()) for value in moved.values() if value.is_floating_point())
    assert scale > 1e-4
    for mode in TRAINED:
        found = _two_steps(copy.deepcopy(model).to("jax"), _there(inputs), before, mode)
        for key, value in moved.items():
            _close(f"{mode}: {key}", found.pop(key), value, 1e-6, 1e-3 * scale)  # what is zero in mathematics is rounding alone
        assert not found


def _two_steps(network: nn.Module, inputs: tuple[Any, ...], before: dict[str, torch.Tensor], mode: str) -> dict[str, torch.Tensor]:
    """By how much they change what a state dict has."""
    prepare, make, around = TRAINED[mode]
    forward = prepare(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def step(*inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.stack([_loss(output) for output in _tensors(forward(*inputs))]).sum().backward()
        optimizer.step()

    call = make(step)
    for _ in range(2):
        with around():
            call(*inputs)
    return {name: value - before[name].to(value.device) for name, value in network.state_dict().items()}


GPT2 = {
    "vocab_size": 100, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def generates(family: str, settings: dict[str, Any], ways: list[dict[str, Any]]) -> None:
    """transformers' `generate` gives the CPU's tokens."""
    kind = getattr(import_package("transformers"), family)
    torch.manual_seed(0)
    model = kind(kind.config_class(**settings)).double().eval()
    prompt = torch.randint(3, 90, (2, 5))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    mine = copy.deepcopy(model).to("jax")
    for way in ways:
        way = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **way}
        expected = model.generate(prompt, attention_mask=mask, **way)
        found = mine.generate(prompt.to("jax"), attention_mask=mask.to("jax"), **way)
        assert found.device.type == "jax"
        assert found.tolist() == expected.tolist(), (family, way)


WAYS: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False, "repetition_penalty": 1.2}]


def check_ops_below_a_dispatch_mode() -> None:
    """Ops that are traced by functionalization, which a mode around the call switches off in its thread (a segmentation fault)."""

    def loss(device: str) -> torch.Tensor:
        x, y = torch.arange(6.0, device=device), torch.ones(6, device=device, requires_grad=True)
        return torch.nn.functional.huber_loss(x * y, x + 1) + torch.nn.functional.mse_loss(x * y, x + 1)

    with _Narrow() as mode:
        mine = loss("jax")
    assert mode.found
    torch.testing.assert_close(mine.cpu(), loss("cpu"))


def check_a_vision_model() -> None:
    timm("test_efficientnet")


def check_a_language_model() -> None:
    transformers("GraniteModel")


def check_generate() -> None:
    generates("GPT2LMHeadModel", GPT2, [{}])


# By `make device-models`.
WHOLE: dict[str, tuple[Callable[[str], None], list[str]]] = {
    "ten": (benchmarked, [case.name for case in MODELS]),
    "training": (learns, [case.name for case in MODELS]),
    "timm": (
        timm,
        ["beit_base_patch16_224", "cait_xxs24_224", "convnextv2_atto", "cspdarknet53", "davit_tiny", "dla34", "dpn48b",
         "edgenext_xx_small", "efficientvit_b0", "fbnetv3_b", "ghostnetv2_100", "hrnet_w18_small", "mobilevit_xxs", "mvitv2_tiny",
         "nf_resnet50", "poolformer_s12", "regnety_002", "repghostnet_050", "repvgg_a0", "res2net50_26w_4s", "skresnet18",
         "twins_pcpvt_small", "xcit_nano_12_p16_224"],
    ),
    "transformers": (
        transformers,
        ["BartModel", "BloomModel", "ConvNextModel", "DebertaV2Model", "Dinov2Model", "FalconModel", "FNetModel", "Gemma2Model",
         "GraniteModel", "HubertModel", "MambaModel", "MixtralModel", "Qwen3MoeModel", "T5Model"],
    ),
    "generate": (
        lambda name: generates(
            name, GPT2 if name.startswith("GPT2") else small_models.T5 if name.startswith("T5") else small_models.DECODER, WAYS
        ),
        ["GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "T5ForConditionalGeneration"],
    ),
}  # fmt: skip


def main(kind: str, names: list[str]) -> int:
    """How many of them differ from the CPU. Without names: all of a kind."""
    dynaxla.device.enable()
    if kind == "training":  # each model in four modes
        compile_quickly()
    judge, known = WHOLE[kind]
    failed = 0
    for name in names or known:
        try:
            with warnings.catch_warnings(action="ignore"):  # of the model libraries, on import and construction
                judge(name)
            print(f"{name}: agrees", flush=True)
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
