"""Faults in the padding rules, which rounded sizes (`sizes="buckets"`) need."""

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
from dynaxla.lowering.ops import valid_size_ops
from dynaxla.passes.padding import padded_layers, padded_order, padded_rules, padded_windows, padded_writes, round_up, valid_sizes
from dynaxla.passes.padding.padding_rewrite import PaddingRewrite
from dynaxla.passes.padding.valid_sizes import Extent

from . import FaultList

aten = torch.ops.aten

FAULTS = FaultList()


def _unmasked(*ops: torch._ops.OpOverload) -> AbstractContextManager[Any]:
    """A fault: the padding rules of these ops do not mask."""

    def without_mask(original: Callable[[PaddingRewrite, Node], Any]) -> Callable[[PaddingRewrite, Node], Any]:
        def rule(rewrite: PaddingRewrite, node: Node) -> Any:
            with patch.object(rewrite, "masked", lambda node, *rest: node):
                return original(rewrite, node)

        return rule

    return patch.dict(padded_rules.RULES, {op: without_mask(padded_rules.RULES[op]) for op in ops})


def _lowered(op: torch._ops.OpOverload, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """A fault: the lowering of an op is `change`, which gets the original lowering and the arguments."""
    rule = registry.find(op)
    assert rule is not None
    wrong = dataclasses.replace(rule, function=lambda *args, **kwargs: change(rule.function, *args, **kwargs))
    return patch.dict(registry._rules, {(op, None): wrong})


for _name, _ops in {
    "variances_are_not_masked": (aten.var.correction, aten.std.correction, aten.var_mean.correction),
    "batch_norms_are_not_masked": (aten._native_batch_norm_legit_functional.default,),
    "sorts_are_not_masked": (aten.sort.default, aten.sort.stable),
    "topk_is_not_masked": (aten.topk.default,),
    "convolutions_are_not_masked": (aten.convolution.default,),
    "max_pooling_is_not_masked": (aten.max_pool2d_with_indices.default,),
    "added_rows_are_not_masked": (aten.index_add.default, aten.index_put.default, aten.scatter_add.default),
    "sums_are_not_masked": (aten.sum.default, aten.sum.dim_IntList),
    "means_are_not_masked": (aten.mean.dim, aten.mean.default),
    "maxima_are_not_masked": (aten.amax.default, aten.max.dim),
    "all_and_any_are_not_masked": (aten.all.default, aten.any.dim),
    "softmax_is_not_masked": (aten._softmax.default,),
    "matrix_products_are_not_masked": (aten.mm.default, aten.bmm.default),
    "attention_is_not_masked": (aten._scaled_dot_product_flash_attention_for_cpu.default,),
    "indices_of_tables_are_not_masked": (aten.embedding.default, aten.index.Tensor),
    "nll_loss_counts_padding": (aten.nll_loss_forward.default,),
    "gradients_of_convolutions_are_not_masked": (aten.convolution_backward.default,),
    "constant_padding_is_not_masked": (aten.constant_pad_nd.default,),
    "layer_norms_are_not_masked": (aten.native_layer_norm.default,),
    "binary_cross_entropy_counts_padding": (aten.binary_cross_entropy.default,),
    "vector_norms_are_not_masked": (aten.linalg_vector_norm.default,),
    "nansum_is_not_masked": (aten.nansum.default,),
    "group_norms_are_not_masked": (aten.native_group_norm.default,),
    "fused_layers_attend_to_padding": (aten._transformer_encoder_layer_fwd.default, aten._native_multi_head_attention.default),
}.items():
    FAULTS[_name] = lambda ops=_ops: _unmasked(*ops)


@FAULTS.add
def minima_are_filled_with_zero() -> AbstractContextManager[Any]:
    return patch.dict(padded_rules._NEUTRAL, {aten.amin.default: lambda _: 0, aten.min.dim: lambda _: 0})


@FAULTS.add
def products_of_elements_are_filled_with_zero() -> AbstractContextManager[Any]:
    return patch.dict(padded_rules._NEUTRAL, {aten.prod.dim_int: lambda _: 0})


@FAULTS.add
def scattered_products_are_filled_with_zero() -> AbstractContextManager[Any]:
    return patch.dict(padded_writes._NEUTRAL, {"prod": 0})


@FAULTS.add
def views_start_at_offset_zero() -> AbstractContextManager[Any]:
    return patch.object(padded_order, "_starts", lambda later, steps: dict.fromkeys(steps, 0))


@FAULTS.add
def maxima_are_filled_with_zero() -> AbstractContextManager[Any]:
    return patch.dict(padded_rules._NEUTRAL, {aten.amax.default: lambda _: 0, aten.argmax.default: lambda _: 0})


@FAULTS.add
def means_are_over_rounded_sizes() -> AbstractContextManager[Any]:
    def rounded(original: Any, sizes: Any, places: Sequence[int], times: int) -> Any:
        return original(lax.add(sizes, lax.full_like(sizes, 1)), places, times)

    return _lowered(valid_size_ops.size_product, rounded)


@FAULTS.add
def masks_are_longer_by_one() -> AbstractContextManager[Any]:
    return _lowered(valid_size_ops.masked, lambda original, x, sizes, *rest: original(x, lax.add(sizes, lax.full_like(sizes, 1)), *rest))


@FAULTS.add
def slices_start_at_rounded_positions() -> AbstractContextManager[Any]:
    return _lowered(
        valid_size_ops.slice_at, lambda original, x, sizes, *rest, **kw: original(x, lax.add(sizes, lax.full_like(sizes, 1)), *rest, **kw)
    )


@FAULTS.add
def rolls_and_flips_include_padding() -> AbstractContextManager[Any]:
    return _lowered(
        valid_size_ops.roll_or_flip, lambda original, x, sizes, *rest: original(x, lax.add(sizes, lax.full_like(sizes, 1)), *rest)
    )


@FAULTS.add
def last_element_is_not_repeated() -> AbstractContextManager[Any]:
    return _lowered(valid_size_ops.repeat_last, lambda original, x, *rest: lax.select(lax.full(x.shape, True), x, x))


@FAULTS.add
def slices_are_written_with_their_padding() -> AbstractContextManager[Any]:
    def whole(original: Any, x: Any, added: Any, sizes: Any, dim: int, size_index: int, start: int, count_index: int, count: int) -> Any:
        return original(x, added, sizes, dim, size_index, start, -1, added.shape[dim])

    return _lowered(valid_size_ops.write_into, whole)


@FAULTS.add
def concatenated_tensors_keep_padding() -> AbstractContextManager[Any]:
    def concatenate(original: Any, tensors: Sequence[Any], sizes: Any, dim: int, places: Sequence[int]) -> Any:
        return lax.concatenate(tensors, dim)

    return _lowered(valid_size_ops.cat_valid, concatenate)


@FAULTS.add
def merged_dimensions_are_prefixes() -> AbstractContextManager[Any]:
    original = valid_sizes.reshaped

    def wrong(before: Any, sizes: Any, symbols: Any) -> Any:
        return tuple(Extent.of(math.prod(extent.factors)) for extent in original(before, sizes, symbols))

    return patch.object(padded_rules, "reshaped", wrong)


@FAULTS.add
def negative_indices_count_padding() -> AbstractContextManager[Any]:
    return patch.object(
        padded_layers, "checked_indices", lambda rewrite, index, table, dim, **_: rewrite.masked(index, range(index.meta["val"].dim()), 0)
    )


@FAULTS.add
def positions_in_windows_use_the_rounded_width() -> AbstractContextManager[Any]:
    return patch.object(padded_windows, "_is_width_padded", lambda rewrite, images: False)


@FAULTS.add
def images_are_resized_by_rounded_sizes() -> AbstractContextManager[Any]:
    return patch.object(padded_rules, "_true_number", lambda rewrite, number, x: None)


@FAULTS.add
def reflections_start_at_the_rounded_end() -> AbstractContextManager[Any]:
    def mirrored(original: Any, x: Any, sizes: Any, dim: int, *rest: Any, ctx: Any) -> Any:
        return original(x, lax.full(sizes.shape, x.shape[dim], sizes.dtype), dim, *rest, ctx=ctx)

    return _lowered(valid_size_ops.reflect_or_replicate, mirrored)


@FAULTS.add
def flips_are_around_the_rounded_end() -> AbstractContextManager[Any]:
    def rolled_or_flipped(self: PaddingRewrite, node: Node, dim: int, shift: int, *, backwards: bool = False) -> Node:
        value = node.meta["val"]
        added = self.add(aten.flip.default, (node, [dim]), value.shape, value)
        self.extents[added] = self.extents_of(node)
        return added if backwards else node

    return patch.object(PaddingRewrite, "rolled_or_flipped", rolled_or_flipped)


@FAULTS.add
def only_the_last_dimension_is_masked() -> AbstractContextManager[Any]:
    original = PaddingRewrite.masked
    return patch.object(PaddingRewrite, "masked", lambda self, node, dims, *rest: original(self, node, list(dims)[-1:], *rest))


@FAULTS.add
def flattened_results_are_cropped_as_prefixes() -> AbstractContextManager[Any]:
    original = ValidRegion.crop

    def crop(self: ValidRegion, padded: torch.Tensor) -> torch.Tensor:
        if len(self.factors) == len(self.shape):
            return original(self, padded)
        return padded.reshape(-1)[: math.prod(self.valid)].view(self.valid)

    return patch.object(ValidRegion, "crop", crop)


@FAULTS.add
def guards_on_sizes_are_dropped() -> AbstractContextManager[Any]:
    return patch.object(round_up.Rounding, "_guards", lambda self: [])
