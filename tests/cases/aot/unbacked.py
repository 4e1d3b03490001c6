"""Sizes and numbers that depend on tensors' values: alone, in expressions, with known values, in training, and refused."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .table import case, t

Tensor = torch.Tensor
CAPTURE_VALUES = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


@case(lambda: (torch.tensor(20),), config=CAPTURE_VALUES)
def split_into_sizes(n: Tensor) -> tuple[Tensor, ...]:
    return tuple(piece * 2 for piece in torch.arange(n.item()).split([5, 5, 10]))


@case(lambda: (torch.tensor(7),), config=CAPTURE_VALUES)
@case(lambda: (torch.tensor(7),), "dynamic", config=CAPTURE_VALUES, dynamic=True)
def range_of_a_number(n: Tensor) -> Tensor:
    return torch.arange(n.item()) + 1


@case(lambda: (torch.tensor(4),), config=CAPTURE_VALUES)
def sizes_by_arithmetic(n: Tensor) -> tuple[Tensor, ...]:
    size = n.item()
    torch._check(size > 1)
    torch._check(size < 100)
    return torch.zeros(size * 2 + 1), torch.ones(size // 2, size), torch.full((size + 3,), size)


@case(lambda: (torch.tensor(4), t(4, 3)), config=CAPTURE_VALUES)
def number_known_to_be_a_size(n: Tensor, x: Tensor) -> Tensor:
    size = n.item()
    torch._check(size == x.shape[0])
    return torch.arange(size).unsqueeze(1) + x


@case(lambda: (torch.tensor(4 + torch.initial_seed()), t(4, 3)), config=CAPTURE_VALUES)
def number_that_fails_a_check(n: Tensor, x: Tensor) -> Tensor:
    size = n.item()
    torch._check(size == x.shape[0])
    return torch.arange(size).unsqueeze(1) + x


@case(lambda: (torch.tensor(6), torch.tensor(3)), config=CAPTURE_VALUES)
def one_number_twice_another(m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    larger, smaller = m.item(), n.item()
    torch._check(smaller > 0)
    torch._check(larger == 2 * smaller)
    return torch.zeros(larger).view(2, smaller) + 1, torch.arange(larger)


@case(lambda: (torch.tensor(2.5), t(3)), config=CAPTURE_VALUES)
def float_number(n: Tensor, x: Tensor) -> tuple[Tensor, float]:
    number = n.item()
    return x * number + number**2, number


@case(lambda: (torch.tensor(True), t(3)), config=CAPTURE_VALUES, fullgraph=False)
def bool_number(n: Tensor, x: Tensor) -> Tensor:
    return x * 2 if n.item() else x + 1


@case(lambda: (torch.tensor([2, 3]), t(5, 3)), config=CAPTURE_VALUES)
def list_of_numbers(n: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    sizes = n.tolist()
    for size in sizes:
        torch._check(size >= 0)
    return tuple(piece * 2 for piece in x.split(sizes))


@case(lambda: (t(8),), config=CAPTURE_VALUES)
@case(lambda: (t(8),), "dynamic", config=CAPTURE_VALUES, dynamic=True)
@case(lambda: (t(8, grad=True),), "requires grad", config=CAPTURE_VALUES)
def masked_elements(x: Tensor) -> Tensor:
    return x[x > 0] * 2


@case(lambda: (t(4, 4),), config=CAPTURE_VALUES)
def nonzero_indices(x: Tensor) -> tuple[Tensor, ...]:
    indices = (x > 0).nonzero()
    return indices, indices.sum(0), x[indices[:, 0], indices[:, 1]]


@case(lambda: (t(4, 3, grad=True),), config=CAPTURE_VALUES)
def nonzero_indices_in_training(x: Tensor) -> Tensor:
    rows = (x.sum(1) > 0).nonzero().squeeze(1)
    return x[rows].sin().sum(0) + x.mean(0)


@case(lambda: (torch.tensor([3, 1, 3, 2, 1]),), config=CAPTURE_VALUES)
def unique_values(x: Tensor) -> tuple[Tensor, ...]:
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return values * 2, inverse + 1, counts.sum()


@case(lambda: (torch.tensor([3, 1, 3, 3, 1]),), config=CAPTURE_VALUES)
def unique_consecutive_values(x: Tensor) -> Tensor:
    return torch.unique_consecutive(x) + 1


@case(lambda: (torch.tensor([3, 0, 2]), t(3, 2, grad=True)), config=CAPTURE_VALUES)
def repeated_rows(n: Tensor, x: Tensor) -> Tensor:
    return torch.repeat_interleave(x, n, dim=0).sin()


@case(lambda: (torch.tensor([3, 0, 2]), t(3, 2)), config=CAPTURE_VALUES)
def repeated_rows_of_known_size(n: Tensor, x: Tensor) -> Tensor:
    return torch.repeat_interleave(x, n, dim=0, output_size=5) * 2


@case(lambda: (t(6), torch.tensor(3)), config=CAPTURE_VALUES)
def slice_by_a_number(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    size = n.item()
    torch._check(size >= 0)
    torch._check(size <= x.shape[0])
    return x.narrow(0, 0, size) * 2, x[:3] + size


@case(lambda: (t(6, grad=True), torch.tensor(3)), config=CAPTURE_VALUES)
def slice_in_training(x: Tensor, n: Tensor) -> Tensor:
    size = n.item()
    torch._check(size >= 1)
    torch._check(size <= 6)
    return x.narrow(0, 0, size).sin() * size


@case(lambda: (t(6), torch.tensor(2)), config=CAPTURE_VALUES)
def element_by_a_number(x: Tensor, n: Tensor) -> Tensor:
    index = n.item()
    torch._check(index >= 0)
    torch._check(index < 6)
    return x.select(0, index) * 2


@case(lambda: (t(6), torch.tensor(2)), config=CAPTURE_VALUES)
def write_at_a_number(x: Tensor, n: Tensor) -> Tensor:
    index = n.item()
    torch._check(index >= 0)
    torch._check(index < 6)
    x[index] = 5.0
    return x.sum()


@case(lambda: (torch.tensor([1, 0, 3]),), config=CAPTURE_VALUES)
def counts_of_values(x: Tensor) -> Tensor:
    return torch.bincount(x) + 1


@case(lambda: (torch.tensor([1, 0, 3]),), config=CAPTURE_VALUES)
def one_hot(x: Tensor) -> Tensor:
    return F.one_hot(x, 4) * 2


@case(lambda: (torch.tensor(3), t(3)), config=CAPTURE_VALUES)
def number_and_written_input(n: Tensor, x: Tensor) -> Tensor:
    x.mul_(n.item())
    return x + 1


@case(lambda: (torch.tensor(3), t(4, grad=True)), config=CAPTURE_VALUES)
def number_in_a_gradient(n: Tensor, x: Tensor) -> Tensor:
    return (x * n.item()).sin()


@case(lambda: (torch.tensor(2.5), t(4, grad=True)), config=CAPTURE_VALUES)
def float_in_a_gradient(n: Tensor, x: Tensor) -> Tensor:
    return (x * n.item()).sin()


@case(lambda: (torch.tensor(3), torch.tensor(4)), config=CAPTURE_VALUES)
def returned_numbers(m: Tensor, n: Tensor) -> tuple[int, int, Tensor]:
    return m.item() + n.item(), m.item() * 2, torch.zeros(n.item())


@case(lambda: (t(3) + 5, torch.tensor(3)), config=CAPTURE_VALUES)
def size_from_a_computed_value(x: Tensor, n: Tensor) -> Tensor:
    size = (n + 1).item()
    torch._check(size >= 0)
    return torch.ones(size) * x.sum()


@case(lambda: (t(5, 3, grad=True), torch.tensor([True, False, True, True, False])), config=CAPTURE_VALUES)
def rows_by_mask_in_training(x: Tensor, mask: Tensor) -> Tensor:
    chosen = x[mask]
    return (chosen @ chosen.t()).sum() + x.sum()


@case(lambda: (t(5, grad=True),), config=CAPTURE_VALUES)
def masked_assignment(x: Tensor) -> Tensor:
    y = x * 1
    y[y > 0] = 2.0
    return y


@case(lambda: (t(4, 2), torch.tensor(8)), config=CAPTURE_VALUES)
def view_by_a_number(x: Tensor, n: Tensor) -> Tensor:
    size = n.item()
    torch._check(size == 8)
    return x.view(size) + 1


@case(lambda: (t(0),), config=CAPTURE_VALUES)
def nonzero_of_empty_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    indices = x.nonzero()
    return indices, indices.sum()
