"""Padding rules (see `padded_rules.py`) for variances and normalization layers.

Statistics over a rounded size are sums over the valid elements, divided by their true number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...torch_ops import aten, prims
from .masks import Masks
from .padded_rules import argument, become, become_several, others, reduced_dims, rule, static, value, without
from .valid_sizes import Extent, Extents, NoPaddingRule, broadcast, joined, replaced


@dataclass(frozen=True)
class _Wide:
    """Adds nodes that compute statistics over some dimensions, in the dtype in which sums are computed.

    Attributes:
        masks: the graph that is being rewritten.
        dims: the dimensions of the statistics. Results keep them with size 1.
        extents: the extents of the tensors.
        like: a fake tensor with the dtype and device of the new nodes.
    """

    masks: Masks
    dims: Sequence[int]
    extents: Extents
    like: torch.Tensor

    def convert(self, node: Node, dtype: torch.dtype | None = None) -> Node:
        dtype = dtype or self.like.dtype
        if value(node).dtype == dtype:
            return node
        found = self.masks.add(prims.convert_element_type.default, (node, dtype), value(node).shape, self.like, gives=dtype)
        self.masks.extents[found] = self.masks.of(node)
        return found

    def add(self, op: Any, *operands: Any) -> Node:
        shapes = [value(item).shape for item in operands if isinstance(item, Node)]
        found = self.masks.add(op, operands, max(shapes, key=_size), self.like)
        self.masks.extents[found] = max((self.masks.of(item) for item in operands), key=lambda extents: _told(self.masks, extents))
        return found

    def total(self, node: Node) -> Node:
        """Returns the sum of the valid elements over `dims`."""
        node = self.masks.masked(node, self.dims, 0, self.extents)
        shape = [1 if dim in self.dims else size for dim, size in enumerate(value(node).shape)]
        found = self.masks.add(aten.sum.dim_IntList, (node, [*self.dims], True), shape, self.like)
        self.masks.extents[found] = tuple(Extent(()) if dim in self.dims else own for dim, own in enumerate(self.extents))
        return found

    def count(self) -> Node:
        factors = [factor for dim in self.dims for factor in self.extents[dim].factors]
        return self.convert(self.masks.product(factors, self.like))

    def moments(self, x: Node) -> tuple[Node, Node, Node]:
        """Returns the mean, the sum of squared deviations, and the deviations of x from the mean."""
        mean = self.add(aten.div.Tensor, self.total(x), self.count())
        centered = self.add(aten.sub.Tensor, x, mean)
        return mean, self.total(self.add(aten.mul.Tensor, centered, centered)), centered

    def vector(self, node: Node) -> Node:
        """Returns a statistic without `dims`, which have size 1."""
        shape = [size for dim, size in enumerate(value(node).shape) if dim not in self.dims]
        found = self.masks.add(aten.squeeze.dims, (node, [*self.dims]), shape, self.like)
        self.masks.extents[found] = tuple(extent for dim, extent in enumerate(self.masks.of(node)) if dim not in self.dims)
        return found

    def along(self, vector: Node) -> Node:
        """Returns a vector of channels with trailing dimensions of size 1, so that it broadcasts along the channels."""
        found = self.convert(vector)
        for _ in range(len(self.extents) - 2):
            shape, extents = [*value(found).shape, 1], self.masks.of(found)
            found = self.masks.add(aten.unsqueeze.default, (found, len(shape) - 1), shape, self.like)
            self.masks.extents[found] = (*extents, Extent(()))
        return found


def _size(shape: Sequence[Any]) -> tuple[int, int]:
    """Returns a sort key under which the largest of several shapes is the one that the others broadcast to."""
    return len(shape), sum(not isinstance(size, int) or size != 1 for size in shape)


def _told(masks: Masks, extents: Extents) -> tuple[int, int]:
    return len(extents), sum(bool(extent.factors) for extent in extents)


def _wide(masks: Masks, dims: Sequence[int], extents: Extents, x: torch.Tensor) -> _Wide:
    """Returns the helper for statistics of x over `dims`. Raises: NoPaddingRule for complex numbers."""
    if x.is_complex():
        raise NoPaddingRule("it computes with complex numbers")
    dtype = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    return _Wide(masks, dims, tuple(extent.resolved for extent in extents), masks.fake((), dtype, x.device))


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction)
def _variance(masks: Masks, node: Node) -> Any:
    source = node.args[0]
    assert isinstance(source, Node)
    masks.exact(*others(node, "self"))
    extents = masks.of(source)
    dims = reduced_dims(node, len(extents))
    result = without(extents, dims, node)
    several = isinstance(node.meta["val"], (tuple, list))
    if not any(masks.is_padded(extents[dim]) for dim in dims):
        return [result, result] if several else result
    correction = argument(node, "correction")
    masks.fixed(correction)
    wide = _wide(masks, dims, extents, value(source))
    mean, squares, _ = wide.moments(wide.convert(source))
    left = wide.add(aten.clamp_min.default, wide.add(aten.sub.Tensor, wide.count(), 1 if correction is None else correction), 0)
    variance = wide.add(aten.div.Tensor, squares, left)
    if node.target is aten.std.correction:
        variance = wide.add(aten.sqrt.default, variance)
    found = [variance, mean]
    if not argument(node, "keepdim"):
        found = [wide.vector(item) for item in found]
    if several:
        become_several(node, [wide.convert(item, own.dtype) for item, own in zip(found, node.meta["val"], strict=True)])
        return [result, result]
    become(node, wide.convert(found[0], value(node).dtype))
    return result


# Norms over the last dimensions, with statistics for each row


def _rows(masks: Masks, tensor: Any, shape: Sequence[Any]) -> Extents:
    """Returns the extents of the dimensions that are not normalized. shape: the normalized shape."""
    extents = masks.of(tensor)
    return extents[: len(extents) - len(shape)]


def _is_whole(masks: Masks, tensor: Any, shape: Sequence[Any]) -> bool:
    """True if no normalized dimension has a rounded size."""
    return not any(map(masks.is_padded, masks.of(tensor)[len(masks.of(tensor)) - len(shape) :]))


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _norm_of_rows(masks: Masks, node: Node) -> list[Extents]:
    x, shape, *rest = node.args
    rows, extents = _rows(masks, x, shape), masks.of(x)
    masks.exact(*rest)
    statistics = (*rows, *(Extent(()) for _ in shape))
    if _is_whole(masks, x, shape):
        static(masks, rest)
    elif node.target is aten.native_layer_norm.default:
        extents = _norm_of_rounded_rows(masks, node, len(rows))
    else:
        raise NoPaddingRule("it normalizes over a padded dimension")
    return [extents, *(statistics for _ in node.meta["val"][1:])]


def _norm_of_rounded_rows(masks: Masks, node: Node, rows: int) -> Extents:
    """Replaces a layer norm over rounded sizes. rows: the number of dimensions that are not normalized. Returns: the result's extents."""
    x, _, weight, bias, eps = node.args
    assert isinstance(x, Node)
    extents = masks.of(x)
    wide = _wide(masks, range(rows, len(extents)), extents, value(x))
    mean, squares, centered = wide.moments(wide.convert(x))
    inverse = wide.add(aten.rsqrt.default, wide.add(aten.add.Tensor, wide.add(aten.div.Tensor, squares, wide.count()), eps))
    out = wide.add(aten.mul.Tensor, centered, inverse)
    for op, parameter in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if parameter is not None:
            extents = broadcast([extents, masks.of(parameter)])
            out = wide.add(op, out, wide.convert(parameter))
    become_several(node, [wide.convert(item, own.dtype) for item, own in zip((out, mean, inverse), node.meta["val"], strict=True)])
    return extents


@rule(aten.native_layer_norm_backward.default)
def _norm_of_rows_backward(masks: Masks, node: Node) -> list[Extents]:
    """Masks the rows, since the gradients of weight and bias are sums over them."""
    grad, x, shape, mean, inverse, weight, bias, _ = node.args
    tensors = [grad, x, mean, inverse]
    rows = broadcast([_rows(masks, tensor, shape) for tensor in tensors])
    if not all(_is_whole(masks, tensor, shape) for tensor in (grad, x)):
        return _norm_of_rounded_rows_backward(masks, node, rows)
    masks.exact(shape)
    static(masks, [weight, bias])
    for index, tensor in zip((0, 1, 3, 4), tensors, strict=True):
        by = (*rows, *masks.of(tensor)[len(rows) :])
        node.update_arg(index, masks.masked(tensor, range(len(rows)), 0, by))
    results = [masks.prefixes(item) if isinstance(item, torch.Tensor) else () for item in node.meta["val"]]
    return [(*rows, *masks.of(x)[len(rows) :]), *results[1:]]


def _norm_of_rounded_rows_backward(masks: Masks, node: Node, rows: Extents) -> list[Extents]:
    grad, x, _, mean, inverse, weight, _, _ = node.args
    assert isinstance(grad, Node)
    assert isinstance(x, Node)
    normalized = broadcast([masks.of(grad)[len(rows) :], masks.of(x)[len(rows) :], masks.of(weight)])
    extents = (*rows, *normalized)
    wide = _wide(masks, range(len(rows), len(extents)), extents, value(x))
    center, spread, slopes = (wide.convert(item) for item in (mean, inverse, grad))
    normal = wide.add(aten.mul.Tensor, wide.add(aten.sub.Tensor, wide.convert(x), center), spread)
    scaled = slopes if weight is None else wide.add(aten.mul.Tensor, slopes, wide.convert(weight))
    of_input = scaled
    for share in (wide.total(scaled), wide.add(aten.mul.Tensor, normal, wide.total(wide.add(aten.mul.Tensor, scaled, normal)))):
        of_input = wide.add(aten.sub.Tensor, of_input, wide.add(aten.div.Tensor, share, wide.count()))
    by_rows = _wide(masks, range(len(rows)), extents, value(x))
    found = [wide.add(aten.mul.Tensor, of_input, spread), wide.add(aten.mul.Tensor, slopes, normal), slopes]
    if rows:
        found[1:] = [by_rows.vector(by_rows.total(item)) for item in found[1:]]
    told = [wide.extents, *[wide.extents[len(rows) :]] * 2]
    results = node.meta["val"]
    asked = [isinstance(own, torch.Tensor) for own in results]
    become_several(
        node, [wide.convert(item, own.dtype) if is_asked else None for item, own, is_asked in zip(found, results, asked, strict=True)]
    )
    return [item if is_asked else () for item, is_asked in zip(told, asked, strict=True)]


# Norms over the batch: dimension 1 has the channels, all others are reduced


def _by_channels(masks: Masks, x: Extents, vectors: Sequence[Any]) -> Extents:
    """Returns the extents of x, with the channels' extent joined with those of vectors of channels. Raises: NoPaddingRule."""
    return replaced(x, 1, joined([x[1], *(masks.of(vector)[0] for vector in vectors if isinstance(vector, Node))]))


@rule(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_by_running(masks: Masks, node: Node) -> list[Extents]:
    """With running statistics, a batch norm is pointwise."""
    masks.exact(*node.args[5:])
    extents = _by_channels(masks, masks.of(node.args[0]), node.args[1:5])
    return [extents, *(masks.prefixes(item) for item in node.meta["val"][1:])]


@rule(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats)
def _batch_norm(masks: Masks, node: Node) -> list[Extents]:
    x, weight, bias = node.args[:3]
    assert isinstance(x, Node)
    training, momentum, eps = (argument(node, name) for name in ("training", "momentum", "eps"))
    statistics = list(node.args[3:5]) if len(node.args) == _WITH_STATISTICS else []
    masks.exact(training, momentum, eps)
    extents = _by_channels(masks, masks.of(x), [weight, bias, *statistics])
    if statistics and not training:
        raise NoPaddingRule("a batch norm returns its running statistics")
    wide = _wide(masks, [dim for dim in range(len(extents)) if dim != 1], extents, value(x))
    mean, squares, centered = wide.moments(wide.convert(x))
    inverse = wide.add(aten.rsqrt.default, wide.add(aten.add.Tensor, wide.add(aten.div.Tensor, squares, wide.count()), eps))
    out = wide.add(aten.mul.Tensor, centered, inverse)
    for op, parameter in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if parameter is not None:
            out = wide.add(op, out, wide.along(parameter))
    unbiased = wide.add(aten.div.Tensor, squares, wide.add(aten.sub.Tensor, wide.count(), 1))
    found = [out, wide.vector(mean), wide.vector(inverse)]
    for old, new in zip(statistics, (mean, unbiased), strict=False):
        kept = wide.add(aten.mul.Tensor, wide.convert(old), 1 - momentum)
        found.append(wide.add(aten.add.Tensor, kept, wide.add(aten.mul.Tensor, wide.vector(new), momentum)))
    become_several(node, [wide.convert(item, own.dtype) for item, own in zip(found, node.meta["val"], strict=True)])
    return [extents, *[(extents[1].resolved,)] * (len(found) - 1)]


_WITH_STATISTICS = 8  # number of arguments of the overload with running statistics


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(masks: Masks, node: Node) -> list[Extents]:
    grad, x, weight, mean, variance, saved_mean, saved_inverse, training, eps, _ = node.args
    assert isinstance(grad, Node)
    assert isinstance(x, Node)
    masks.exact(training, eps)
    vectors = [weight, *([saved_mean, saved_inverse] if training else [mean, variance])]
    extents = _by_channels(masks, broadcast([masks.of(grad), masks.of(x)]), vectors)
    dims = [dim for dim in range(len(extents)) if dim != 1]
    wide = _wide(masks, dims, extents, value(x))
    center, spread = (wide.along(item) for item in vectors[1:])
    inverse = spread if training else wide.add(aten.rsqrt.default, wide.add(aten.add.Tensor, spread, eps))
    normal = wide.add(aten.mul.Tensor, wide.add(aten.sub.Tensor, wide.convert(x), center), inverse)
    normal, slopes = (masks.masked(item, dims, 0, wide.extents) for item in (normal, wide.convert(grad)))
    of_bias, of_weight = wide.total(slopes), wide.total(wide.add(aten.mul.Tensor, slopes, normal))
    of_input = slopes
    if training:
        for share in (of_bias, wide.add(aten.mul.Tensor, normal, of_weight)):
            of_input = wide.add(aten.sub.Tensor, of_input, wide.add(aten.div.Tensor, share, wide.count()))
    factor = inverse if weight is None else wide.add(aten.mul.Tensor, inverse, wide.along(weight))
    found = [wide.add(aten.mul.Tensor, of_input, factor), wide.vector(of_weight), wide.vector(of_bias)]
    results = node.meta["val"]
    asked = [isinstance(own, torch.Tensor) for own in results]
    become_several(
        node, [wide.convert(item, own.dtype) if is_asked else None for item, own, is_asked in zip(found, results, asked, strict=True)]
    )
    told = [extents, *[(extents[1].resolved,)] * 2]
    return [item if is_asked else () for item, is_asked in zip(told, asked, strict=True)]


# Norms over groups of channels and all spatial positions, with statistics for each item of the batch


@dataclass(frozen=True)
class _ChannelGroups:
    """Adds nodes for a batch of images whose channels are split in two dimensions: groups, and channels within a group.

    Attributes:
        masks: the graph that is being rewritten.
        images: the images, with all channels in one dimension.
        extents: the extents of `images`.
        groups: the number of groups.
        wide: the helper for statistics of each group.
    """

    masks: Masks
    images: Node
    extents: Extents
    groups: int
    wide: _Wide

    @staticmethod
    def of(masks: Masks, images: Node, extents: Extents, groups: int) -> _ChannelGroups:
        x = value(images)
        each = x.shape[1] // groups
        grouped = (extents[0], Extent.of(groups), Extent.of(each), *extents[2:])
        return _ChannelGroups(masks, images, extents, groups, _wide(masks, range(2, len(grouped)), grouped, x))

    def apart(self, node: Node) -> Node:
        """Returns a tensor with a dimension for groups. node: a tensor like the images, or statistics of shape (batch, groups)."""
        shape = [*value(node).shape]
        sizes = [self.masks.number(node, dim) for dim in range(len(shape))]
        if len(shape) == len(self.extents):
            each = [self.groups, shape[1] // self.groups]
            shape[1:2], sizes[1:2], extents = each, each, self.wide.extents
        else:
            ones = [1] * (len(self.extents) - 1)
            shape, sizes = shape + ones, sizes + ones
            extents = (*self.wide.extents[:2], *[Extent(())] * len(ones))
        return self._view(node, sizes, shape, extents)

    def together(self, node: Node) -> Node:
        """Returns a tensor with all channels in one dimension again."""
        shape = value(self.images).shape
        return self._view(node, [self.masks.number(self.images, dim) for dim in range(len(shape))], shape, self.extents)

    def _view(self, node: Node, sizes: Sequence[Any], shape: Sequence[Any], extents: Extents) -> Node:
        found = self.masks.add(aten.view.default, (self.wide.convert(node), [*sizes]), shape, self.wide.like)
        self.masks.extents[found] = extents
        return found


def _group_arguments(masks: Masks, tensors: Sequence[Node], weights: Sequence[Any], channels: Any, groups: Any) -> Extents:
    """Checks the arguments of a group norm, and returns the extents of the first tensor, the images. Raises: NoPaddingRule."""
    masks.exact(channels, groups)
    static(masks, weights)
    for tensor in tensors:
        masks.unpadded(tensor, [1])
    whole = broadcast([masks.of(tensor) for tensor in tensors if len(masks.of(tensor)) == len(masks.of(tensors[0]))])
    return replaced(whole, 0, joined([masks.of(tensor)[0] for tensor in tensors]))


@rule(aten.native_group_norm.default)
def _group_norm(masks: Masks, node: Node) -> list[Extents]:
    x, weight, bias, _, channels, _, groups, eps = node.args
    extents = _group_arguments(masks, [x], [weight, bias], channels, groups)
    masks.exact(eps)
    statistics = (extents[0], Extent.of(groups))
    if any(map(masks.is_padded, extents[2:])):
        several = _ChannelGroups.of(masks, x, extents, groups)
        wide = several.wide
        mean, squares, centered = wide.moments(several.apart(x))
        inverse = wide.add(aten.rsqrt.default, wide.add(aten.add.Tensor, wide.add(aten.div.Tensor, squares, wide.count()), eps))
        out = several.together(wide.add(aten.mul.Tensor, centered, inverse))
        whole = _wide(masks, (), extents, value(x))
        for op, parameter in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
            if parameter is not None:
                out = whole.add(op, out, whole.along(parameter))
        found = [out, wide.vector(mean), wide.vector(inverse)]
        become_several(node, [wide.convert(item, own.dtype) for item, own in zip(found, node.meta["val"], strict=True)])
    return [extents, statistics, statistics]


@rule(aten.native_group_norm_backward.default)
def _group_norm_backward(masks: Masks, node: Node) -> list[Extents]:
    """Masks the operands, since the gradients of weight and bias are sums over the batch and all spatial positions."""
    grad, x, mean, inverse, weight, _, channels, _, groups, _ = node.args
    tensors = [x, grad, mean, inverse]
    extents = _group_arguments(masks, tensors, [weight], channels, groups)
    results = node.meta["val"]
    if any(map(masks.is_padded, extents[2:])):
        several, whole = _ChannelGroups.of(masks, x, extents, groups), _wide(masks, (), extents, value(x))
        wide = several.wide
        center, spread = several.apart(mean), several.apart(inverse)
        normal = wide.add(aten.mul.Tensor, wide.add(aten.sub.Tensor, several.apart(x), center), spread)
        scaled = whole.convert(grad)
        if weight is not None:
            scaled = whole.add(aten.mul.Tensor, scaled, whole.along(weight))
        slopes = several.apart(scaled)
        of_input = slopes
        for share in (wide.total(slopes), wide.add(aten.mul.Tensor, normal, wide.total(wide.add(aten.mul.Tensor, slopes, normal)))):
            of_input = wide.add(aten.sub.Tensor, of_input, wide.add(aten.div.Tensor, share, wide.count()))
        by_channels = _wide(masks, [dim for dim in range(len(extents)) if dim != 1], extents, value(x))
        wanted = by_channels.convert(grad)
        of_weight = by_channels.total(by_channels.add(aten.mul.Tensor, wanted, several.together(normal)))
        found = [
            several.together(wide.add(aten.mul.Tensor, of_input, spread)),
            by_channels.vector(of_weight),
            by_channels.vector(by_channels.total(wanted)),
        ]
        become_several(
            node,
            [wide.convert(item, own.dtype) if isinstance(own, torch.Tensor) else None for item, own in zip(found, results, strict=True)],
        )
    else:
        for index, tensor in zip((1, 0, 2, 3), tensors, strict=True):
            node.update_arg(index, masks.masked(tensor, [0], 0, replaced(masks.of(tensor), 0, extents[0])))
    told = [extents, *[(extents[1].resolved,)] * 2]
    return [item if isinstance(own, torch.Tensor) else () for item, own in zip(told, results, strict=True)]
