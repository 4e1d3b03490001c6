"""Tests of interop/export.py: PyTorch models as StableHLO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import dynaxla
from cases.processes.without_torch import compare_without_torch
from dynaxla.bench.suites import Bert, import_package, torchvision_model
from dynaxla.errors import CaptureError, LoweringError, OptionError, UnsupportedOp
from support import internals
from support.releases import IS_OLDEST


class Attention(nn.Module):
    """A small transformer with sizes in its arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.qkv, self.norm, self.head = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        x = self.table(ids) + self.positions(torch.arange(length, device=ids.device))
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, 8)
        return self.head(x[:, -3:])


def test_dynamic_sizes_stay_open(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Attention().eval()
    shapes = ({0: Dim("batch"), 1: Dim("length", min=4, max=16)},)
    exported = dynaxla.export(module, (torch.zeros(2, 7, dtype=torch.int64),), dynamic_shapes=shapes)
    assert exported.manifest.dimensions == {"batch": (1, None), "length": (4, 16)}
    assert exported.platforms == ("cpu", "cuda", "tpu")
    calls = [(torch.randint(0, 20, shape),) for shape in ((2, 7), (1, 4), (4, 16))]
    compare_without_torch(tmp_path, {"attention": (module, exported, calls)})


def test_two_names_of_one_tensor_are_one_weight() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    exported = dynaxla.export(module, (torch.ones(1, 4),), platforms=["cpu"])
    assert sorted(spec.name for spec in exported.manifest.weights) == ["0.bias", "0.weight", "1.bias"]
    torch.testing.assert_close(torch.from_numpy(np.array(exported.call(np.ones((1, 4), np.float32)))), module(torch.ones(1, 4)).detach())


def test_checks_of_linear_algebra_raise() -> None:
    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x)

    exported = dynaxla.export(Inverse(), (torch.eye(2),), platforms=["cpu"])
    np.testing.assert_allclose(exported.call(np.float32([[2, 1], [0, 4]])), [[0.5, -0.125], [0, 0.25]])
    with pytest.raises(RuntimeError, match="the input matrix is singular"):
        exported.call(np.zeros((2, 2), np.float32))


def test_weights_may_be_constants_of_the_program() -> None:
    module = nn.Linear(2, 3)
    exported = dynaxla.export(module, (torch.ones(1, 2),), platforms=["tpu", "cpu"], weights="constants")
    assert not exported.manifest.weights
    assert not exported.weights
    found = dynaxla.load(exported.serialize()).call(np.ones((1, 2), np.float32))
    torch.testing.assert_close(torch.from_numpy(np.array(found)), module(torch.ones(1, 2)).detach())


def test_new_values_of_buffers_are_results() -> None:
    torch.manual_seed(0)
    module = nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    exported = dynaxla.export(module, (x,), platforms=["cpu"])
    result, updates = exported.call(x.numpy())
    expected = module(x)
    torch.testing.assert_close(torch.from_numpy(np.array(result)), expected.detach())
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(torch.from_numpy(np.array(updates[name])), buffer)
    again = exported.call(x.numpy(), weights=updates)[1]
    assert int(again["num_batches_tracked"]) == 2
    with pytest.raises(OptionError, match="writes to its buffers"):
        dynaxla.export(module, (x,), weights="constants")


def test_random_numbers_need_a_key() -> None:
    exported = dynaxla.export(nn.Dropout(0.5), (torch.ones(1000),), platforms=["cpu"])
    ones = np.ones(1000, np.float32)
    with pytest.raises(dynaxla.errors.ArtifactError, match="draws random numbers"):
        exported.call(ones)
    first, same, other = (np.asarray(exported.call(ones, key=jax.random.key(seed))) for seed in (0, 0, 1))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)
    assert set(np.unique(first)) == {0, 2}
    assert 400 < np.count_nonzero(first) < 600


def test_nested_and_named_arguments() -> None:
    def function(pair: tuple[torch.Tensor, dict[str, torch.Tensor]], scale: float, *, more: torch.Tensor) -> dict[str, Any]:
        return {"sum": pair[0] + pair[1]["b"] * scale, "rest": [more, None, 3]}

    x = torch.ones(2)
    exported = dynaxla.export(function, ((x, {"b": x}), 2.0), {"more": x}, platforms=["cpu"])
    array = np.ones(2, np.float32)
    found = exported.call((array, {"b": array}), 2.0, more=5 * array)
    assert found["sum"].tolist() == [3, 3]
    assert [found["rest"][0].tolist(), *found["rest"][1:]] == [[5, 5], None, 3]
    with pytest.raises(dynaxla.errors.ArtifactError, match=r"args\[1\] is 3.0, and was 2.0 at export"):
        exported.call((array, {"b": array}), 3.0, more=array)


def test_exported_program_of_torch() -> None:
    module = nn.Linear(2, 2)
    captured = torch.export.export(module, (torch.ones(3, 2),), dynamic_shapes=({0: Dim("n")},))
    exported = dynaxla.export(captured, platforms=["cpu"])
    assert exported.call(np.ones((5, 2), np.float32)).shape == (5, 2)
    assert list(exported.manifest.dimensions) == ["input_0"]
    with pytest.raises(OptionError, match="together with an ExportedProgram"):
        dynaxla.export(captured, (torch.ones(3, 2),))


def sizes_in_arithmetic(x: torch.Tensor) -> dict[str, torch.Tensor]:
    batch, length = x.shape
    return {
        "quotient": x / length,
        "of half precision": x.bfloat16() / length,
        "of a size": length / x,
        "floor": x.long() // length,
        "remainder": x.long() % length,
        "difference": batch - x,
        **({} if IS_OLDEST else {"power": x.abs() ** batch}),  # torch 2.11 specializes the exponent two
        "root": x / length**0.5,
        "reciprocal": torch.full((batch, 2), 1.0 / length),
        "smaller": x + min(batch, length),
        "of integers": torch.arange(length) / length,
        "mask": torch.arange(length) < batch,
        "comparison": x > length,
        "filled": x.masked_fill(x < 0, length),
        "clamped": x.clamp(max=length - 2),
        "mean": x.mean(1),
        "mean of all": x.mean(),
        "variance": x.var(1),
        "argmax": x.argmax(1),
        "largest": x.reshape(-1)[x.argmax().reshape(1)],
        "sorted": x.sort(1).values,
        "normalized": F.normalize(x, dim=1),
        "larger": F.interpolate(x[:, None], scale_factor=2),
    }


def test_sizes_are_operands() -> None:
    exported = dynaxla.export(
        sizes_in_arithmetic, (torch.randn(5, 7),), dynamic_shapes=({0: Dim("batch"), 1: Dim("length")},), platforms=["cpu"]
    )
    torch.manual_seed(0)
    for shape in ((5, 7), (7, 4), (1, 3)):
        x = 3 * torch.randn(shape)
        found = exported.call(x.numpy())
        for name, expected in sizes_in_arithmetic(x).items():
            array = found[name]
            assert array.dtype.name == str(expected.dtype).removeprefix("torch."), name
            half = expected.dtype == torch.bfloat16
            actual = torch.from_numpy(np.array(array.astype("float32") if half else array))
            torch.testing.assert_close(actual, expected.float() if half else expected, msg=lambda text, name=name: f"{name}: {text}")


def test_names_of_dimensions_differ() -> None:
    """The name that is made for a dimension of x is not that of the user's dimension of y."""
    exported = dynaxla.export(lambda x, y: (x * 2, y + 1), (SQUARE, SQUARE), dynamic_shapes=({0: Dim.DYNAMIC}, {0: Dim("x_0")}))
    x, y = torch.ones(3, SQUARE.shape[1]), torch.ones(5, SQUARE.shape[1])
    assert [array.shape for array in exported.call(x.numpy(), y.numpy())] == [x.shape, y.shape]


def test_keyword_arguments_that_are_no_dict_are_refused() -> None:
    with pytest.raises(OptionError, match=r"(?s)kwargs='folder' is not a dict.*\.save\(directory\)"):
        dynaxla.export(lambda x: x, (SQUARE,), "folder")  # type: ignore[arg-type]


def test_unrelated_error_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("unrelated")

    internals.replace_lowering(monkeypatch, torch.ops.aten.div.Tensor, broken)
    with pytest.raises(LoweringError, match="unrelated"):
        dynaxla.export(lambda x: x / 2, (SQUARE,), dynamic_shapes=({0: Dim("batch")},))


def branches(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def selects(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def writes(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def multiplies(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(3, 3)


def decomposes(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eig(x)[0]  # only torch's kernel has it


def prints(x: torch.Tensor) -> torch.Tensor:
    torch.ops.aten._print("here")
    return x + 1


def takes_largest(x: torch.Tensor) -> torch.Tensor:
    return x.topk(2, 1).values


SQUARE = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("function", "dynamic", "error", "message"),
    [
        (branches, None, CaptureError, "data-dependent"),
        (selects, None, CaptureError, "depends on the values of a tensor"),
        (writes, None, CaptureError, "writes to its user input"),
        (multiplies, ({1: Dim("width")},), CaptureError, "width"),
        (decomposes, None, UnsupportedOp, r"(?s)no lowering for aten.linalg_eig.*from: .*test_export.py:\d+, in "),
        (prints, None, CaptureError, r"(?s)aten._print.* has side effects"),
        (takes_largest, ({1: Dim("width")},), CaptureError, r"(?s)needs the sizes of its operands as numbers.*give the dimension limits"),
    ],
)
def test_unsupported_functions_are_refused(function: Any, dynamic: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dynaxla.export(function, (SQUARE,), dynamic_shapes=dynamic)


def test_writes_that_would_be_lost_are_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.unfold(0, 1, 2).mul_(0)  # elements between the windows would become zero, too
        return y

    with pytest.raises(CaptureError, match=r"cannot be exported: it writes with aten\.mul_\.Tensor to a view that aten\.unfold made"):
        dynaxla.export(function, (torch.ones(5),))


def test_ops_without_tpu_support_are_refused() -> None:
    """The ops are refused in branches, too: XLA's compiler would end the process that loads the model."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.linalg.svd(x).U.contiguous(), lambda x: x + 1, (x,))

    for function in (lambda x: torch.linalg.pinv(x), inner):
        with pytest.raises(UnsupportedOp, match=r"cannot compile it for the platform 'tpu'(?s:.*)choose other platforms than 'tpu'"):
            dynaxla.export(function, (torch.eye(3),))
        assert dynaxla.export(function, (torch.eye(3),), platforms=["cpu"]).manifest.platforms == ("cpu",)


def test_wrong_settings_are_refused() -> None:
    for settings in ({"platforms": ["gpu"]}, {"platforms": "cpu"}, {"platforms": []}, {"weights": "files"}):
        with pytest.raises(OptionError):
            dynaxla.export(nn.Linear(2, 2), (torch.ones(1, 2),), **settings)
    with pytest.raises(OptionError, match="a int cannot be exported"):
        dynaxla.export(3)


@pytest.mark.slow
def test_models_without_torch(tmp_path: Path) -> None:
    """resnet18, BERT and GPT-2, each in three sizes."""
    torch.manual_seed(0)
    transformers = import_package("transformers")
    sizes = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    gpt = _Logits(transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes))).eval()
    bert = Bert(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64).eval()
    resnet = torchvision_model("resnet18").eval()
    batch = Dim("batch")
    tokens = [(torch.randint(0, 100, shape),) for shape in ((2, 7), (3, 12), (1, 5))]
    images = [(torch.randn(count, 3, 64, 64),) for count in (2, 1, 3)]
    cases = {
        "resnet18": (resnet, ({0: batch},), images),
        "bert": (bert, ({0: batch, 1: Dim("length", max=512)},), tokens),
        "gpt": (gpt, ({0: batch, 1: Dim("length", max=64)},), tokens),
    }
    models = {
        name: (module, dynaxla.export(module, calls[0], dynamic_shapes=shapes), calls) for name, (module, shapes, calls) in cases.items()
    }
    compare_without_torch(tmp_path, models)


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).logits
