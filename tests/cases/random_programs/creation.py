"""Steps that make new tensors, constant or random."""

from __future__ import annotations

from .builder import Builder, has_dims, is_float, is_number
from .program import Step
from .registry import draws, unary

unary("creation", "zeros_like", "torch.zeros_like($0)", lambda t: True)
unary("creation", "ones_like", "torch.ones_like($0, dtype=torch.float32)", lambda t: True)
unary("creation", "empty_like", "torch.empty_like($0).fill_(2)", is_number)
unary("creation", "new_zeros", "$0.new_zeros(2, 3)", lambda t: True)
unary("creation", "empty_strided", "torch.empty_strided((2, 3), (1, 2), dtype=$0.dtype).copy_($0.sum())", lambda t: is_number(t))
unary("creation", "arange_of_size", "torch.arange($0.shape[0])", has_dims)
unary("creation", "tensor", "torch.tensor([1, 2, 3])[: $0.dim()]", lambda t: True)


@draws("creation")
def full_like(b: Builder) -> Step:
    x = b.value()
    return Step("full_like", f"torch.full_like($0, {b.number_like(b.tensors[x])})", (x,))


@draws("creation")
def new_tensor(b: Builder) -> Step:
    code = b.pick(
        [
            "torch.arange(4)",
            "torch.arange(0, 3, 0.5)",
            "torch.eye(3)",
            "torch.ones(2, 3, dtype=torch.int16)",
            "torch.full((3,), 2.5, dtype=torch.float64)",
            "torch.linspace(0, 1, 5)",
            "torch.tensor(2.5)",
            "torch.tensor(3)",
            "torch.tensor([[True, False], [False, True]])",
            "torch.zeros(2, 0)",
            "torch.tril_indices(2, 3)",
        ]
    )
    return Step("new", code, ())


@draws("creation")
def scalar_tensor(b: Builder) -> Step:
    dtype = b.pick(["torch.float64", "torch.float32", "torch.int64", "torch.bool", "torch.bfloat16"])
    return Step("scalar_tensor", f"torch.tensor({b.pick(['1', '3', '0'])}, dtype={dtype})", ())


@draws("random")
def random_like(b: Builder) -> Step:
    name = b.pick(["rand_like", "randn_like"])
    return Step(name, f"torch.{name}($0)", (b.value(is_float),), random=True)


@draws("random")
def random_new(b: Builder) -> Step:
    code = b.pick(["torch.rand(2, 3)", "torch.randn(4)", "torch.randint(0, 5, (3,))", "torch.rand(3, 2, dtype=torch.float64).t()"])
    return Step("random", code, (), random=True)


@draws("random")
def dropout(b: Builder) -> Step:
    return Step("dropout", f"F.dropout($0, {b.pick(['0.5', '0.25'])})", (b.value(is_float),), random=True)


@draws("random")
def random_(b: Builder) -> Step:
    x = b.target(is_float)
    return Step("random_", f"$0.{b.pick(['uniform_()', 'normal_()', 'bernoulli_(0.5)'])}", (x,), 0, writes=True, random=True)
