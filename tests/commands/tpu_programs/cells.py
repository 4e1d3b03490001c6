"""The cells, each of which is one compilation. The cells of a group share a child process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.suites import GptBlock, activations
from torch import nn

import dynaxla
from benchmarks import generation
from commands.compiled_programs.budgets import Limits
from dynaxla.bench.suites import MODELS, BenchCase, import_package
from dynaxla.sharding import Mesh, mark_sharding, shard_module

from . import plain_jax
from .blocks import Attention, Gpt, LlamaBlock
from .programs import Figures, described, of_call, of_jax, of_model, of_step, parameters

BUDGETS = Path(__file__).with_name("budgets.json")
LIMITS = Limits(counts=("copies", "float32_products", "instructions"), sizes=("cycles", "memory_mib"))
BF16 = torch.bfloat16
CHIPS = "v5e:16x16"
# The models that are also compiled in float32: a convolutional network, and a transformer.
FLOAT32_MODELS = ("resnet18", "bert_base")


@dataclass(frozen=True)
class Cell:
    """One compilation.

    Attributes:
        group: The name of the group.
        name: The name in the group.
        make: Compiles, and returns the figures by kind of program. Kinds that begin with "JAX" are references written in JAX.
    """

    group: str
    name: str
    make: Callable[[], Figures]

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


def cells() -> Iterator[Cell]:
    for case in MODELS:
        for dtype in (BF16, torch.float32) if case.name in FLOAT32_MODELS else (BF16,):
            for batch, training in ((1, False), (8, False), (4, True)):
                kind = "training" if training else "inference"
                name = f"{str(dtype).removeprefix('torch.')}, {kind}, batch {batch}"
                yield Cell(case.name, name, partial(_model, case, dtype, batch, training))
    for name, block, width in (("GPT block", GptBlock, 768), ("Llama block", LlamaBlock, 1024)):
        for kernel in (True, False):
            for training in (False, True):
                text = f"{'training' if training else 'inference'}, 8 x 1024 x {width}{'' if kernel else ', without the attention kernel'}"
                yield Cell(name, text, partial(_block, block, width, training, kernel))
    for shape, key_heads in (((8, 16, 2048, 64), 16), ((1, 32, 8192, 64), 8)):
        for training in (False, True):
            name = f"{'training' if training else 'inference'}, {' x '.join(map(str, shape))}, {key_heads} heads of keys"
            yield Cell("attention", name, partial(_attention, shape, key_heads, training))
    yield Cell("attention", "training, 8 x 16 x 1024 x 64, 4 heads of keys, dropout", partial(_dropout, (8, 16, 1024, 64), 4))
    for count in (8, 200):
        yield Cell("AdamW", f"{count} parameters of 512 x 512", partial(_adamw, count))
    yield Cell("decoding", "two layers, a cache of 2048", partial(_decoding, 2048))
    yield Cell("eight chips", "attention, training, 4 x 16 x 4096 x 64, batch and heads sharded", _sharded_attention)
    yield Cell("eight chips", "a script of torch_xla: transformers' GPT-2, fsdp=4, tp=2", _torch_xla_script)
    yield Cell("256 chips", "Megatron MLP", _megatron)
    yield Cell("256 chips", "GPT-2, parameters sharded, tensors parallel", _gpt)
    yield Cell("256 chips", "ResNet50, data parallel", _resnet)


def _model(case: BenchCase, dtype: torch.dtype, batch: int, training: bool) -> Figures:
    model, inputs = case.build().to(dtype), case.inputs(batch, torch.Generator().manual_seed(0))
    inputs = tuple(item.to(dtype) if item.is_floating_point() else item for item in inputs)
    figures = of_model(model, *inputs, training=training)
    function = plain_jax.MODELS.get(case.name)
    if function is not None and not training:
        figures["JAX"] = of_jax(function, parameters(model), *map(described, inputs))
    return figures


def _block(block: type[nn.Module], width: int, training: bool, kernel: bool) -> Figures:
    model, (x,) = block().to(BF16), activations(8, torch.Generator().manual_seed(0), width=width)
    x = x.to(BF16).requires_grad_(training)
    with _without_kernels() if not kernel else contextlib.nullcontext():
        figures = of_model(model, x, training=training)
    function = plain_jax.gpt_block if block is GptBlock else plain_jax.llama_block
    function = partial(function, attend=plain_jax.flash if kernel else plain_jax.attention)
    described_x = described(x)
    args = (parameters(model), described_x)
    figures["JAX"] = of_jax(plain_jax.gradient(function, (0, 1)), described_x, *args) if training else of_jax(function, *args)
    return figures


def _attention(shape: tuple[int, ...], key_heads: int, training: bool) -> Figures:
    query = torch.empty(shape, dtype=BF16)
    key, value = (torch.empty(shape[0], key_heads, *shape[2:], dtype=BF16) for _ in range(2))
    tensors = [item.requires_grad_(training) for item in (query, key, value)]
    figures = of_model(Attention(), *tensors, training=training)
    args = [described(tensor) for tensor in tensors]
    figures["JAX"] = of_jax(plain_jax.gradient(plain_jax.flash, (0, 1, 2)), args[0], *args) if training else of_jax(plain_jax.flash, *args)
    return figures


def _dropout(shape: tuple[int, ...], key_heads: int) -> Figures:
    query = torch.empty(shape, dtype=BF16, requires_grad=True)
    key, value = (torch.empty(shape[0], key_heads, *shape[2:], dtype=BF16, requires_grad=True) for _ in range(2))
    return of_model(Attention(dropout=0.1), query, key, value, training=True)


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """Chooses the attention that computes scores, without kernels."""
    os.environ["DYNAXLA_IMPLEMENTATIONS"] = "attention=fused_softmax,attention_gradient=xla"
    try:
        yield
    finally:
        del os.environ["DYNAXLA_IMPLEMENTATIONS"]


def _adamw(count: int) -> Figures:
    dynaxla.device.enable()
    weights = [nn.Parameter(torch.zeros(512, 512, device="jax")) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights)
    optimizer.step()  # creates the optimizer's state
    return of_step(optimizer.step)


def _decoding(length: int) -> Figures:
    model = generation.decoder(length, layers=2).to(BF16)
    return of_model(model, *[item.to(BF16) for item in generation.tokens(1, torch.Generator().manual_seed(0))])


def _sharded_attention() -> Figures:
    dynaxla.device.enable()
    mesh = Mesh((2, 4), ("data", "model"), virtual=True)
    tensors = [torch.empty(4, 16, 4096, 64, dtype=BF16, device="jax") for _ in range(3)]
    operands = [mark_sharding(tensor, mesh, ("data", "model")).requires_grad_() for tensor in tensors]
    compiled = torch.compile(Attention(), backend="dynaxla", fullgraph=True, dynamic=False)

    def call() -> None:
        result = compiled(*operands)
        result.backward(torch.empty_like(result))

    return of_call(call, "v5e:2x4")


def _torch_xla_script() -> Figures:
    """The script of tests/docs/test_torch_xla_script.py with the real sizes of GPT-2, as a compiled step on a virtual mesh."""
    transformers = import_package("transformers")
    dynaxla.device.enable()
    mesh = Mesh((4, 2), ("fsdp", "tp"), virtual=True)
    specs = {
        "*c_attn.weight": ("fsdp", "tp"), "*c_fc.weight": ("fsdp", "tp"), "*c_proj.weight": ("tp", "fsdp"), "*wte.weight": ("tp", "fsdp"),
    }  # fmt: skip
    # 50304 tokens: a multiple of the number of devices.
    model = shard_module(transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50304, use_cache=False)).to(BF16), mesh, specs)
    tokens = mark_sharding(torch.zeros(8, 512, dtype=torch.int64, device="jax"), mesh, ("fsdp",))

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    return _training(model, loss, torch.optim.AdamW(model.parameters()), "v5e:2x4")


def _megatron() -> Figures:
    dynaxla.device.enable()
    mesh = Mesh((32, 8), ("data", "model"), virtual=True)
    model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)).to(BF16)
    model = shard_module(model, mesh, {"0.weight": ("model", "data"), "0.bias": ("model",), "2.weight": ("data", "model")})
    x = mark_sharding(torch.empty(8192, 4096, dtype=BF16, device="jax"), mesh, ("data",))
    return _training(model, lambda: model(x).square().mean(), torch.optim.AdamW(model.parameters()))


def _gpt() -> Figures:
    dynaxla.device.enable()
    mesh = Mesh((64, 4), ("data", "model"), virtual=True)
    specs = {
        "tokens.weight": ("model", "data"), "positions.weight": (None, "data"),
        "*.qkv.weight": ("model", "data"), "*.out.weight": ("data", "model"),
        "*.up.weight": ("model", "data"), "*.down.weight": ("data", "model"),
        "*.qkv.bias": ("model",), "*.up.bias": ("model",),
    }  # fmt: skip
    model = shard_module(Gpt().to(BF16), mesh, specs)
    # The table is sharded over "data", too. Without this constraint, XLA gathers the batch instead of the parameters.
    model.tokens.register_forward_hook(lambda _, args, embedded: mark_sharding(embedded, mesh, ("data",)))
    tokens, targets = (mark_sharding(torch.zeros(128, 1024, dtype=torch.int64, device="jax"), mesh, ("data",)) for _ in range(2))

    def loss() -> torch.Tensor:
        logits = mark_sharding(model(tokens), mesh, ("data", None, "model"))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return _training(model, loss, torch.optim.AdamW(model.parameters()))


def _resnet() -> Figures:
    dynaxla.device.enable()
    mesh = Mesh((256,), ("data",), virtual=True)
    case = next(case for case in MODELS if case.name == "resnet50")
    model = shard_module(case.build().to(BF16), mesh, {})
    x = mark_sharding(torch.empty(2048, 3, 224, 224, dtype=BF16, device="jax"), mesh, ("data",))
    targets = mark_sharding(torch.zeros(2048, dtype=torch.int64, device="jax"), mesh, ("data",))

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(x).float(), targets)

    return _training(model, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def _training(model: nn.Module, loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, topology: str = CHIPS) -> Figures:
    model.train()

    def step() -> Any:
        loss_value = loss()
        loss_value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss_value.detach()

    return of_step(step, topology)
