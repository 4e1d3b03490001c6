"""Padding rules (see `padded_rules.py`) for matrix products, attention, embeddings and other reads by index, and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...lowering.dimensions import wrap
from ...torch_ops import aten
from .padded_rules import (
    argument,
    arguments_except,
    converted,
    replace_by,
    require_all_unpadded,
    require_single_prefix,
    rule,
    set_argument,
    value,
)
from .padding_rewrite import PaddingRewrite
from .valid_sizes import Extent, Extents, NoPaddingRule, broadcast, common_extent, merge_fixed_factors, size_of, with_extent

# Products


def _multiply(rewrite: PaddingRewrite, node: Node, first: int, second: int) -> Extents:
    """Masks the operands of a matrix product, and returns the result's extents. first, second: the positions of the operands.

    The padding of the contracted dimension must be zero in both operands, since NaN times zero is NaN.
    """
    left, right = node.args[first], node.args[second]
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    a, b = rewrite.extents_of(left), rewrite.extents_of(right)
    contracted_dim = -2 if len(b) > 1 else -1
    contracted = common_extent([a[-1], b[contracted_dim]])
    node.update_arg(first, rewrite.masked(left, [len(a) - 1], 0, with_extent(a, len(a) - 1, contracted)))
    at = len(b) + contracted_dim
    node.update_arg(second, rewrite.masked(right, [at], 0, with_extent(b, at, contracted)))
    batch = broadcast([a[:-2], b[:-2]]) if len(a) > 2 else ()
    return (*batch, *a[-2:-1], *b[-1:]) if len(b) > 1 else a[:-1]


@rule(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def _product(rewrite: PaddingRewrite, node: Node) -> Extents:
    return _multiply(rewrite, node, 0, 1)


@rule(aten.addmm.default, aten.baddbmm.default)
def _product_and_sum(rewrite: PaddingRewrite, node: Node) -> Extents:
    rewrite.require_exact(*arguments_except(node, "self", "mat1", "mat2", "batch1", "batch2"))
    return broadcast([rewrite.extents_of(node.args[0]), _multiply(rewrite, node, 1, 2)])


# Attention

# Dimensions of query, key and value. The query has the shape (batch, heads, rows, width), key and value (batch, heads, columns, width), and
# the scores (batch, heads, rows, columns).
_QUERY_DIM, _KEY_DIM, _WIDTH_DIM = 2, 2, 3


def _attend(rewrite: PaddingRewrite, node: Node, first: int) -> tuple[Extents, ...]:
    """Sets the padding of keys and values to zero, and masks the padding keys for all queries. first: the query's position.

    Returns: the extents of query, key and value, with the same extent for the batch. Rows and columns are not uniform, since equal rows may
        attend to different keys.
    """
    operands = node.args[first : first + 3]
    extents = [rewrite.extents_of(operand) for operand in operands]
    for operand in operands:
        rewrite.require_unpadded(operand, [1, _WIDTH_DIM])
    rewrite.require_exact(argument(node, "scale"), argument(node, "dropout_p"))
    mask = argument(node, "attn_mask")
    mask_extents = rewrite.extents_of(mask)
    batches = [item[0] for item in extents] + ([mask_extents[0]] if len(mask_extents) == 4 else [])
    batch = common_extent(batches)
    columns = common_extent([extents[1][_KEY_DIM], extents[2][_KEY_DIM], *mask_extents[-1:]])
    rows = common_extent([extents[0][_QUERY_DIM], *mask_extents[-2:-1]])
    if rewrite.is_padded(columns):
        for index in (1, 2):
            operand_extents = with_extent(extents[index], _KEY_DIM, columns)
            node.update_arg(first + index, rewrite.masked(operands[index], [_KEY_DIM], 0, operand_extents))
        if mask is not None:
            masked_value = False if value(mask).dtype == torch.bool else -math.inf
            last = len(mask_extents) - 1
            if not mask_extents[last].factors:
                raise NoPaddingRule("the attention mask is broadcast over keys")
            set_argument(node, "attn_mask", rewrite.masked(mask, [last], masked_value, with_extent(mask_extents, last, columns)))
        elif not (argument(node, "is_causal") and rows == columns):
            set_argument(node, "attn_mask", _new_mask(rewrite, node, operands[1], columns))
    sequences = (rows, columns, columns)
    return tuple((batch, item[1], own.non_uniform, item[_WIDTH_DIM]) for item, own in zip(extents, sequences, strict=True))


def _new_mask(rewrite: PaddingRewrite, node: Node, key: Any, columns: Extent) -> Node:
    """Adds an attention mask that is zero for valid keys and -inf for padding."""
    like = value(key)
    shape = [1, 1, 1, rewrite.rounded_size(key, _KEY_DIM)]
    zeros = rewrite.add(aten.full.default, (shape, 0.0), (1, 1, 1, like.shape[_KEY_DIM]), like, dtype=like.dtype, device=like.device)
    one = Extent(())
    return rewrite.masked(zeros, [3], -math.inf, (one, one, one, columns))


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    query, _, values = _attend(rewrite, node, 0)
    return [(*query[:_WIDTH_DIM], values[_WIDTH_DIM]), query[:_WIDTH_DIM]]


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    """Masks the queries, too: the gradients of keys and values are sums over the queries, to which padding must add zero."""
    own = _attend(rewrite, node, 1)
    tensors = {index: node.args[index] for index in (0, 1, 4, 5)}  # grad, query, out, logsumexp
    rows = common_extent([rewrite.extents_of(tensor)[_QUERY_DIM] for tensor in tensors.values()])
    for index, tensor in tensors.items():
        operand_extents = with_extent(rewrite.extents_of(tensor), _QUERY_DIM, rows)
        node.update_arg(index, rewrite.masked(tensor, [_QUERY_DIM], 0, operand_extents))
    mask = argument(node, "attn_mask")
    extents = rewrite.extents_of(mask)
    if len(extents) > 1 and extents[-2].factors:
        at = len(extents) - 2
        set_argument(node, "attn_mask", rewrite.masked(mask, [at], 0, with_extent(extents, at, rows)))
    return [with_extent(own[0], _QUERY_DIM, rows.non_uniform), *own[1:]]


# Values of the argument `mask_type` of torch's fused layers: the mask has the shape (rows, columns) or (batch, columns).
_PER_ROW_AND_COLUMN, _PER_BATCH_AND_COLUMN = 0, 1


def _attend_fused(rewrite: PaddingRewrite, node: Node, inputs: Sequence[int]) -> tuple[Extent, Extent, Extent]:
    """Sets the padding of keys and values, of shape (batch, rows, width), to zero, and masks the padding keys for all queries.

    inputs: the positions of query, key and value.
    Returns: the extents of the batch, of the query's rows and of the key's rows.
    """
    mask, mask_type = argument(node, "mask"), argument(node, "mask_type")
    tensors = [node.args[index] for index in inputs]
    require_all_unpadded(rewrite, [item for index, item in enumerate(node.args) if index not in inputs and item is not mask])
    rewrite.require_exact(*arguments_except(node, "mask"))
    for tensor in tensors:
        rewrite.require_unpadded(tensor, [2])
    extents, mask_extents = [rewrite.extents_of(tensor) for tensor in tensors], rewrite.extents_of(mask)
    batch = common_extent([item[0] for item in extents] + ([mask_extents[0]] if mask_extents and mask_type != _PER_ROW_AND_COLUMN else []))
    columns = common_extent([item[1] for item in extents[-2:]] + [*mask_extents[-1:]])
    rows = common_extent([extents[0][1], *(mask_extents[-2:-1] if mask_type != _PER_BATCH_AND_COLUMN else [])])
    if rewrite.is_padded(columns):
        for index, tensor in zip(inputs, tensors, strict=True):
            if tensor in tensors[-2:]:
                node.update_arg(index, rewrite.masked(tensor, [1], 0, with_extent(rewrite.extents_of(tensor), 1, columns)))
        if mask is None:
            key = tensors[-1]
            like, shape = value(key), [rewrite.rounded_size(key, 0), rewrite.rounded_size(key, 1)]
            options = {"dtype": torch.bool, "device": like.device}
            mask = rewrite.add(aten.full.default, (shape, False), like.shape[:2], like, result_dtype=torch.bool, **options)
            mask_extents = (batch, columns)
            set_argument(node, "mask_type", _PER_BATCH_AND_COLUMN)
        last = len(mask_extents) - 1
        if not mask_extents[last].factors:
            raise NoPaddingRule("the attention mask is broadcast over keys")
        set_argument(
            node,
            "mask",
            rewrite.masked(mask, [last], True if value(mask).dtype == torch.bool else 1, with_extent(mask_extents, last, columns)),
        )
    return batch, rows.non_uniform, columns.non_uniform


@rule(aten._transformer_encoder_layer_fwd.default)
def _encoder_layer(rewrite: PaddingRewrite, node: Node) -> Extents:
    batch, rows, _ = _attend_fused(rewrite, node, [0])
    return (batch, rows, rewrite.extents_of(node.args[0])[2])


@rule(aten._native_multi_head_attention.default)
def _native_attention(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    """The second result, the attention weights, is an empty tensor if the caller does not request it."""
    batch, rows, columns = _attend_fused(rewrite, node, [0, 1, 2])
    weights = node.meta["val"][1]
    heads = [Extent.of(size_of(size)) for size in weights.shape[1:-2]]
    return [
        (batch, rows, rewrite.extents_of(node.args[0])[2]),
        (batch, *heads, rows, columns) if weights.dim() > 2 else rewrite.prefixes(weights),
    ]


# Embeddings and other reads by index


def checked_indices(
    rewrite: PaddingRewrite, index: Node, table: Any, dim: int, *, from_end: bool, is_index: bool = True, is_padding_valid: bool = False
) -> Node:
    """Returns indices of a table's dimension with valid indices in the padding, and with a check against the dimension's true size.

    Args:
        index: the indices.
        table: the tensor that the indices read or write.
        dim: the table's dimension.
        from_end: True if negative indices count from the end.
        is_index: True if an index out of range raises IndexError, else RuntimeError.
        is_padding_valid: True if the padding of `index` already holds valid indices. Otherwise the padding is set to zero.

    Raises: NoPaddingRule.
    """
    size = value(table).shape[dim]
    if size == 0:
        raise NoPaddingRule("it indexes a tensor without elements")
    if not is_padding_valid:
        index = rewrite.masked(index, range(value(index).dim()), 0)
    extent = rewrite.extents_of(table)[dim]
    if not rewrite.is_padded(extent):
        return index
    if extent.non_uniform != Extent.of(size_of(size)):
        raise NoPaddingRule("it indexes a flattened dimension")
    return rewrite.checked_index(index, size_of(size), dim, from_end=from_end, is_index=is_index)


@rule(aten.embedding.default)
def _embedding(rewrite: PaddingRewrite, node: Node) -> Extents:
    weight, index = node.args[:2]
    found = (*rewrite.extents_of(index), rewrite.extents_of(weight)[1])
    node.update_arg(1, checked_indices(rewrite, index, weight, 0, from_end=False))
    return found


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Padding adds zero gradients to the first row of the table."""
    grad, index, _, _, by_frequency = node.args
    if by_frequency:
        raise NoPaddingRule("scale_grad_by_freq is set")
    index_extents = broadcast([rewrite.extents_of(grad)[:-1], rewrite.extents_of(index)])
    dims = range(len(index_extents))
    node.update_arg(0, rewrite.masked(grad, dims, 0, (*index_extents, rewrite.extents_of(grad)[-1])))
    node.update_arg(1, rewrite.masked(index, dims, 0, index_extents))
    return (Extent.of(size_of(value(node).shape[0])), rewrite.extents_of(grad)[-1])


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(rewrite: PaddingRewrite, node: Node) -> Extents:
    table, indices = node.args
    extents = rewrite.extents_of(table)
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(value(index).dtype not in (torch.int32, torch.int64) for index in given.values()):
        raise NoPaddingRule("an index is neither int32 nor int64")
    shape = broadcast([rewrite.extents_of(index) for index in given.values()])
    valid_indices = [
        None if index is None else checked_indices(rewrite, index, table, dim, from_end=True) for dim, index in enumerate(indices)
    ]
    node.update_arg(1, valid_indices)
    dims = sorted(given)
    at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    rest = [extent for dim, extent in enumerate(extents) if dim not in given]
    return (*rest[:at], *shape, *rest[at:])


@rule(aten.index_select.default)
def _index_select(rewrite: PaddingRewrite, node: Node) -> Extents:
    table, dim, index = node.args
    extents = rewrite.extents_of(table)
    if not extents or value(index).dim() != 1:
        raise NoPaddingRule("the indexed tensor or the index has an unsupported rank")
    dim = wrap(dim, len(extents))
    found = with_extent(extents, dim, rewrite.extents_of(index)[0])
    node.update_arg(2, checked_indices(rewrite, index, table, dim, from_end=False, is_index=dim != 1))
    return found


@rule(aten.gather.default)
def _gather(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Reads one element for each index, at the index's own position in all other dimensions."""
    table, dim, index = node.args[:3]
    extents, index_extents = rewrite.extents_of(table), rewrite.extents_of(index)
    if not extents or len(extents) != len(index_extents):
        raise NoPaddingRule("the indexed tensor or the index has an unsupported rank")
    dim = wrap(dim, len(extents))
    for d, (table_extent, index_extent) in enumerate(zip(extents, index_extents, strict=True)):
        prefixes = [
            extent.non_uniform == Extent.of(size_of(value(item).shape[d]))
            for extent, item in ((table_extent, table), (index_extent, index))
        ]
        if d != dim and table_extent.non_uniform != index_extent.non_uniform and not all(prefixes):
            raise NoPaddingRule("operands are padded along different sizes")
    node.update_arg(2, checked_indices(rewrite, index, table, dim, from_end=False, is_index=False))
    return tuple(extent.non_uniform for extent in index_extents)


@rule(aten.one_hot.default)
def _one_hot(rewrite: PaddingRewrite, node: Node) -> Extents:
    index = node.args[0]
    rewrite.require_exact(argument(node, "num_classes"))
    found = (*rewrite.extents_of(index), Extent.of(size_of(value(node).shape[-1])))
    node.update_arg(0, rewrite.masked(index, range(len(found) - 1), 0))
    return found


# Losses


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _loss(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    rows = _mask_targets(rewrite, node, 0, 1)
    return [rows if value_of(node, 0).dim() else (), ()]


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _loss_backward(rewrite: PaddingRewrite, node: Node) -> Extents:
    rows = _mask_targets(rewrite, node, 1, 2)
    if value(node).dim() == 1:
        return rewrite.prefixes(value(node))
    return (rows[0], rewrite.extents_of(node.args[1])[1], *rows[1:])


def value_of(node: Node, index: int) -> torch.Tensor:
    """Returns the fake tensor of one of a node's several results."""
    return node.meta["val"][index]


def _mask_targets(rewrite: PaddingRewrite, node: Node, scores: int, target: int) -> Extents:
    """Sets the padding of the targets to `ignore_index`. scores, target: the positions of the operands. Returns: the targets' extents."""
    x, index = node.args[scores], node.args[target]
    extents, ignored = rewrite.extents_of(x), argument(node, "ignore_index")
    classes = 0 if len(extents) == 1 else 1
    rewrite.require_exact(argument(node, "reduction"), ignored)
    require_all_unpadded(rewrite, [argument(node, "weight")])
    rows = broadcast([rewrite.extents_of(index), (extents[0], *extents[2:])]) if len(extents) > 1 else rewrite.extents_of(index)
    grad = rewrite.extents_of(node.args[0]) if scores else ()
    rows = broadcast([rows, grad]) if grad else rows
    index = rewrite.masked(index, range(len(rows)), ignored, rows)
    if rewrite.is_padded(extents[classes]):
        require_single_prefix(rewrite, x, [classes])
        index = rewrite.checked_index(index, size_of(value(x).shape[classes]), classes, from_end=False, is_index=True, ignored=ignored)
    node.update_arg(target, index)
    return rows


_MEAN, _SUM = 1, 2  # values of the argument `reduction`


@rule(aten.binary_cross_entropy.default)
def _binary_cross_entropy(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Sets the padding of all operands to zero, where the loss is zero. A mean is a sum divided by the true number of elements."""
    weight, reduction = argument(node, "weight"), argument(node, "reduction")
    rewrite.require_exact(reduction)
    operands = [item for item in (*node.args[:2], weight) if isinstance(item, Node)]
    elements = broadcast([rewrite.extents_of(item) for item in operands])
    for name, item in zip(("self", "target", "weight"), operands, strict=False):
        own = rewrite.extents_of(item)
        set_argument(node, name, rewrite.masked(item, range(len(own)), 0, elements[len(elements) - len(own) :]))
    if reduction not in (_MEAN, _SUM):
        return elements
    if reduction == _MEAN and any(map(rewrite.is_padded, elements)):
        like = value(node)
        compute_dtype = torch.float32 if like.dtype.itemsize < 4 else like.dtype
        given = [
            converted(rewrite, item, compute_dtype) if isinstance(item, Node) else None
            for item in (*node.args[:2], argument(node, "weight"))
        ]
        total = rewrite.add(node.target, (*given, _SUM), (), like, result_dtype=compute_dtype)
        count = rewrite.true_product([factor for extent in elements for factor in extent.factors], like)
        mean = rewrite.add(aten.div.Tensor, (total, converted(rewrite, count, compute_dtype)), (), like, result_dtype=compute_dtype)
        replace_by(node, converted(rewrite, mean, like.dtype))
    return ()


# Other ops that only move elements


@rule(aten.constant_pad_nd.default)
def _pad(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Fills the positions after a dimension's true end with the op's own pad value. A negative width only shortens the valid prefix."""
    source, widths = node.args[:2]
    assert isinstance(source, Node)
    extents = rewrite.extents_of(source)
    rewrite.require_exact(*arguments_except(node, "self"))
    result = list(extents)
    for index, width in enumerate(widths):
        dim = len(extents) - 1 - index // 2
        if width == 0:
            continue
        if rewrite.is_padded(extents[dim]):
            size = size_of(value(source).shape[dim])
            if not isinstance(width, int) or extents[dim].non_uniform != Extent.of(size):
                raise NoPaddingRule("it pads or crops a flattened dimension")
            if width < 0:
                # Recorded so that a call in which this true size is not positive runs with exact sizes (engine/bucket.py).
                rewrite.true_size_index(size + width)
            else:
                node.update_arg(0, rewrite.masked(node.args[0], [dim], argument(node, "value"), extents))
        result[dim] = Extent.of(size_of(value(node).shape[dim]))
    return tuple(result)


@rule(aten.repeat.default)
def _repeat(rewrite: PaddingRewrite, node: Node) -> Extents:
    times = node.args[1]
    extents = rewrite.extents_of(node.args[0])
    extents = (Extent(()),) * (len(times) - len(extents)) + extents
    found = []
    for count, extent in zip(times, extents, strict=True):
        number = size_of(count.meta["val"] if isinstance(count, Node) else count)
        if number == 0:
            raise NoPaddingRule("it repeats a tensor without elements")
        found.append(extent if number == 1 else Extent(merge_fixed_factors((number, *extent.factors), rewrite.rounded)))
    return tuple(found)


@rule(aten.stack.default)
def _stack(rewrite: PaddingRewrite, node: Node) -> Extents:
    tensors = node.args[0]
    dim = wrap(argument(node, "dim"), value(node).dim())
    found = broadcast([rewrite.extents_of(item) for item in tensors])
    return (*found[:dim], Extent.of(len(tensors)), *found[dim:])
