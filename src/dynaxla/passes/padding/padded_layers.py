"""Padding rules (see `padded_rules.py`) for the layers of networks: matrix products, attention, embeddings and other reads, losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...lowering.dimensions import wrap
from ...torch_ops import aten
from .masks import Masks
from .padded_rules import argument, become, change, converted, one_dimension, others, rule, static, value
from .valid_sizes import Extent, Extents, NoPaddingRule, broadcast, joined, merged, replaced, size_of

# Products


def _multiply(masks: Masks, node: Node, first: int, second: int) -> Extents:
    """Masks the operands of a matrix product, and returns the result's extents. first, second: the positions of the operands.

    The padding of the contracted dimension must be zero in both operands, since NaN times zero is NaN.
    """
    left, right = node.args[first], node.args[second]
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    a, b = masks.of(left), masks.of(right)
    inner_of_b = -2 if len(b) > 1 else -1
    inner = joined([a[-1], b[inner_of_b]])
    node.update_arg(first, masks.masked(left, [len(a) - 1], 0, replaced(a, len(a) - 1, inner)))
    at = len(b) + inner_of_b
    node.update_arg(second, masks.masked(right, [at], 0, replaced(b, at, inner)))
    batch = broadcast([a[:-2], b[:-2]]) if len(a) > 2 else ()
    return (*batch, *a[-2:-1], *b[-1:]) if len(b) > 1 else a[:-1]


@rule(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def _product(masks: Masks, node: Node) -> Extents:
    return _multiply(masks, node, 0, 1)


@rule(aten.addmm.default, aten.baddbmm.default)
def _product_and_sum(masks: Masks, node: Node) -> Extents:
    masks.exact(*others(node, "self", "mat1", "mat2", "batch1", "batch2"))
    return broadcast([masks.of(node.args[0]), _multiply(masks, node, 1, 2)])


# Attention

_ROWS, _COLUMNS, _WIDTH = 2, 2, 3


def _attend(masks: Masks, node: Node, first: int) -> tuple[Extents, ...]:
    """Sets the padding of keys and values to zero, and hides it from all queries. first: the query's position.

    Returns: the extents of query, key and value, with the same extent for the batch. Rows and columns are not uniform any more, since equal
        rows may attend to different keys.
    """
    operands = node.args[first : first + 3]
    extents = [masks.of(operand) for operand in operands]
    for operand in operands:
        masks.unpadded(operand, [1, _WIDTH])
    masks.exact(argument(node, "scale"), argument(node, "dropout_p"))
    mask = argument(node, "attn_mask")
    mask_extents = masks.of(mask)
    batches = [item[0] for item in extents] + ([mask_extents[0]] if len(mask_extents) == 4 else [])
    batch = joined(batches)
    columns = joined([extents[1][_COLUMNS], extents[2][_COLUMNS], *mask_extents[-1:]])
    rows = joined([extents[0][_ROWS], *mask_extents[-2:-1]])
    if masks.is_padded(columns):
        for index in (1, 2):
            by = replaced(extents[index], _COLUMNS, columns)
            node.update_arg(first + index, masks.masked(operands[index], [_COLUMNS], 0, by))
        if mask is not None:
            hidden = False if value(mask).dtype == torch.bool else -math.inf
            last = len(mask_extents) - 1
            if not mask_extents[last].factors:
                raise NoPaddingRule("the attention mask is broadcast over keys")
            change(node, "attn_mask", masks.masked(mask, [last], hidden, replaced(mask_extents, last, columns)))
        elif not (argument(node, "is_causal") and rows == columns):
            change(node, "attn_mask", _new_mask(masks, node, operands[1], columns))
    wanted = (rows, columns, columns)
    return tuple((batch, item[1], own.resolved, item[_WIDTH]) for item, own in zip(extents, wanted, strict=True))


def _new_mask(masks: Masks, node: Node, key: Any, columns: Extent) -> Node:
    """Adds an attention mask that is zero for valid keys and -inf for padding."""
    like = value(key)
    shape = [1, 1, 1, masks.number(key, _COLUMNS)]
    zeros = masks.add(aten.full.default, (shape, 0.0), (1, 1, 1, like.shape[_COLUMNS]), like, dtype=like.dtype, device=like.device)
    one = Extent(())
    return masks.masked(zeros, [3], -math.inf, (one, one, one, columns))


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(masks: Masks, node: Node) -> list[Extents]:
    query, _, values = _attend(masks, node, 0)
    return [(*query[:_WIDTH], values[_WIDTH]), query[:_WIDTH]]


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(masks: Masks, node: Node) -> list[Extents]:
    """Masks the queries, too: the gradients of keys and values are sums over them, to which padding must add zero."""
    own = _attend(masks, node, 1)
    tensors = {index: node.args[index] for index in (0, 1, 4, 5)}  # grad, query, out, logsumexp
    rows = joined([masks.of(tensor)[_ROWS] for tensor in tensors.values()])
    for index, tensor in tensors.items():
        by = replaced(masks.of(tensor), _ROWS, rows)
        node.update_arg(index, masks.masked(tensor, [_ROWS], 0, by))
    mask = argument(node, "attn_mask")
    extents = masks.of(mask)
    if len(extents) > 1 and extents[-2].factors:
        at = len(extents) - 2
        change(node, "attn_mask", masks.masked(mask, [at], 0, replaced(extents, at, rows)))
    return [replaced(own[0], _ROWS, rows.resolved), *own[1:]]


# Values of the argument `mask_type` of torch's fused layers.
_PER_ROW_AND_COLUMN, _PER_BATCH_AND_COLUMN = 0, 1


def _attend_fused(masks: Masks, node: Node, inputs: Sequence[int]) -> tuple[Extent, Extent, Extent]:
    """Sets the padding of keys and values, of shape (batch, rows, width), to zero, and hides it from all queries.

    inputs: the positions of query, key and value.
    Returns: the extents of the batch, of the query's rows and of the key's rows.
    """
    mask, kind = argument(node, "mask"), argument(node, "mask_type")
    tensors = [node.args[index] for index in inputs]
    static(masks, [item for index, item in enumerate(node.args) if index not in inputs and item is not mask])
    masks.exact(*others(node, "mask"))
    for tensor in tensors:
        masks.unpadded(tensor, [2])
    extents, of_mask = [masks.of(tensor) for tensor in tensors], masks.of(mask)
    batch = joined([item[0] for item in extents] + ([of_mask[0]] if of_mask and kind != _PER_ROW_AND_COLUMN else []))
    columns = joined([item[1] for item in extents[-2:]] + [*of_mask[-1:]])
    rows = joined([extents[0][1], *(of_mask[-2:-1] if kind != _PER_BATCH_AND_COLUMN else [])])
    if masks.is_padded(columns):
        for index, tensor in zip(inputs, tensors, strict=True):
            if tensor in tensors[-2:]:
                node.update_arg(index, masks.masked(tensor, [1], 0, replaced(masks.of(tensor), 1, columns)))
        if mask is None:
            key = tensors[-1]
            like, shape = value(key), [masks.number(key, 0), masks.number(key, 1)]
            kinds = {"dtype": torch.bool, "device": like.device}
            mask = masks.add(aten.full.default, (shape, False), like.shape[:2], like, gives=torch.bool, **kinds)
            of_mask = (batch, columns)
            change(node, "mask_type", _PER_BATCH_AND_COLUMN)
        last = len(of_mask) - 1
        if not of_mask[last].factors:
            raise NoPaddingRule("the attention mask is broadcast over keys")
        change(node, "mask", masks.masked(mask, [last], True if value(mask).dtype == torch.bool else 1, replaced(of_mask, last, columns)))
    return batch, rows.resolved, columns.resolved


@rule(aten._transformer_encoder_layer_fwd.default)
def _encoder_layer(masks: Masks, node: Node) -> Extents:
    batch, rows, _ = _attend_fused(masks, node, [0])
    return (batch, rows, masks.of(node.args[0])[2])


@rule(aten._native_multi_head_attention.default)
def _native_attention(masks: Masks, node: Node) -> list[Extents]:
    """The second result, the attention weights, is an empty tensor if the caller does not request it."""
    batch, rows, columns = _attend_fused(masks, node, [0, 1, 2])
    weights = node.meta["val"][1]
    heads = [Extent.of(size_of(size)) for size in weights.shape[1:-2]]
    return [(batch, rows, masks.of(node.args[0])[2]), (batch, *heads, rows, columns) if weights.dim() > 2 else masks.prefixes(weights)]


# Tables and other reads by index


def index_of(masks: Masks, index: Node, table: Any, dim: int, *, from_end: bool, is_index: bool = True, held: bool = False) -> Node:
    """Returns valid indices of a table's dimension: zero in the padding, and checked against the true size.

    Args:
        index: the indices.
        table: the tensor that they read or write.
        dim: the table's dimension.
        from_end: True if negative indices count from the end.
        is_index: True if an index out of range raises IndexError, else RuntimeError.
        held: True if the padding of `index` already holds valid indices.

    Raises: NoPaddingRule.
    """
    size = value(table).shape[dim]
    if size == 0:
        raise NoPaddingRule("it indexes a tensor without elements")
    if not held:
        index = masks.masked(index, range(value(index).dim()), 0)
    extent = masks.of(table)[dim]
    if not masks.is_padded(extent):
        return index
    if extent.resolved != Extent.of(size_of(size)):
        raise NoPaddingRule("it indexes a flattened dimension")
    return masks.within(index, size_of(size), dim, from_end=from_end, is_index=is_index)


@rule(aten.embedding.default)
def _embedding(masks: Masks, node: Node) -> Extents:
    weight, index = node.args[:2]
    found = (*masks.of(index), masks.of(weight)[1])
    node.update_arg(1, index_of(masks, index, weight, 0, from_end=False))
    return found


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(masks: Masks, node: Node) -> Extents:
    """Padding adds zero gradients to the first row of the table."""
    grad, index, _, _, by_frequency = node.args
    if by_frequency:
        raise NoPaddingRule("scale_grad_by_freq is set")
    places = broadcast([masks.of(grad)[:-1], masks.of(index)])
    dims = range(len(places))
    node.update_arg(0, masks.masked(grad, dims, 0, (*places, masks.of(grad)[-1])))
    node.update_arg(1, masks.masked(index, dims, 0, places))
    return (Extent.of(size_of(value(node).shape[0])), masks.of(grad)[-1])


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _read(masks: Masks, node: Node) -> Extents:
    table, indices = node.args
    extents = masks.of(table)
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(value(index).dtype not in (torch.int32, torch.int64) for index in given.values()):
        raise NoPaddingRule("an index is a mask")
    shape = broadcast([masks.of(index) for index in given.values()])
    changed = [None if index is None else index_of(masks, index, table, dim, from_end=True) for dim, index in enumerate(indices)]
    node.update_arg(1, changed)
    dims = sorted(given)
    at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    rest = [extent for dim, extent in enumerate(extents) if dim not in given]
    return (*rest[:at], *shape, *rest[at:])


@rule(aten.index_select.default)
def _select_rows(masks: Masks, node: Node) -> Extents:
    table, dim, index = node.args
    extents = masks.of(table)
    if not extents or value(index).dim() != 1:
        raise NoPaddingRule("it indexes a tensor of rank 0")
    dim = wrap(dim, len(extents))
    found = replaced(extents, dim, masks.of(index)[0])
    node.update_arg(2, index_of(masks, index, table, dim, from_end=False, is_index=dim != 1))
    return found


@rule(aten.gather.default)
def _gather(masks: Masks, node: Node) -> Extents:
    """Reads one element for each index, at the index's own position in all other dimensions."""
    table, dim, index = node.args[:3]
    extents, found = masks.of(table), masks.of(index)
    if not extents or len(extents) != len(found):
        raise NoPaddingRule("it indexes a tensor of rank 0")
    dim = wrap(dim, len(extents))
    for d, (own, wanted) in enumerate(zip(extents, found, strict=True)):
        prefixes = [extent.resolved == Extent.of(size_of(value(item).shape[d])) for extent, item in ((own, table), (wanted, index))]
        if d != dim and own.resolved != wanted.resolved and not all(prefixes):
            raise NoPaddingRule("operands are padded along different sizes")
    node.update_arg(2, index_of(masks, index, table, dim, from_end=False, is_index=False))
    return tuple(extent.resolved for extent in found)


@rule(aten.one_hot.default)
def _one_hot(masks: Masks, node: Node) -> Extents:
    index = node.args[0]
    masks.exact(argument(node, "num_classes"))
    found = (*masks.of(index), Extent.of(size_of(value(node).shape[-1])))
    node.update_arg(0, masks.masked(index, range(len(found) - 1), 0))
    return found


# Losses


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _loss(masks: Masks, node: Node) -> list[Extents]:
    rows = _ignored(masks, node, 0, 1)
    return [rows if value_of(node, 0).dim() else (), ()]


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _loss_backward(masks: Masks, node: Node) -> Extents:
    rows = _ignored(masks, node, 1, 2)
    if value(node).dim() == 1:
        return masks.prefixes(value(node))
    return (rows[0], masks.of(node.args[1])[1], *rows[1:])


def value_of(node: Node, index: int) -> torch.Tensor:
    return node.meta["val"][index]


def _ignored(masks: Masks, node: Node, scores: int, target: int) -> Extents:
    """Sets the padding of the targets to `ignore_index`. scores, target: the positions of the operands. Returns: the targets' extents."""
    x, index = node.args[scores], node.args[target]
    extents, ignored = masks.of(x), argument(node, "ignore_index")
    classes = 0 if len(extents) == 1 else 1
    masks.exact(argument(node, "reduction"), ignored)
    static(masks, [argument(node, "weight")])
    rows = broadcast([masks.of(index), (extents[0], *extents[2:])]) if len(extents) > 1 else masks.of(index)
    grad = masks.of(node.args[0]) if scores else ()
    rows = broadcast([rows, grad]) if grad else rows
    index = masks.masked(index, range(len(rows)), ignored, rows)
    if masks.is_padded(extents[classes]):
        one_dimension(masks, x, [classes])
        index = masks.within(index, size_of(value(x).shape[classes]), classes, from_end=False, is_index=True, ignored=ignored)
    node.update_arg(target, index)
    return rows


_MEAN, _SUM = 1, 2  # values of the argument `reduction`


@rule(aten.binary_cross_entropy.default)
def _loss_of_chances(masks: Masks, node: Node) -> Extents:
    """Sets the padding of all operands to zero, where the loss is zero. A mean is a sum divided by the true number of elements."""
    weight, reduction = argument(node, "weight"), argument(node, "reduction")
    masks.exact(reduction)
    operands = [item for item in (*node.args[:2], weight) if isinstance(item, Node)]
    elements = broadcast([masks.of(item) for item in operands])
    for name, item in zip(("self", "target", "weight"), operands, strict=False):
        own = masks.of(item)
        change(node, name, masks.masked(item, range(len(own)), 0, elements[len(elements) - len(own) :]))
    if reduction not in (_MEAN, _SUM):
        return elements
    if reduction == _MEAN and any(map(masks.is_padded, elements)):
        like = value(node)
        wide = torch.float32 if like.dtype.itemsize < 4 else like.dtype
        given = [converted(masks, item, wide) if isinstance(item, Node) else None for item in (*node.args[:2], argument(node, "weight"))]
        total = masks.add(node.target, (*given, _SUM), (), like, gives=wide)
        count = masks.product([factor for extent in elements for factor in extent.factors], like)
        mean = masks.add(aten.div.Tensor, (total, converted(masks, count, wide)), (), like, gives=wide)
        become(node, converted(masks, mean, like.dtype))
    return ()


# Other ops that only move elements


@rule(aten.constant_pad_nd.default)
def _pad(masks: Masks, node: Node) -> Extents:
    """Fills a padded dimension with the op's own pad value from its true end on. A negative width only shortens the valid prefix."""
    source, widths = node.args[:2]
    assert isinstance(source, Node)
    extents = masks.of(source)
    masks.exact(*others(node, "self"))
    result = list(extents)
    for index, width in enumerate(widths):
        dim = len(extents) - 1 - index // 2
        if width == 0:
            continue
        if masks.is_padded(extents[dim]):
            size = size_of(value(source).shape[dim])
            if not isinstance(width, int) or extents[dim].resolved != Extent.of(size):
                raise NoPaddingRule("it pads or crops a flattened dimension")
            if width < 0:
                masks.place(size + width)  # recorded so that a call where it is not positive runs with exact sizes (engine/bucket.py)
            else:
                node.update_arg(0, masks.masked(node.args[0], [dim], argument(node, "value"), extents))
        result[dim] = Extent.of(size_of(value(node).shape[dim]))
    return tuple(result)


@rule(aten.repeat.default)
def _repeat(masks: Masks, node: Node) -> Extents:
    times = node.args[1]
    extents = masks.of(node.args[0])
    extents = (Extent(()),) * (len(times) - len(extents)) + extents
    found = []
    for count, extent in zip(times, extents, strict=True):
        number = size_of(count.meta["val"] if isinstance(count, Node) else count)
        if number == 0:
            raise NoPaddingRule("it repeats a tensor without elements")
        found.append(extent if number == 1 else Extent(merged((number, *extent.factors), masks.rounded)))
    return tuple(found)


@rule(aten.stack.default)
def _stack(masks: Masks, node: Node) -> Extents:
    tensors = node.args[0]
    dim = wrap(argument(node, "dim"), value(node).dim())
    found = broadcast([masks.of(item) for item in tensors])
    return (*found[:dim], Extent.of(len(tensors)), *found[dim:])
