"""Padding rules (see `padded_rules.py`) for variances and normalization layers.

Statistics over a rounded size are sums over the valid elements, divided by their true number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...torch_ops import aten
from .padded_rules import (
    argument,
    arguments_except,
    converted,
    reduced_dims,
    reduced_extents,
    replace_by,
    replace_by_results,
    require_all_unpadded,
    rule,
    value,
)
from .padding_rewrite import PaddingRewrite
from .valid_sizes import Extent, Extents, NoPaddingRule, broadcast, common_extent, with_extent


@dataclass(frozen=True)
class _StatisticsBuilder:
    """Adds nodes that compute statistics of the valid elements of tensors.

    Attributes:
        rewrite: the graph that is being rewritten.
        dims: the dimensions over which statistics are computed. Statistics keep these dimensions with size 1.
        extents: the extents of the tensors.
        like: a fake tensor with the dtype and device of the new nodes. The dtype is the dtype in which sums are computed.
    """

    rewrite: PaddingRewrite
    dims: Sequence[int]
    extents: Extents
    like: torch.Tensor

    def convert(self, node: Node, dtype: torch.dtype | None = None) -> Node:
        """Returns a tensor converted to a dtype; None for the dtype of `like`."""
        return converted(self.rewrite, node, dtype or self.like.dtype)

    def replace_results(self, node: Node, results: Sequence[Node]) -> None:
        """Turns a node with several results into a tuple of other nodes, converted to the dtypes of its results."""
        returned = zip(results, node.meta["val"], strict=True)
        replace_by_results(node, [self.convert(item, own.dtype) if isinstance(own, torch.Tensor) else None for item, own in returned])

    def add(self, op: Any, *operands: Any) -> Node:
        """Adds a pointwise op on tensors and numbers. One of the tensors must have the shape of the result."""
        shapes = [value(item).shape for item in operands if isinstance(item, Node)]
        found = self.rewrite.add(op, operands, max(shapes, key=_rank_of_shape), self.like)
        self.rewrite.extents[found] = max(map(self.rewrite.extents_of, operands), key=_rank_of_extents)
        return found

    def total(self, node: Node) -> Node:
        """Returns the sum of the valid elements over `dims`."""
        node = self.rewrite.masked(node, self.dims, 0, self.extents)
        shape = [1 if dim in self.dims else size for dim, size in enumerate(value(node).shape)]
        found = self.rewrite.add(aten.sum.dim_IntList, (node, [*self.dims], True), shape, self.like)
        self.rewrite.extents[found] = tuple(Extent(()) if dim in self.dims else own for dim, own in enumerate(self.extents))
        return found

    def count(self) -> Node:
        """Returns the true number of elements over `dims`."""
        factors = [factor for dim in self.dims for factor in self.extents[dim].factors]
        return self.convert(self.rewrite.true_product(factors, self.like))

    def moments(self, x: Node) -> tuple[Node, Node, Node]:
        """Returns the mean, the sum of squared deviations, and the deviations of x from the mean."""
        mean = self.add(aten.div.Tensor, self.total(x), self.count())
        centered = self.add(aten.sub.Tensor, x, mean)
        return mean, self.total(self.add(aten.mul.Tensor, centered, centered)), centered

    def normalize(self, x: Node, eps: Any) -> tuple[Node, Node, Node, Node]:
        """Returns x normalized to mean 0 and variance 1; and x's mean, inverse standard deviation and sum of squared deviations."""
        mean, squares, centered = self.moments(x)
        inverse = self.add(aten.rsqrt.default, self.add(aten.add.Tensor, self.add(aten.div.Tensor, squares, self.count()), eps))
        return self.add(aten.mul.Tensor, centered, inverse), mean, inverse, squares

    def input_gradient(self, grad: Node, normalized_x: Node, inverse: Node) -> Node:
        """Returns the gradient of x in `normalize`, from the gradient of its result. The other arguments are the results of `normalize`."""
        for term in (self.total(grad), self.add(aten.mul.Tensor, normalized_x, self.total(self.add(aten.mul.Tensor, grad, normalized_x)))):
            grad = self.add(aten.sub.Tensor, grad, self.add(aten.div.Tensor, term, self.count()))
        return self.add(aten.mul.Tensor, grad, inverse)

    def without_dims(self, node: Node) -> Node:
        """Returns a statistic without `dims`, which have size 1."""
        shape = [size for dim, size in enumerate(value(node).shape) if dim not in self.dims]
        found = self.rewrite.add(aten.squeeze.dims, (node, [*self.dims]), shape, self.like)
        self.rewrite.extents[found] = tuple(extent for dim, extent in enumerate(self.rewrite.extents_of(node)) if dim not in self.dims)
        return found

    def channel_vector(self, vector: Node) -> Node:
        """Returns a vector of channels with trailing dimensions of size 1, so that it broadcasts along the channels."""
        found = self.convert(vector)
        for _ in range(len(self.extents) - 2):
            shape, extents = [*value(found).shape, 1], self.rewrite.extents_of(found)
            found = self.rewrite.add(aten.unsqueeze.default, (found, len(shape) - 1), shape, self.like)
            self.rewrite.extents[found] = (*extents, Extent(()))
        return found


def _rank_of_shape(shape: Sequence[Any]) -> tuple[int, int]:
    """Returns a sort key of shapes. Under this key, the largest of an op's operand shapes is the shape of the result."""
    return len(shape), sum(not isinstance(size, int) or size != 1 for size in shape)


def _rank_of_extents(extents: Extents) -> tuple[int, int]:
    """Returns the same sort key as `_rank_of_shape`, for extents."""
    return len(extents), sum(bool(extent.factors) for extent in extents)


def _returned(node: Node, extents: Sequence[Extents]) -> list[Extents]:
    """Returns the extents of a node's results, with () for each result that the node does not return."""
    return [found if isinstance(own, torch.Tensor) else () for found, own in zip(extents, node.meta["val"], strict=True)]


def _builder(rewrite: PaddingRewrite, dims: Sequence[int], extents: Extents, x: torch.Tensor) -> _StatisticsBuilder:
    """Returns the builder for statistics of x over `dims`. Raises: NoPaddingRule for complex numbers."""
    if x.is_complex():
        raise NoPaddingRule("it computes with complex numbers")
    dtype = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    return _StatisticsBuilder(rewrite, dims, tuple(extent.non_uniform for extent in extents), rewrite.fake((), dtype, x.device))


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction)
def _variance(rewrite: PaddingRewrite, node: Node) -> Any:
    source = node.args[0]
    assert isinstance(source, Node)
    rewrite.require_exact(*arguments_except(node, "self"))
    extents = rewrite.extents_of(source)
    dims = reduced_dims(node, len(extents))
    result = reduced_extents(extents, dims, node)
    several = isinstance(node.meta["val"], (tuple, list))
    if not any(rewrite.is_padded(extents[dim]) for dim in dims):
        return [result, result] if several else result
    correction = argument(node, "correction")
    rewrite.require_constant(correction)
    builder = _builder(rewrite, dims, extents, value(source))
    mean, squares, _ = builder.moments(builder.convert(source))
    degrees_of_freedom = builder.add(
        aten.clamp_min.default, builder.add(aten.sub.Tensor, builder.count(), 1 if correction is None else correction), 0
    )
    variance = builder.add(aten.div.Tensor, squares, degrees_of_freedom)
    if node.target is aten.std.correction:
        variance = builder.add(aten.sqrt.default, variance)
    found = [variance, mean]
    if not argument(node, "keepdim"):
        found = [builder.without_dims(item) for item in found]
    if several:
        builder.replace_results(node, found)
        return [result, result]
    replace_by(node, builder.convert(found[0], value(node).dtype))
    return result


# Norms over the last dimensions, with statistics for each row


def _rows(rewrite: PaddingRewrite, tensor: Any, shape: Sequence[Any]) -> Extents:
    """Returns the extents of the dimensions that are not normalized. shape: the normalized shape."""
    extents = rewrite.extents_of(tensor)
    return extents[: len(extents) - len(shape)]


def _is_whole(rewrite: PaddingRewrite, tensor: Any, shape: Sequence[Any]) -> bool:
    """True if no normalized dimension has a rounded size."""
    return not any(map(rewrite.is_padded, rewrite.extents_of(tensor)[len(rewrite.extents_of(tensor)) - len(shape) :]))


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _norm_of_rows(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    x, shape, *rest = node.args
    rows, extents = _rows(rewrite, x, shape), rewrite.extents_of(x)
    rewrite.require_exact(*rest)
    statistics = (*rows, *(Extent(()) for _ in shape))
    if _is_whole(rewrite, x, shape):
        require_all_unpadded(rewrite, rest)
    elif node.target is aten.native_layer_norm.default:
        extents = _norm_of_rounded_rows(rewrite, node, len(rows))
    else:
        raise NoPaddingRule("it normalizes over a padded dimension")
    return [extents, *(statistics for _ in node.meta["val"][1:])]


def _norm_of_rounded_rows(rewrite: PaddingRewrite, node: Node, rows: int) -> Extents:
    """Replaces a layer norm over rounded sizes. Returns the result's extents. rows: the number of dimensions that are not normalized."""
    x, _, weight, bias, eps = node.args
    assert isinstance(x, Node)
    extents = rewrite.extents_of(x)
    builder = _builder(rewrite, range(rows, len(extents)), extents, value(x))
    out, mean, inverse, _ = builder.normalize(builder.convert(x), eps)
    for op, parameter in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if parameter is not None:
            extents = broadcast([extents, rewrite.extents_of(parameter)])
            out = builder.add(op, out, builder.convert(parameter))
    builder.replace_results(node, (out, mean, inverse))
    return extents


@rule(aten.native_layer_norm_backward.default)
def _norm_of_rows_backward(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    """Masks the rows, since the gradients of weight and bias are sums over the rows."""
    grad, x, shape, mean, inverse, weight, bias, _ = node.args
    tensors = [grad, x, mean, inverse]
    rows = broadcast([_rows(rewrite, tensor, shape) for tensor in tensors])
    if not all(_is_whole(rewrite, tensor, shape) for tensor in (grad, x)):
        return _norm_of_rounded_rows_backward(rewrite, node, rows)
    rewrite.require_exact(shape)
    require_all_unpadded(rewrite, [weight, bias])
    for index, tensor in zip((0, 1, 3, 4), tensors, strict=True):
        operand_extents = (*rows, *rewrite.extents_of(tensor)[len(rows) :])
        node.update_arg(index, rewrite.masked(tensor, range(len(rows)), 0, operand_extents))
    results = [rewrite.prefixes(item) if isinstance(item, torch.Tensor) else () for item in node.meta["val"]]
    return [(*rows, *rewrite.extents_of(x)[len(rows) :]), *results[1:]]


def _norm_of_rounded_rows_backward(rewrite: PaddingRewrite, node: Node, rows: Extents) -> list[Extents]:
    grad, x, _, mean, inverse, weight, _, _ = node.args
    assert isinstance(grad, Node)
    assert isinstance(x, Node)
    normalized = broadcast([rewrite.extents_of(grad)[len(rows) :], rewrite.extents_of(x)[len(rows) :], rewrite.extents_of(weight)])
    extents = (*rows, *normalized)
    builder = _builder(rewrite, range(len(rows), len(extents)), extents, value(x))
    mean_x, inverse_std, grads = (builder.convert(item) for item in (mean, inverse, grad))
    normalized_x = builder.add(aten.mul.Tensor, builder.add(aten.sub.Tensor, builder.convert(x), mean_x), inverse_std)
    scaled = grads if weight is None else builder.add(aten.mul.Tensor, grads, builder.convert(weight))
    row_builder = _builder(rewrite, range(len(rows)), extents, value(x))
    found = [builder.input_gradient(scaled, normalized_x, inverse_std), builder.add(aten.mul.Tensor, grads, normalized_x), grads]
    if rows:
        found[1:] = [row_builder.without_dims(row_builder.total(item)) for item in found[1:]]
    result_extents = [builder.extents, *[builder.extents[len(rows) :]] * 2]
    builder.replace_results(node, found)
    return _returned(node, result_extents)


# Norms over the batch: dimension 1 has the channels, and all other dimensions are reduced


def _by_channels(rewrite: PaddingRewrite, x: Extents, vectors: Sequence[Any]) -> Extents:
    """Returns the extents of x, with the common extent of its channels and of vectors of channels. Raises: NoPaddingRule."""
    return with_extent(x, 1, common_extent([x[1], *(rewrite.extents_of(vector)[0] for vector in vectors if isinstance(vector, Node))]))


@rule(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_by_running(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    """A batch norm with running statistics is pointwise."""
    rewrite.require_exact(*node.args[5:])
    extents = _by_channels(rewrite, rewrite.extents_of(node.args[0]), node.args[1:5])
    return [extents, *(rewrite.prefixes(item) for item in node.meta["val"][1:])]


@rule(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats)
def _batch_norm(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    x, weight, bias = node.args[:3]
    assert isinstance(x, Node)
    training, momentum, eps = (argument(node, name) for name in ("training", "momentum", "eps"))
    statistics = list(node.args[3:5]) if len(node.args) == _WITH_STATISTICS else []
    rewrite.require_exact(training, momentum, eps)
    extents = _by_channels(rewrite, rewrite.extents_of(x), [weight, bias, *statistics])
    if statistics and not training:
        raise NoPaddingRule("it normalizes with running statistics, and also returns them")
    builder = _builder(rewrite, [dim for dim in range(len(extents)) if dim != 1], extents, value(x))
    out, mean, inverse, squares = builder.normalize(builder.convert(x), eps)
    for op, parameter in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if parameter is not None:
            out = builder.add(op, out, builder.channel_vector(parameter))
    unbiased = builder.add(aten.div.Tensor, squares, builder.add(aten.sub.Tensor, builder.count(), 1))
    found = [out, builder.without_dims(mean), builder.without_dims(inverse)]
    for old, new in zip(statistics, (mean, unbiased), strict=False):
        kept = builder.add(aten.mul.Tensor, builder.convert(old), 1 - momentum)
        found.append(builder.add(aten.add.Tensor, kept, builder.add(aten.mul.Tensor, builder.without_dims(new), momentum)))
    builder.replace_results(node, found)
    return [extents, *[(extents[1].non_uniform,)] * (len(found) - 1)]


_WITH_STATISTICS = 8  # number of arguments of the overload with running statistics


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    grad, x, weight, mean, variance, saved_mean, saved_inverse, training, eps, _ = node.args
    assert isinstance(grad, Node)
    assert isinstance(x, Node)
    rewrite.require_exact(training, eps)
    vectors = [weight, *([saved_mean, saved_inverse] if training else [mean, variance])]
    extents = _by_channels(rewrite, broadcast([rewrite.extents_of(grad), rewrite.extents_of(x)]), vectors)
    dims = [dim for dim in range(len(extents)) if dim != 1]
    builder = _builder(rewrite, dims, extents, value(x))
    mean_x, inverse_or_variance = (builder.channel_vector(item) for item in vectors[1:])
    inverse = inverse_or_variance if training else builder.add(aten.rsqrt.default, builder.add(aten.add.Tensor, inverse_or_variance, eps))
    normalized_x = builder.add(aten.mul.Tensor, builder.add(aten.sub.Tensor, builder.convert(x), mean_x), inverse)
    normalized_x, grads = (rewrite.masked(item, dims, 0, builder.extents) for item in (normalized_x, builder.convert(grad)))
    grad_bias, grad_weight = builder.total(grads), builder.total(builder.add(aten.mul.Tensor, grads, normalized_x))
    grad_x = grads
    if training:
        for term in (grad_bias, builder.add(aten.mul.Tensor, normalized_x, grad_weight)):
            grad_x = builder.add(aten.sub.Tensor, grad_x, builder.add(aten.div.Tensor, term, builder.count()))
    factor = inverse if weight is None else builder.add(aten.mul.Tensor, inverse, builder.channel_vector(weight))
    found = [builder.add(aten.mul.Tensor, grad_x, factor), builder.without_dims(grad_weight), builder.without_dims(grad_bias)]
    builder.replace_results(node, found)
    return _returned(node, [extents, *[(extents[1].non_uniform,)] * 2])


# Norms over groups of channels and all spatial positions, with statistics for each item of the batch


@dataclass(frozen=True)
class _ChannelGroups:
    """Adds nodes for a batch of images whose channels are split in two dimensions: groups, and channels within a group.

    Attributes:
        rewrite: the graph that is being rewritten.
        images: the images, with all channels in one dimension.
        extents: the extents of `images`.
        groups: the number of groups.
        builder: the builder for statistics of each group, over tensors of shape (batch, groups, channels of a group, ...).
    """

    rewrite: PaddingRewrite
    images: Node
    extents: Extents
    groups: int
    builder: _StatisticsBuilder

    @staticmethod
    def of(rewrite: PaddingRewrite, images: Node, extents: Extents, groups: int) -> _ChannelGroups:
        x = value(images)
        each = x.shape[1] // groups
        grouped = (extents[0], Extent.of(groups), Extent.of(each), *extents[2:])
        return _ChannelGroups(rewrite, images, extents, groups, _builder(rewrite, range(2, len(grouped)), grouped, x))

    def split(self, node: Node) -> Node:
        """Returns a tensor with a dimension of its own for groups.

        node: a tensor of the images' shape, or statistics of shape (batch, groups), which get trailing dimensions of size 1.
        """
        shape = [*value(node).shape]
        sizes = [self.rewrite.rounded_size(node, dim) for dim in range(len(shape))]
        if len(shape) == len(self.extents):
            each = [self.groups, shape[1] // self.groups]
            shape[1:2], sizes[1:2], extents = each, each, self.builder.extents
        else:
            ones = [1] * (len(self.extents) - 1)
            shape, sizes = shape + ones, sizes + ones
            extents = (*self.builder.extents[:2], *[Extent(())] * len(ones))
        return self._view(node, sizes, shape, extents)

    def merge(self, node: Node) -> Node:
        """Returns a tensor with all channels in one dimension again."""
        shape = value(self.images).shape
        return self._view(node, [self.rewrite.rounded_size(self.images, dim) for dim in range(len(shape))], shape, self.extents)

    def _view(self, node: Node, sizes: Sequence[Any], shape: Sequence[Any], extents: Extents) -> Node:
        found = self.rewrite.add(aten.view.default, (self.builder.convert(node), [*sizes]), shape, self.builder.like)
        self.rewrite.extents[found] = extents
        return found


def _group_arguments(rewrite: PaddingRewrite, tensors: Sequence[Node], weights: Sequence[Any], channels: Any, groups: Any) -> Extents:
    """Checks the arguments of a group norm, and returns the extents of the first tensor, the images. Raises: NoPaddingRule."""
    rewrite.require_exact(channels, groups)
    require_all_unpadded(rewrite, weights)
    for tensor in tensors:
        rewrite.require_unpadded(tensor, [1])
    whole = broadcast(
        [rewrite.extents_of(tensor) for tensor in tensors if len(rewrite.extents_of(tensor)) == len(rewrite.extents_of(tensors[0]))]
    )
    return with_extent(whole, 0, common_extent([rewrite.extents_of(tensor)[0] for tensor in tensors]))


@rule(aten.native_group_norm.default)
def _group_norm(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    x, weight, bias, _, channels, _, groups, eps = node.args
    extents = _group_arguments(rewrite, [x], [weight, bias], channels, groups)
    rewrite.require_exact(eps)
    statistics = (extents[0], Extent.of(groups))
    if any(map(rewrite.is_padded, extents[2:])):
        channel_groups = _ChannelGroups.of(rewrite, x, extents, groups)
        builder = channel_groups.builder
        out, mean, inverse, _ = builder.normalize(channel_groups.split(x), eps)
        out = channel_groups.merge(out)
        image_builder = _builder(rewrite, (), extents, value(x))
        for op, parameter in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
            if parameter is not None:
                out = image_builder.add(op, out, image_builder.channel_vector(parameter))
        found = [out, builder.without_dims(mean), builder.without_dims(inverse)]
        builder.replace_results(node, found)
    return [extents, statistics, statistics]


@rule(aten.native_group_norm_backward.default)
def _group_norm_backward(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    """Masks the operands, since the gradients of weight and bias are sums over the batch and all spatial positions."""
    grad, x, mean, inverse, weight, _, channels, _, groups, _ = node.args
    tensors = [x, grad, mean, inverse]
    extents = _group_arguments(rewrite, tensors, [weight], channels, groups)
    if any(map(rewrite.is_padded, extents[2:])):
        channel_groups, image_builder = _ChannelGroups.of(rewrite, x, extents, groups), _builder(rewrite, (), extents, value(x))
        builder = channel_groups.builder
        mean_x, inverse_std = channel_groups.split(mean), channel_groups.split(inverse)
        normalized_x = builder.add(aten.mul.Tensor, builder.add(aten.sub.Tensor, channel_groups.split(x), mean_x), inverse_std)
        scaled = image_builder.convert(grad)
        if weight is not None:
            scaled = image_builder.add(aten.mul.Tensor, scaled, image_builder.channel_vector(weight))
        grads = channel_groups.split(scaled)
        channel_builder = _builder(rewrite, [dim for dim in range(len(extents)) if dim != 1], extents, value(x))
        channel_grads = channel_builder.convert(grad)
        grad_weight = channel_builder.total(channel_builder.add(aten.mul.Tensor, channel_grads, channel_groups.merge(normalized_x)))
        found = [
            channel_groups.merge(builder.input_gradient(grads, normalized_x, inverse_std)),
            channel_builder.without_dims(grad_weight),
            channel_builder.without_dims(channel_builder.total(channel_grads)),
        ]
        builder.replace_results(node, found)
    else:
        for index, tensor in zip((1, 0, 2, 3), tensors, strict=True):
            node.update_arg(index, rewrite.masked(tensor, [0], 0, with_extent(rewrite.extents_of(tensor), 0, extents[0])))
    return _returned(node, [extents, *[(extents[1].non_uniform,)] * 2])
