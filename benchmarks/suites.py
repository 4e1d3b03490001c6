"""The suites: the models that are measured, and their inputs. Weights are random, from a seed: nothing is downloaded.

models     the ten models of `dynaxla.bench.suites`
others     further models of timm and transformers, as users run them; no implementation of an op was chosen by measuring them
small      models that take a few microseconds, to show the overhead of a call
functions  single functions on activations: elementwise, and along rows
generation one token for one sequence or eight: a row of a cache, a layer, a decoder, and one with 8-bit weights
gpu        the ten models, and a block of GPT-2 (small) over 1024 tokens
breaks     small models with graph breaks in TorchDynamo
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from dynaxla.bench import suites
from dynaxla.bench.suites import MODELS, BenchCase, images, import_package, timm_model, tokens

from . import breaks, functions, generation, small


class Transformer(nn.Module):
    """A model of transformers by the name of its class, which returns only its last hidden state.

    Encoder and decoder read the same tokens. `settings` are those of the model's configuration.
    """

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        family = getattr(import_package("transformers"), name)
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self.body = family(family.config_class(**settings))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        more = {"decoder_input_ids": tokens} if self.body.config.is_encoder_decoder else {}
        return self.body(tokens, **more).last_hidden_state


_TIMM = (
    "convnext_atto", "deit_tiny_patch16_224", "densenet121", "edgenext_xx_small", "efficientnet_b0", "ghostnet_100", "lcnet_050",
    "levit_128s", "mixer_s32_224", "mobilenetv3_small_100", "mobilevit_xxs", "poolformer_s12", "pvt_v2_b0", "regnetx_004", "regnety_002",
    "repvgg_a0", "res2net50_26w_4s", "resnet26d", "rexnet_100", "seresnext26t_32x4d", "skresnet18", "swin_tiny_patch4_window7_224",
    "tinynet_e",
)  # fmt: skip
_WIDTH = {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
_TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "AlbertModel": {**_WIDTH, "intermediate_size": 2048},
    "DistilBertModel": {"vocab_size": 8192, "n_layers": 3},
    "ElectraModel": {**_WIDTH, "intermediate_size": 2048},
    "GPTNeoXModel": {**_WIDTH, "intermediate_size": 2048, "use_cache": False},
    "OPTModel": {"vocab_size": 8192, "num_hidden_layers": 3, "use_cache": False},
    "Qwen2Model": {**_WIDTH, "num_key_value_heads": 2, "intermediate_size": 1536, "use_cache": False},
    "T5Model": {"vocab_size": 8192, "num_layers": 3, "use_cache": False},
}


class GptBlock(nn.Module):
    """A block of GPT-2 (small). Input and output have the shape (batch, length, 768)."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, -1)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


def activations(batch: int, generator: torch.Generator, length: int = 1024, width: int = 768) -> tuple[torch.Tensor, ...]:
    """Returns random activations, float32[batch, length, width]."""
    return (torch.randn(batch, length, width, generator=generator),)


GPU = [*MODELS, BenchCase("gpt_block", GptBlock, activations)]

OTHERS = [
    *[BenchCase(name, partial(timm_model, name), images) for name in _TIMM],
    *[
        BenchCase(name, partial(Transformer, name, **settings), partial(tokens, vocabulary=8192))
        for name, settings in _TRANSFORMERS.items()
    ],
]

BREAKS = [
    BenchCase("branch", breaks.Branch, breaks.vectors),
    BenchCase("item", breaks.Item, breaks.vectors),
    BenchCase("side_effects", breaks.SideEffects, breaks.vectors),
    BenchCase("numpy_round_trip", breaks.NumpyRoundTrip, breaks.vectors),
    BenchCase("generate", breaks.Generate, breaks.prompts),
]

SMALL = [
    BenchCase("mlp_2", partial(small.mlp, 2), small.vectors),
    BenchCase("mlp_50", partial(small.mlp, 50), small.vectors),
    BenchCase("lstm_loop", small.LstmLoop, small.sequences),
    BenchCase("attention_16", small.Attention, small.sequences),
]

FUNCTIONS = [BenchCase(name, make, inputs) for name, (make, inputs) in functions.FUNCTIONS.items()]

_LENGTHS = (256, 2048, 8192)


def _generation(name: str, make: Callable[[int, int], nn.Module]) -> Iterable[BenchCase]:
    """Yields cases for one and for eight sequences, with caches of each length."""
    for sequences, prefix in ((1, ""), (8, "8x")):
        for length in _LENGTHS:
            yield BenchCase(f"{name}_{prefix}{length}", partial(make, length, sequences), partial(generation.tokens, sequences=sequences))


GENERATION = [
    *[BenchCase(f"row_{length}", partial(generation.Row, length), generation.rows) for length in (256, 8192)],
    *_generation("layer", generation.Attention),
    *_generation("decoder", generation.decoder),
    *_generation("int8_decoder", generation.int8_decoder),
]

SUITES: Mapping[str, list[BenchCase]] = {
    **suites.SUITES,
    "gpu": GPU,
    "others": OTHERS,
    "small": SMALL,
    "functions": FUNCTIONS,
    "generation": GENERATION,
    "breaks": BREAKS,
}

# The cases of a quick run.
QUICK: Mapping[str, list[str]] = {
    **suites.QUICK,
    "others": ["lcnet_050", "ElectraModel"],
    "small": ["mlp_2", "attention_16"],
    "functions": ["gelu", "softmax"],
    "generation": ["row_8192", "layer_2048"],
    "breaks": ["branch", "item"],
}


def choose(suite: str, names: Iterable[str]) -> list[BenchCase]:
    """Returns cases of one of SUITES, as `dynaxla.bench.suites.choose` does."""
    return suites.choose(suite, names, SUITES)
