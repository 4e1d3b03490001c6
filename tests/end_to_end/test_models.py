"""Tests of whole models of torchvision, timm and transformers in one graph, compared with eager mode in float64; some in float32.

More models: `pytest -m slow tests/end_to_end/test_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dynaxla.bench.suites import MODELS, calibrate_batch_norms, import_package, make_inputs, make_model
from dynaxla.observe import metrics
from support.comparisons.compare import assert_equal
from support.models import small_models

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the model libraries


def vision(name: str, size: int = 64, **settings: Any) -> Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        model = getattr(import_package("torchvision").models, name)(weights=None, **settings).eval()
        inputs = (torch.randn(2, 3, size, size),)
        calibrate_batch_norms(model, inputs)
        return model, inputs

    return make


def timm(name: str, size: int = 64, **settings: Any) -> Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        model = import_package("timm").create_model(name, **settings).eval()
        inputs = (torch.randn(2, 3, size, size),)
        calibrate_batch_norms(model, inputs)
        return model, inputs

    return make


def transformer(family: str, **settings: Any) -> Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        transformers = import_package("transformers")
        configuration = getattr(transformers, f"{family}Config")(**settings)
        return getattr(transformers, f"{family}Model")(configuration).eval(), (torch.randint(3, 90, (2, 12)),)

    return make


BERT = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
GPT2 = {
    "vocab_size": 100, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {**BERT, "num_key_value_heads": 1}

QUICK = {
    "resnet18": vision("resnet18"),
    "squeezenet1_1": vision("squeezenet1_1"),
    "vgg11": vision("vgg11", 32),
    "vit_tiny": timm("vit_tiny_patch16_224", 64, img_size=64, depth=2),
    "bert": transformer("Bert", **BERT),
    "gpt2": transformer("GPT2", **GPT2),
    "llama": transformer("Llama", **LLAMA),
}
SLOW = {
    "mobilenet_v2": vision("mobilenet_v2"),
    "resnext50_32x4d": vision("resnext50_32x4d"),
    "densenet121": vision("densenet121"),
    "mnasnet1_0": vision("mnasnet1_0"),
    "mobilenet_v3_small": vision("mobilenet_v3_small"),
    "efficientnet_b0": vision("efficientnet_b0"),
    "shufflenet_v2_x1_0": vision("shufflenet_v2_x1_0"),
    "regnet_y_400mf": vision("regnet_y_400mf"),
    "googlenet": vision("googlenet", aux_logits=False, init_weights=False),
    "convnext_tiny": vision("convnext_tiny"),
    "swin_t": vision("swin_t"),
    "alexnet": vision("alexnet"),
    "mixer": timm("mixer_s32_224", 224),
    "efficientformer": timm("efficientformer_l1", 224),
    "levit": timm("levit_128s", 224),
    "ghostnet": timm("ghostnet_100"),
    "resnest": timm("resnest14d"),
    "gmlp": timm("gmlp_ti16_224", 224),
    "roberta": transformer("Roberta", **BERT),
    "distilbert": transformer("DistilBert", vocab_size=100, dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    "opt": transformer("OPT", **{**BERT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gpt_neox": transformer("GPTNeoX", **BERT),
    "mistral": transformer("Mistral", **LLAMA),
    "qwen2": transformer("Qwen2", **LLAMA),
    "electra": transformer("Electra", **BERT, embedding_size=32),
    "albert": transformer("Albert", **BERT, embedding_size=32),
    "bloom": transformer("Bloom", vocab_size=100, hidden_size=32, n_layer=2, n_head=2),
}


def tensors(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of a model's output, without caches."""
    if isinstance(output, dict):
        output = [value for value in output.values()]
    return [output] if isinstance(output, torch.Tensor) else [value for value in output if isinstance(value, torch.Tensor)]


def run(model: nn.Module, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype, **keywords: torch.Tensor) -> None:
    """Compares two calls with eager mode, without ops that fall back to torch's kernels."""
    torch._dynamo.reset()
    model = model.to(dtype)
    inputs = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)
    compiled = torch.compile(model, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    with torch.no_grad():
        for _ in range(2):
            actual, expected = tensors(compiled(*inputs, **keywords)), tensors(model(*inputs, **keywords))
            assert_equal(actual, expected, tolerance=(1e-5, 1e-5))  # some models compute parts in float32


@pytest.mark.sample(usual=2)
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("name", QUICK)
def test_model(name: str) -> None:
    run(*QUICK[name](), torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_models(name: str) -> None:
    run(*SLOW[name](), torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", small_models.TIMM)
def test_timm(name: str) -> None:
    torch.manual_seed(0)
    model, (inputs, _) = small_models.timm_model(name)
    run(model, inputs, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", small_models.TRANSFORMERS)
def test_transformers(name: str) -> None:
    torch.manual_seed(0)
    model, (inputs, keywords) = small_models.transformers_model(name)
    run(model, inputs, torch.float32 if name in small_models.FLOAT32 else torch.float64, **keywords)


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_benchmark_model_in_full_size(case: Any) -> None:
    device = torch.device("cpu")
    model = make_model(case, 0, torch.float32, device)
    inputs = make_inputs(case, 1, torch.Generator().manual_seed(0), torch.float32, device)
    compiled = torch.compile(model, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    with torch.no_grad():
        actual, expected = compiled(*inputs), model(*inputs)
        exact = model.double()(*[tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs])
    for mine, theirs, reference in zip(tensors(actual), tensors(expected), tensors(exact), strict=True):
        assert_equal(mine, theirs, values=False)
        scale = reference.abs().max()
        own, eager = (mine - reference).abs().max() / scale, (theirs - reference).abs().max() / scale
        assert own <= max(4 * eager, 1e-6), f"the error is {own:.1e}, eager mode's {eager:.1e}, relative to float64"


def test_model_in_float32_channels_last() -> None:
    model, (x,) = vision("resnet18")()
    x = x.to(memory_format=torch.channels_last)
    model = model.to(memory_format=torch.channels_last)
    compiled = torch.compile(model, backend="dynaxla", fullgraph=True)
    with torch.no_grad():
        assert_equal(compiled(x), model(x), tolerance=(1e-4, 1e-4))


def test_generate_tokens() -> None:
    transformers = import_package("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, pad_token_id=0)).eval()
    prompt = torch.randint(3, 90, (2, 5))
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(prompt, **settings)
    torch._dynamo.utils.counters.clear()
    metrics.reset()
    model.forward = torch.compile(model.forward, backend="dynaxla")
    assert torch.equal(model.generate(prompt, **settings), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3, (
        "graphs of the prompt, of one token, and of one token with a growing cache"
    )
    assert metrics.snapshot()["compile"] <= 8, "an executable for each length of the cache"
