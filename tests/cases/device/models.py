"""Models of libraries give the same results and gradients on the device as on the CPU, without changes to the models."""

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


def _to_device(values: Any, device: str = "jax") -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)


class _Narrow(TorchDispatchMode):
    """Finds out whether the ops inside return float32.

    Attributes:
        found: True if an op did.
    """

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= any(tensor.dtype == torch.float32 for tensor in _tensors(result))
        return result


def _close(name: str, actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float, scale: float = 0.0) -> None:
    """Checks that two tensors are close.

    Args:
        tolerance: relative to the largest absolute value of `expected`, or to the scale if that is larger.
    """
    if expected is None:
        assert actual is None, name
        return
    assert actual is not None, name
    assert (actual.device.type, actual.dtype, actual.shape) == ("jax", expected.dtype, expected.shape), name
    actual, expected = actual.detach().cpu(), expected.detach()
    if expected.is_floating_point():
        scale = max(scale, float(expected.abs().max()) if expected.numel() else 0.0, 1e-12)
        assert bool(((actual - expected).abs() <= tolerance * scale).all()), (
            name,
            float((actual - expected).abs().max()),
            scale,
            tolerance,
        )
    else:
        assert torch.equal(actual, expected), name


def agrees(model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any] | None = None, *, trains: bool = False) -> None:
    """Checks results, then gradients, running statistics and other buffers.

    If a model computes in float64 alone, only the order of sums differs. Norms, rotary embeddings and routers of many transformers models
    compute in float32 whatever the model's dtype, and XLA and torch round float32 differently. Norms over small batches amplify rounding
    errors of their inputs, so gradients in training mode have a wider tolerance.

    Args:
        trains: True for training mode.
    """
    keywords = keywords or {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(getattr(module, "drop_rate", None), float):  # timm models that call the dropout function
            module.drop_rate = 0.0
    model_on_device = copy.deepcopy(model).to("jax")
    assert {parameter.device.type for parameter in model_on_device.parameters()} == {"jax"}
    with torch.no_grad(), _Narrow() as narrow:
        expected = _tensors(model(*inputs, **keywords))
    tolerance = 1e-5 if narrow.found else 1e-8
    with torch.no_grad():
        results = _tensors(model_on_device(*_to_device(inputs), **_to_device(keywords))), expected
    assert len(results[0]) == len(results[1]) > 0
    for index, (actual, expected_tensor) in enumerate(zip(*results, strict=True)):
        assert actual.stride() == expected_tensor.stride(), (index, actual.stride(), expected_tensor.stride())
        _close(f"result {index}", actual, expected_tensor, tolerance)
    for network, args, kwargs in ((model_on_device, _to_device(inputs), _to_device(keywords)), (model, inputs, keywords)):
        network.train(trains)
        outputs = [output for output in _tensors(network(*args, **kwargs)) if output.is_floating_point() and output.requires_grad]
        torch.stack([_loss(output) for output in outputs]).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # Gradients that are zero in exact arithmetic are only rounding errors.
    scale = 1e-2 * max(float(gradient.abs().max()) for gradient in gradients)
    for (name, actual), (_, expected_tensor) in zip(model_on_device.named_parameters(), model.named_parameters(), strict=True):
        _close(f"gradient of {name}", actual.grad, expected_tensor.grad, max(tolerance, 1e-6) if trains else tolerance, scale)
    for (name, actual), (_, expected_tensor) in zip(model_on_device.named_buffers(), model.named_buffers(), strict=True):
        _close(name, actual, expected_tensor, tolerance)


def _loss(output: torch.Tensor) -> torch.Tensor:
    """Weights each element differently. After a norm, the mean of squares would not depend on the norm's input, so its gradient would be
    only rounding error.
    """
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
    """Compares a model of the benchmark in float32, in inference and in a training step, as the benchmark does."""
    (case,) = [case for case in MODELS if case.name == name]
    model = make_model(case, 0, torch.float32, torch.device("cpu"))
    inputs = make_inputs(case, 1, torch.Generator().manual_seed(1), torch.float32, torch.device("cpu"))
    for training in (False, True):
        network: nn.Module = TrainingStep(copy.deepcopy(model), "sgd") if training else model
        with torch.no_grad():
            expected = network(*inputs)
            variants = perturbed_results(network, inputs) if training else []
            reference = results_in_float64(network, [inputs])
            network_on_device: nn.Module = (
                TrainingStep(copy.deepcopy(model).to("jax"), "sgd") if training else copy.deepcopy(model).to("jax")
            )
            actual = _to_device(network_on_device(*_to_device(inputs)), "cpu")
        comparison = compare(actual, expected, reference[0] if reference else None, gradients=training, perturbed=variants)
        assert comparison.agrees, (name, training, comparison)


# For each mode: a function that prepares the model, a function that compiles the step, and the context of a step.
TRAINED: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any], Callable[[], Any]]] = {
    "eager": (lambda model: model, lambda step: step, contextlib.nullcontext),
    "lazy": (lambda model: model, lambda step: step, dynaxla.device.lazy),
    "compiled": (lambda model: compile_anew(model, fallback="error"), lambda step: step, contextlib.nullcontext),
    "compiled step": (lambda model: model, functools.partial(dynaxla.compile_step, fullgraph=True), contextlib.nullcontext),
}


def learns(name: str) -> None:
    """Compares the changes of parameters and running statistics after two training steps, in each mode.

    The model is one of the benchmark's in float64, with two small images or short texts.
    """
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
    expected_changes = _two_steps(copy.deepcopy(model), inputs, before, "eager")
    scale = max(float(value.abs().max()) for value in expected_changes.values() if value.is_floating_point())
    assert scale > 1e-4
    for mode in TRAINED:
        changes = _two_steps(copy.deepcopy(model).to("jax"), _to_device(inputs), before, mode)
        for key, value in expected_changes.items():
            _close(f"{mode}: {key}", changes.pop(key), value, 1e-6, 1e-3 * scale)  # exact zeros are only rounding errors
        assert not changes


def _two_steps(network: nn.Module, inputs: tuple[Any, ...], before: dict[str, torch.Tensor], mode: str) -> dict[str, torch.Tensor]:
    """Returns the changes of the entries of the state dict."""
    prepare, compile_step, context = TRAINED[mode]
    forward = prepare(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def step(*inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.stack([_loss(output) for output in _tensors(forward(*inputs))]).sum().backward()
        optimizer.step()

    call = compile_step(step)
    for _ in range(2):
        with context():
            call(*inputs)
    return {name: value - before[name].to(value.device) for name, value in network.state_dict().items()}


GPT2 = {
    "vocab_size": 100, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def generates(family: str, settings: dict[str, Any], ways: list[dict[str, Any]]) -> None:
    """Checks that transformers' `generate` returns the CPU's tokens."""
    model_class = getattr(import_package("transformers"), family)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).double().eval()
    prompt = torch.randint(3, 90, (2, 5))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    model_on_device = copy.deepcopy(model).to("jax")
    for settings_of_call in ways:
        settings_of_call = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **settings_of_call}
        expected = model.generate(prompt, attention_mask=mask, **settings_of_call)
        tokens_on_device = model_on_device.generate(prompt.to("jax"), attention_mask=mask.to("jax"), **settings_of_call)
        assert tokens_on_device.device.type == "jax"
        assert tokens_on_device.tolist() == expected.tolist(), (family, settings_of_call)


WAYS: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False, "repetition_penalty": 1.2}]


def check_ops_below_a_dispatch_mode() -> None:
    """Fixed: a segmentation fault. Functionalization traces these ops, and a dispatch mode around the call disables it in the thread."""

    def loss(device: str) -> torch.Tensor:
        x, y = torch.arange(6.0, device=device), torch.ones(6, device=device, requires_grad=True)
        return torch.nn.functional.huber_loss(x * y, x + 1) + torch.nn.functional.mse_loss(x * y, x + 1)

    with _Narrow() as mode:
        actual = loss("jax")
    assert mode.found
    torch.testing.assert_close(actual.cpu(), loss("cpu"))


def check_a_vision_model() -> None:
    timm("test_efficientnet")


def check_a_language_model() -> None:
    transformers("GraniteModel")


def check_generate() -> None:
    generates("GPT2LMHeadModel", GPT2, [{}])


# The models of `make device-models`.
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
    """Returns the number of models that differ from the CPU. Without names: of all models of a kind."""
    dynaxla.device.enable()
    if kind == "training":  # each model in four modes
        compile_quickly()
    compare_model, known_names = WHOLE[kind]
    failed = 0
    for name in names or known_names:
        try:
            with warnings.catch_warnings(action="ignore"):  # the model libraries warn on import and construction
                compare_model(name)
            print(f"{name}: agrees", flush=True)
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
