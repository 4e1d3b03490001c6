"""Decoder attention that reads a cache in which a few slices are updated: functions written by hand, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten

# The batch size, the numbers of query heads and of key heads, the length of the cache, and the size of a head.
BATCH, HEADS, KEY_HEADS, LENGTH, SIZE = 2, 6, 2, 32, 16


@dataclass(frozen=True)
class Inputs:
    """The inputs of a reader.

    Attributes:
        keys, values: Caches (batch, key heads, length, size). Slices at the positions `at` have NaNs and infinities.
        query: Queries (batch, heads, 3, size).
        key, value: Two new slices of each cache.
        at: The positions of the new slices.
        mask: A mask (batch, 1, 3, length): True where a score counts.
        bias: The mask as a tensor to add to scores.
    """

    keys: Tensor
    values: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    at: Tensor
    mask: Tensor
    bias: Tensor

    @staticmethod
    def generator(dtype: torch.dtype, seed: int = 0, is_finite: bool = False) -> Inputs:
        """Makes inputs. With is_finite, the caches have no NaNs and infinities."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        cache, new = (BATCH, KEY_HEADS, LENGTH, SIZE), (BATCH, KEY_HEADS, 2, SIZE)
        keys, values, at = normal(*cache), normal(*cache), torch.tensor([5, LENGTH - 3])
        if not is_finite:
            keys[:, :, at], values[:, :, 5], values[:, :, LENGTH - 3] = torch.nan, torch.inf, torch.nan
        mask = torch.rand(BATCH, 1, 3, LENGTH, generator=generator) < 0.7
        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
        return Inputs(keys, values, normal(BATCH, HEADS, 3, SIZE), normal(*new), normal(*new), at, mask, bias)


def repeated(x: Tensor) -> Tensor:
    """Repeats each head of a cache for all query heads that it serves, as transformers does."""
    batch, heads, length, size = x.shape
    times = HEADS // heads
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def attention(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attention from matrix products, with the softmax in float32."""
    scores = query @ repeated(keys).transpose(2, 3) * 0.25 + bias
    return F.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ repeated(values)


def fused(i: Inputs, keys: Tensor, values: Tensor, **settings: Tensor | bool) -> Tensor:
    return F.scaled_dot_product_attention(i.query, keys, values, enable_gqa=True, **settings)


def both(i: Inputs, change: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    return change(i.keys, i.key), change(i.values, i.value)


def index_copy(x: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return x.index_copy(2, at, new)


def index_put(x: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return aten.index_put(x, [None, None, at], new)


def slices(x: Tensor, new: Tensor) -> Tensor:
    """Updates both slices at constant positions."""
    x = torch.slice_scatter(x, new[:, :, :1], 2, 5, 6)
    return torch.select_scatter(x, new[:, :, 1], 2, LENGTH - 3)


def by_sample(x: Tensor, new: Tensor, at: Tensor, from_end: bool = False) -> Tensor:
    """Updates each sample at positions of its own, which are the same here."""
    samples = torch.arange(-len(x), 0) if from_end else torch.arange(len(x))
    return aten.index_put(x, [samples[:, None], None, at[None]], new.transpose(1, 2))


def scatter(x: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return x.scatter(2, at.view(1, 1, -1, 1).expand(len(x), 1, at.numel(), 1).expand(*x.shape[:2], at.numel(), SIZE), new)


def _one_each(i: Inputs) -> Tensor:
    """Each sample is updated at a position of its own, where the other samples keep old slices. A second update of a sample follows."""
    keys, values = (x.nan_to_num(1, 2, 3) for x in (i.keys, i.values))
    keys, values = (aten.index_put(x, [torch.arange(BATCH), None, i.at], new[:, :, 0]) for x, new in ((keys, i.key), (values, i.value)))
    last = [torch.tensor([1]), None, i.at[1:]]
    keys, values = (aten.index_put(x, last, new[1:, :, 1]) for x, new in ((keys, i.value), (values, i.key)))
    return fused(i, keys, values, attn_mask=i.bias)


def _written_twice(i: Inputs) -> Tensor:
    """The last of two slices for one position counts. A NaN in the first one has no effect."""
    samples, at = torch.tensor([[0], [1]]), torch.tensor([[5, LENGTH - 3, 5], [LENGTH - 3, 5, LENGTH - 3]])

    def change(x: Tensor, new: Tensor) -> Tensor:
        new = torch.cat([torch.full_like(new[:, :, :1], torch.nan), new], 2).transpose(1, 2)
        return aten.index_put(x, [samples, None, at], new)

    return attention(i.query, *both(i, change), i.bias)


def _samples_in_rows(i: Inputs) -> Tensor:
    """Caches (batch, length, heads, size)."""
    keys, values = (x.transpose(1, 2).contiguous() for x in (i.keys, i.values))
    samples, at = torch.arange(BATCH)[:, None], i.at[None] - LENGTH
    keys, values = (aten.index_put(x, [samples, at], new.transpose(1, 2)) for x, new in ((keys, i.key), (values, i.value)))
    return fused(i, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=i.bias)


def _slots(i: Inputs) -> Tensor:
    """Caches whose rows are numbered through all samples, with all heads in a row."""

    def change(x: Tensor, new: Tensor) -> Tensor:
        slots = (torch.arange(BATCH)[:, None] * LENGTH + i.at).flatten()
        x = x.transpose(1, 2).reshape(BATCH * LENGTH, KEY_HEADS * SIZE)
        x = x.index_copy(0, slots, new.transpose(1, 2).reshape(len(slots), KEY_HEADS * SIZE))
        return x.view(BATCH, LENGTH, KEY_HEADS, SIZE).transpose(1, 2)

    return fused(i, *both(i, change), attn_mask=i.bias)


def _wide_rows(i: Inputs) -> Tensor:
    """Caches (batch, length, heads times size)."""

    def change(x: Tensor, new: Tensor) -> Tensor:
        x = x.transpose(1, 2).reshape(BATCH, LENGTH, KEY_HEADS * SIZE).index_copy(1, i.at, new.transpose(1, 2).flatten(2))
        return x.view(BATCH, LENGTH, KEY_HEADS, SIZE).transpose(1, 2)

    return fused(i, *both(i, change), attn_mask=i.bias)


def _pages(i: Inputs) -> Tensor:
    """The caches of one head, in pages of four. Two indices address a slice."""
    query, (keys, values) = i.query[0, 0], (x[0, 0].view(-1, 4, SIZE) for x in (i.keys, i.values))
    at = [i.at // 4, i.at % 4]
    keys, values = (aten.index_put(x, at, new[0, 0]).view(LENGTH, SIZE) for x, new in ((keys, i.key), (values, i.value)))
    return F.softmax(query @ keys.t() + i.bias[0, 0], -1) @ values


def _one_sample(i: Inputs) -> Tensor:
    """A batch of one."""
    keys, values = (
        aten.index_put(x[:1], [torch.tensor([0]), None, i.at], new[0].transpose(0, 1)) for x, new in ((i.keys, i.key), (i.values, i.value))
    )
    return F.scaled_dot_product_attention(i.query[:1], keys, values, attn_mask=i.bias[:1], enable_gqa=True)


def _whole_heads(i: Inputs) -> Tensor:
    """Whole heads of samples are new: the update is along dimensions that both operands keep."""
    keys = aten.index_put(i.keys.nan_to_num(), [torch.tensor([0, 1]), torch.tensor([1, 0])], i.key[:, 0].repeat(1, LENGTH // 2, 1))
    return i.query @ repeated(keys).transpose(2, 3)


def _single_numbers(i: Inputs) -> Tensor:
    """The update is along a dimension that is summed and one that is kept, so it has no slices."""
    keys = aten.index_put(i.keys.nan_to_num(), [None, None, i.at, i.at[:1]], i.key[:, :, :, 0])
    return i.query @ repeated(keys).transpose(2, 3)


def _twice(i: Inputs) -> Tensor:
    """Two updates in turn. The second overwrites some slices of the first."""
    first = both(i, lambda x, new: index_copy(x, new, i.at))
    keys, values = (index_put(x, -new[:, :, :1], i.at[1:]) for x, new in zip(first, (i.key, i.value), strict=True))
    return attention(i.query, keys, values, i.bias)


def _in_rows(i: Inputs) -> Tensor:
    """Caches (batch, length, heads, size), the layout after a projection."""
    keys, values = (x.transpose(1, 2).contiguous() for x in (i.keys, i.values))
    keys, values = (x.index_copy(1, i.at, new.transpose(1, 2)) for x, new in ((keys, i.key), (values, i.value)))
    return fused(i, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=i.bias)


def _cache_first(i: Inputs) -> Tensor:
    keys, values = both(i, lambda x, new: index_copy(x, new, i.at))
    scores = (repeated(keys) @ i.query.transpose(2, 3)).transpose(2, 3) + i.bias
    return torch.einsum("bhld,bhrl->bhrd", repeated(values), F.softmax(scores, -1))


def _transposed_keys(i: Inputs) -> Tensor:
    """Keys (batch times heads, size, length), and a bias that is added to the products."""
    keys = i.keys.flatten(0, 1).transpose(1, 2).contiguous().index_copy(2, i.at, i.key.flatten(0, 1).transpose(1, 2))
    query = i.query[:, :KEY_HEADS].flatten(0, 1)
    return torch.baddbmm(i.bias.nan_to_num(neginf=-9.0).expand(BATCH, KEY_HEADS, 3, LENGTH).flatten(0, 1), query, keys, beta=0.5, alpha=2)


def _one_number(i: Inputs) -> Tensor:
    """A vector with a new element, as a matrix of one row."""
    return i.values[0, 0].nan_to_num(0, 0, 0) @ i.query[0, 0, 0].index_copy(0, i.at[:1], i.key[0, 0, 0, 0]).unsqueeze(1)


def _one_head(i: Inputs) -> Tensor:
    """Matrices without batch or heads, and a computed mask."""
    keys, values = (x[0, 0].index_copy(0, i.at, new[0, 0]) for x, new in ((i.keys, i.key), (i.values, i.value)))
    scores = (i.query[0, 0] @ keys.t()).masked_fill(torch.arange(LENGTH) > i.at[1], -torch.inf)
    return F.softmax(scores, -1) @ values


def _one_cache(i: Inputs) -> Tensor:
    """The keys are also the values."""
    keys = index_copy(i.values, i.key, i.at)
    return fused(i, keys, keys, attn_mask=i.bias)


def _duplicates(i: Inputs) -> Tensor:
    """The last of several slices for one position counts. A NaN in another one has no effect."""
    at, new = torch.tensor([5, LENGTH - 3, 5]), torch.cat([torch.full_like(i.key[:, :, :1], torch.nan), i.key.flip(2)], 2)
    values = torch.cat([torch.full_like(i.value[:, :, :1], torch.inf), i.value.flip(2)], 2)
    return attention(i.query, index_copy(i.keys, new, at), index_copy(i.values, values, at), i.bias)


def _read_by_others(i: Inputs) -> tuple[Tensor, Tensor]:
    keys, values = both(i, lambda x, new: index_copy(x, new, i.at))
    return attention(i.query, keys, values, i.bias), keys.sum()


def _in_a_list(i: Inputs) -> tuple[Tensor, Tensor]:
    keys, values = both(i, lambda x, new: index_copy(x, new, i.at))
    return attention(i.query, keys, values, i.bias), torch.cat([values, i.value], 2)


def _from_itself(i: Inputs) -> Tensor:
    """The new slices are other slices of the cache."""
    keys = index_copy(i.keys, i.keys[:, :, 7:9], i.at)
    return attention(i.query, keys, index_copy(i.values, i.values[:, :, 1:3] * 2, i.at), i.bias)


def _added(i: Inputs) -> Tensor:
    values = aten.index_put(i.values, [None, None, i.at + 1], i.value, True)
    return attention(i.query, i.key.repeat(1, 1, LENGTH // 2, 1), values.nan_to_num(), i.bias)


def _by_batch(i: Inputs) -> Tensor:
    """A slice of the batch is new: a dimension that both operands keep."""
    return i.query @ repeated(i.keys.nan_to_num().index_copy(0, i.at[:1] - 4, i.key[:1].repeat(1, 1, LENGTH // 2, 1))).transpose(2, 3)


def _one_at_a_time(i: Inputs) -> Tensor:
    keys, values = both(i, lambda x, new: index_copy(x, new[:, :, :1], i.at[:1]))
    keys, values = (aten.index_put(x, [None, None, i.at[1] - LENGTH], new[:, :, 1]) for x, new in ((keys, i.key), (values, i.value)))
    return fused(i, keys, values, attn_mask=i.bias)


def _single_query(i: Inputs) -> Tensor:
    keys, values = both(i, lambda x, new: index_copy(x, new, i.at))
    query = i.query[:, :KEY_HEADS, :1]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=i.mask[:, :, :1])


@dataclass(frozen=True)
class Reader:
    """A function that updates and reads the caches.

    Attributes:
        by_parts: The number of products that can be computed without a whole updated tensor.
    """

    run: Callable[[Inputs], Tensor | tuple[Tensor, ...]]
    by_parts: int = 2


READERS = {
    "by hand": Reader(lambda i: attention(i.query, *both(i, lambda x, new: index_copy(x, new, i.at)), i.bias)),
    "fused": Reader(lambda i: fused(i, *both(i, lambda x, new: index_copy(x, new, i.at)), attn_mask=i.mask)),
    "no mask": Reader(lambda i: fused(i, *both(i, lambda x, new: index_put(x, new, i.at)))),
    "causal": Reader(lambda i: fused(i, *both(i, slices), is_causal=True)),
    "from the end": Reader(lambda i: attention(i.query, *both(i, lambda x, new: index_put(x, new, i.at - LENGTH)), i.bias)),
    "slices": Reader(lambda i: attention(i.query, *both(i, slices), i.bias)),
    "repeated heads": Reader(lambda i: F.scaled_dot_product_attention(i.query, *map(repeated, both(i, slices)), attn_mask=i.bias)),
    "broadcast": Reader(lambda i: attention(i.query, *both(i, lambda x, new: index_put(x, new[:1, :, :1], i.at)), i.bias)),
    "twice": Reader(_twice),
    "in rows": Reader(_in_rows),
    "cache first": Reader(_cache_first),
    "transposed keys": Reader(_transposed_keys, 1),
    "one number": Reader(_one_number, 1),
    "one head": Reader(_one_head),
    "one cache": Reader(_one_cache),
    "one at a time": Reader(_one_at_a_time),
    "a single query": Reader(_single_query),
    "duplicates": Reader(_duplicates),
    "from itself": Reader(_from_itself),
    "read by others": Reader(_read_by_others, 1),
    "in a list": Reader(_in_a_list, 1),
    "added": Reader(_added, 0),
    "by batch": Reader(_by_batch, 0),
    "by sample": Reader(lambda i: attention(i.query, *both(i, lambda x, new: by_sample(x, new, i.at)), i.bias)),
    "by sample from the end": Reader(lambda i: fused(i, *both(i, lambda x, new: by_sample(x, new, i.at - LENGTH, True)), attn_mask=i.mask)),
    "scattered": Reader(lambda i: attention(i.query, *both(i, lambda x, new: scatter(x, new, i.at)), i.bias)),
    "one each": Reader(_one_each),
    "written twice": Reader(_written_twice),
    "samples in rows": Reader(_samples_in_rows),
    "slots": Reader(_slots),
    "wide rows": Reader(_wide_rows),
    "pages": Reader(_pages),
    "one sample": Reader(_one_sample),
    "whole heads": Reader(_whole_heads, 1),
    "single numbers": Reader(_single_numbers, 0),
}


def by_chance(seed: int) -> Callable[[Inputs], Tensor]:
    """Returns a random function: a product with a cache, or its transpose, after updates of any kind."""
    draw = random.Random(seed)
    kinds = draw.choices(["copy", "put", "slice", "select", "sample", "scatter"], k=draw.randint(1, 3))
    steps = [(kind, draw.randrange(LENGTH - 2), draw.choice([1, -1])) for kind in kinds]
    is_score, is_first, is_repeated, reads_between = (draw.random() < chance for chance in (0.5, 0.4, 0.5, 0.2))

    def run(i: Inputs) -> Tensor:
        cache, between = (i.keys if is_score else i.values), torch.zeros(())
        cache = index_copy(cache, i.key, i.at)
        for kind, place, factor in steps:
            new, at = i.value * factor, i.at[:1] * 0 + torch.tensor([place, place + (factor > 0)])
            if kind == "copy":
                cache = index_copy(cache, new, at)
            elif kind == "put":
                cache = index_put(cache, new, at - LENGTH)
            elif kind == "sample":
                cache = by_sample(cache, new, at)
            elif kind == "scatter":
                cache = cache.scatter(2, torch.stack([at, at.flip(0)]).view(2, 1, 2, 1).expand_as(new), new)
            elif kind == "slice":
                cache = torch.slice_scatter(cache, new, 2, place, place + 2)
            else:
                cache = torch.select_scatter(cache, new[:, :, 0], 2, place - LENGTH)
            if reads_between:
                between = between + (i.query[:, :KEY_HEADS] @ cache.transpose(2, 3)).mean()
        cache = repeated(cache) if is_repeated else cache
        heads = cache.shape[1]
        weights = F.softmax(i.bias, -1).expand(BATCH, heads, 3, LENGTH)
        if is_score:
            query = i.query[:, :heads]
            out = (cache @ query.transpose(2, 3)).transpose(2, 3) if is_first else query @ cache.transpose(2, 3)
        else:
            out = (cache.transpose(2, 3) @ weights.transpose(2, 3)).transpose(2, 3) if is_first else weights @ cache
        return out + between

    return run
