"""Faults in the rules for padding, which rounded sizes (`sizes="buckets"`) need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from jax import lax
from torch.fx import Node

from dynaxla.engine.padded_calls import ValidRegion
from dynaxla.lowering import registry
from dynaxla.lowering.ops import masking
from dynaxla.passes.padding import padded_layers, padded_order, padded_rules, padded_windows, padded_writes, round_up, valid_sizes
from dynaxla.passes.padding.padding_rewrite import PaddingRewrite
from dynaxla.passes.padding.valid_sizes import Extent

from . import FaultList

aten = torch.ops.aten

FAULTS = FaultList()


def _unmasked(*ops: torch._ops.OpOverload) -> AbstractContextManager[Any]:
    """The rules of these ops say the same, but mask nothing."""

    def without(right: Callable[[PaddingRewrite, Node], Any]) -> Callable[[PaddingRewrite, Node], Any]:
        def rule(given: PaddingRewrite, node: Node) -> Any:
            with patch.object(given, "masked", lambda node, *rest: node):
                return right(given, node)

        return rule

    return patch.dict(padded_rules.RULES, {op: without(padded_rules.RULES[op]) for op in ops})


def _lowered(op: torch._ops.OpOverload, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """An op of programs is computed by `change` of its lowering and its arguments."""
    rule = registry.find(op)
    assert rule is not None
    wrong = dataclasses.replace(rule, function=lambda *args, **kwargs: change(rule.function, *args, **kwargs))
    return patch.dict(registry._rules, {(op, None): wrong})


for _name, _ops in {
    "variances_are_not_masked": (aten.var.correction, aten.std.correction, aten.var_mean.correction),
    "batch_norms_are_not_masked": (aten._native_batch_norm_legit_functional.default,),
    "what_is_sorted_is_not_masked": (aten.sort.default, aten.sort.stable),
    "the_largest_are_not_masked": (aten.topk.default,),
    "convolutions_are_not_masked": (aten.convolution.default,),
    "windows_of_maxima_are_not_masked": (aten.max_pool2d_with_indices.default,),
    "added_rows_are_not_masked": (aten.index_add.default, aten.index_put.default, aten.scatter_add.default),
    "sums_are_not_masked": (aten.sum.default, aten.sum.dim_IntList),
    "means_are_not_masked": (aten.mean.dim, aten.mean.default),
    "maxima_are_not_masked": (aten.amax.default, aten.max.dim),
    "truth_is_not_masked": (aten.all.default, aten.any.dim),
    "softmax_is_not_masked": (aten._softmax.default,),
    "products_are_not_masked": (aten.mm.default, aten.bmm.default),
    "attention_is_not_masked": (aten._scaled_dot_product_flash_attention_for_cpu.default,),
    "tables_are_read_anywhere": (aten.embedding.default, aten.index.Tensor),
    "losses_count_padding": (aten.nll_loss_forward.default,),
    "gradients_of_kernels_are_not_masked": (aten.convolution_backward.default,),
    "padding_is_where_numbers_are_added": (aten.constant_pad_nd.default,),
    "layer_norms_are_not_masked": (aten.native_layer_norm.default,),
    "losses_of_chances_count_padding": (aten.binary_cross_entropy.default,),
    "norms_of_vectors_are_not_masked": (aten.linalg_vector_norm.default,),
    "sums_without_nan_are_not_masked": (aten.nansum.default,),
    "group_norms_are_not_masked": (aten.native_group_norm.default,),
    "fused_layers_attend_to_padding": (aten._transformer_encoder_layer_fwd.default, aten._native_multi_head_attention.default),
}.items():
    FAULTS[_name] = lambda ops=_ops: _unmasked(*ops)


@FAULTS.add
def least_elements_are_filled_with_zero() -> AbstractContextManager[Any]:
    return patch.dict(padded_rules._NEUTRAL, {aten.amin.default: lambda _: 0, aten.min.dim: lambda _: 0})


@FAULTS.add
def products_of_elements_are_filled_with_zero() -> AbstractContextManager[Any]:
    return patch.dict(padded_rules._NEUTRAL, {aten.prod.dim_int: lambda _: 0})


@FAULTS.add
def products_that_are_scattered_are_filled_with_zero() -> AbstractContextManager[Any]:
    return patch.dict(padded_writes._NEUTRAL, {"prod": 0})


@FAULTS.add
def views_begin_where_their_memory_does() -> AbstractContextManager[Any]:
    return patch.object(padded_order, "_starts", lambda later, steps: dict.fromkeys(steps, 0))


@FAULTS.add
def maxima_are_filled_with_zero() -> AbstractContextManager[Any]:
    return patch.dict(padded_rules._NEUTRAL, {aten.amax.default: lambda _: 0, aten.argmax.default: lambda _: 0})


@FAULTS.add
def means_are_over_rounded_sizes() -> AbstractContextManager[Any]:
    def rounded(right: Any, lengths: Any, places: Sequence[int], times: int) -> Any:
        return right(lax.add(lengths, lax.full_like(lengths, 1)), places, times)

    return _lowered(masking.size_product, rounded)


@FAULTS.add
def masks_are_longer_by_one() -> AbstractContextManager[Any]:
    return _lowered(masking.masked, lambda right, x, lengths, *rest: right(x, lax.add(lengths, lax.full_like(lengths, 1)), *rest))


@FAULTS.add
def parts_begin_at_rounded_positions() -> AbstractContextManager[Any]:
    return _lowered(
        masking.slice_at, lambda right, x, lengths, *rest, **kw: right(x, lax.add(lengths, lax.full_like(lengths, 1)), *rest, **kw)
    )


@FAULTS.add
def what_turns_turns_around_the_rounded_end() -> AbstractContextManager[Any]:
    return _lowered(masking.roll_or_flip, lambda right, x, lengths, *rest: right(x, lax.add(lengths, lax.full_like(lengths, 1)), *rest))


@FAULTS.add
def what_is_written_is_not_repeated() -> AbstractContextManager[Any]:
    return _lowered(masking.repeat_last, lambda right, x, *rest: lax.select(lax.full(x.shape, True), x, x))


@FAULTS.add
def slices_are_written_with_their_padding() -> AbstractContextManager[Any]:
    def whole(right: Any, x: Any, added: Any, lengths: Any, dim: int, length_index: int, start: int, count_index: int, count: int) -> Any:
        return right(x, added, lengths, dim, length_index, start, -1, added.shape[dim])

    return _lowered(masking.write_into, whole)


@FAULTS.add
def tensors_follow_padding() -> AbstractContextManager[Any]:
    def concatenate(right: Any, tensors: Sequence[Any], lengths: Any, dim: int, places: Sequence[int]) -> Any:
        return lax.concatenate(tensors, dim)

    return _lowered(masking.cat_valid, concatenate)


@FAULTS.add
def merged_dimensions_are_prefixes() -> AbstractContextManager[Any]:
    right = valid_sizes.reshaped

    def wrong(before: Any, sizes: Any, symbols: Any) -> Any:
        return tuple(Extent.of(math.prod(extent.factors)) for extent in right(before, sizes, symbols))

    return patch.object(padded_rules, "reshaped", wrong)


@FAULTS.add
def indices_from_the_end_count_padding() -> AbstractContextManager[Any]:
    return patch.object(
        padded_layers, "checked_indices", lambda given, index, table, dim, **_: given.masked(index, range(index.meta["val"].dim()), 0)
    )


@FAULTS.add
def positions_count_along_rounded_rows() -> AbstractContextManager[Any]:
    return patch.object(padded_windows, "_is_width_padded", lambda given, images: False)


@FAULTS.add
def images_are_resized_by_rounded_sizes() -> AbstractContextManager[Any]:
    return patch.object(padded_rules, "_true_number", lambda given, number, x: None)


@FAULTS.add
def mirrors_stand_at_the_rounded_end() -> AbstractContextManager[Any]:
    def mirrored(right: Any, x: Any, lengths: Any, dim: int, *rest: Any, ctx: Any) -> Any:
        return right(x, lax.full(lengths.shape, x.shape[dim], lengths.dtype), dim, *rest, ctx=ctx)

    return _lowered(masking.reflect_or_replicate, mirrored)


@FAULTS.add
def flips_are_around_the_rounded_end() -> AbstractContextManager[Any]:
    def rolled_or_flipped(self: PaddingRewrite, node: Node, dim: int, shift: int, *, backwards: bool = False) -> Node:
        value = node.meta["val"]
        added = self.add(aten.flip.default, (node, [dim]), value.shape, value)
        self.extents[added] = self.extents_of(node)
        return added if backwards else node

    return patch.object(PaddingRewrite, "rolled_or_flipped", rolled_or_flipped)


@FAULTS.add
def columns_alone_are_masked() -> AbstractContextManager[Any]:
    right = PaddingRewrite.masked
    return patch.object(PaddingRewrite, "masked", lambda self, node, dims, *rest: right(self, node, list(dims)[-1:], *rest))


@FAULTS.add
def results_are_not_cut_where_they_are_flat() -> AbstractContextManager[Any]:
    right = ValidRegion.crop

    def crop(self: ValidRegion, padded: torch.Tensor) -> torch.Tensor:
        if len(self.factors) == len(self.shape):
            return right(self, padded)
        return padded.reshape(-1)[: math.prod(self.valid)].view(self.valid)

    return patch.object(ValidRegion, "crop", crop)


@FAULTS.add
def assumptions_are_forgotten() -> AbstractContextManager[Any]:
    return patch.object(round_up.Rounding, "_guards", lambda self: [])
