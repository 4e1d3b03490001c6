"""Tests of transformers' `generate` with small models with random weights: the tokens are those of eager mode.

The usual tests run one decoder; `make generate` runs other models, caches and ways of decoding.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dynaxla.bench.suites import import_package
from dynaxla.observe import metrics

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers, of the extra `bench`")

TOKENS = 10
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 128, "decoder_start_token_id": 0,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WHISPER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 128, "num_mel_bins": 8, "max_source_positions": 30,
    "max_target_positions": 64, "decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
SLIDING = {"head_dim": 16, "sliding_window": 8}
# For each model: its class, the class of its configuration, and the configuration's settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SIZES),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**SIZES, **SLIDING}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, **SLIDING}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": 8}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
}
# Ways of decoding: arguments of `generate`. If `generate` does not compile the model itself, the tests compile the model's forward.
STATIC = {"cache_implementation": "static"}
SAMPLED = {"do_sample": True, "top_k": 20, "temperature": 0.7}
WAYS: dict[str, dict[str, Any]] = {
    "static": STATIC,
    "sampled": {**STATIC, **SAMPLED},
    "dynamic": {},
    "beams": {"num_beams": 3},
    "static beams": {**STATIC, "num_beams": 3},
    "assisted": {"prompt_lookup_num_tokens": 3},
}
COMPILES_ITSELF = ("static", "sampled")


def build(name: str) -> nn.Module:
    transformers = import_package("transformers")
    model, configuration, settings = MODELS[name]
    torch.manual_seed(0)
    built: nn.Module = getattr(transformers, model)(getattr(transformers, configuration)(**settings)).eval()
    return built


def prompt(name: str, way: str) -> dict[str, torch.Tensor]:
    """Two samples, the first of which is padded on the left; one sample for assisted decoding, which supports no more."""
    generator = torch.Generator().manual_seed(1)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 60, generator=generator)}
    tokens = torch.randint(3, 120, (1 if way == "assisted" else 2, 7), generator=generator)
    mask = torch.ones_like(tokens)
    if name != "t5" and len(tokens) == 2:
        mask[0, :3], tokens[0, :3] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def tokens_of(model: Any, inputs: dict[str, torch.Tensor], way: str, **settings: Any) -> torch.Tensor:
    torch.manual_seed(5)
    lengths = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    tokens: torch.Tensor = model.generate(**inputs, **{"do_sample": False, **lengths, **WAYS[way]}, **settings)
    return tokens


def compiles(**settings: Any) -> dict[str, Any]:
    """Returns the arguments with which `generate` compiles the model, also on the CPU."""
    configuration = import_package("transformers").CompileConfig(backend="dynaxla", **settings)
    configuration._compile_all_devices = True
    return {"compile_config": configuration}


def check(name: str, way: str, model: nn.Module | None = None) -> None:
    model, inputs = model or build(name), prompt(name, way)
    expected = tokens_of(model, inputs, way)
    before, settings = metrics.snapshot().get("calls", 0), {}
    if way in COMPILES_ITSELF:
        settings = compiles()
    else:
        compiled: Callable[..., Any] = torch.compile(model.forward, backend="dynaxla")
        model.forward = compiled  # type: ignore[method-assign]
    tokens = tokens_of(model, inputs, way, **settings)
    assert torch.equal(tokens, expected)
    assert metrics.snapshot().get("calls", 0) - before >= TOKENS // (4 if way == "assisted" else 1) - 1


def test_decoder_with_a_static_cache() -> None:
    """Greedy and sampled decoding use the same compiled program for each token after the first."""
    model = build("llama")
    check("llama", "static", model)
    before = metrics.snapshot()["compile"]
    check("llama", "sampled", model)
    assert metrics.snapshot()["compile"] == before


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_model_with_each_way_of_decoding(name: str, way: str) -> None:
    if way == "assisted" and name == "whisper":
        pytest.skip("needs the tokens of a prompt, and Whisper's input has none")
    check(name, way)


SETTINGS: dict[str, dict[str, Any]] = {
    "fullgraph": {"fullgraph": True},
    "dynamic": {"dynamic": True},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "freeze": {"mode": None, "options": {"freeze": True}},
    "background": {"mode": None, "options": {"compile": "background"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_compile_settings(settings: str) -> None:
    """Prompts of several lengths, then other weights: in place, and in new memory."""
    model, compiled = build("llama"), compiles(**SETTINGS[settings])
    for batch, length, padding in ((2, 7, 3), (1, 5, 0), (2, 9, 4), (2, 7, 0)):
        tokens = torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(length))
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        tokens[0, :padding], inputs["attention_mask"][0, :padding] = 0, 0
        assert torch.equal(tokens_of(model, inputs, "static", **compiled), tokens_of(model, inputs, "static"))
    for replaces in (False, True):
        weights = {name: weight + torch.randn_like(weight) / 2 for name, weight in model.state_dict().items()}
        model.load_state_dict(weights, assign=replaces)
        assert torch.equal(tokens_of(model, inputs, "static", **compiled), tokens_of(model, inputs, "static"))


@pytest.mark.slow
def test_alternating_models() -> None:
    models, compiled = [build("llama"), build("qwen2"), build("llama").bfloat16()], compiles()
    inputs = prompt("llama", "static")
    for model in models * 2:
        assert torch.equal(tokens_of(model, inputs, "static", **compiled), tokens_of(model, inputs, "static"))


@pytest.mark.slow
def test_decoding_assisted_by_another_model() -> None:
    model, assistant = build("llama"), build("llama")
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter) / 100)
    inputs = prompt("llama", "assisted")
    expected = tokens_of(model, inputs, "dynamic", assistant_model=assistant)
    for each in (model, assistant):
        each.forward = torch.compile(each.forward, backend="dynaxla", dynamic=True)  # type: ignore[method-assign]
    assert torch.equal(tokens_of(model, inputs, "dynamic", assistant_model=assistant), expected)
