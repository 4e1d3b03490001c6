"""Common training scripts give the same results on the device as on the CPU."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 7), nn.LayerNorm(7),
        nn.Linear(7, 4),
    ).double()  # fmt: skip


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 1, 4, 4, generator=generator, dtype=torch.float64), torch.randint(4, (6,), generator=generator))
        for _ in range(count)
    ]


def _compare_with_cpu(train: Callable[[str], Any]) -> Any:
    """Trains on the device and on the CPU, and checks that the results are the same."""
    on_device, on_cpu = train("jax"), train("cpu")
    torch.testing.assert_close(on_device, on_cpu, rtol=1e-8, atol=1e-10)
    return on_device


def _cpu(values: Any) -> Any:
    return [value.detach().cpu().clone() for value in values]


def check_schedules_clipping_averages_and_accumulation() -> None:
    def train(device: str) -> Any:
        model = _network().to(device)
        optimizer = torch.optim.Adam(
            [{"params": model[:5].parameters(), "weight_decay": 0.01}, {"params": model[5:].parameters(), "lr": 0.02}], lr=0.01
        )
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer, [warmup, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)], milestones=[2]
        )
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        losses, norms = [], []
        for index, (x, y) in enumerate(_batches(8)):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device, non_blocking=True), label_smoothing=0.1) / 2
            loss.backward()
            losses.append(loss.item())
            if index % 2:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True).item())
                optimizer.step()
                optimizer.zero_grad(set_to_none=index % 4 == 1)
                scheduler.step()
                average.update_parameters(model)
        model.eval()
        with torch.inference_mode():
            accuracy = sum((average(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in _batches(3))
        return [losses, norms, accuracy, scheduler.get_last_lr(), _cpu(average.parameters()), _cpu(model.buffers())]

    _compare_with_cpu(train)


def check_resuming_from_a_checkpoint() -> None:
    """Training that resumes from a checkpoint, on the device or on the CPU, gives the parameters of uninterrupted training."""

    def state(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}

    def parts(device: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = _network().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, amsgrad=True)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, batches: Any) -> None:
        device = next(model.parameters()).device
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            scheduler.step()

    batches = _batches(4)
    uninterrupted = parts("jax")
    steps(*uninterrupted, batches)
    with tempfile.TemporaryDirectory() as folder:
        first = parts("jax")
        steps(*first, batches[:2])
        file = Path(folder) / "checkpoint.pt"
        torch.save(state(*first), file)
        steps(*first, batches[2:])  # these steps do not change the file
        for device, map_location in (("jax", None), ("jax", "cpu"), ("cpu", "cpu"), ("cpu", None)):
            loaded = torch.load(file, map_location=map_location, weights_only=True)
            resumed = parts(device)
            for part, saved in zip(resumed, (loaded["model"], loaded["optimizer"], loaded["scheduler"]), strict=True):
                part.load_state_dict(saved)
            steps(*resumed, batches[2:])
            assert {parameter.device.type for parameter in resumed[0].parameters()} == {device}
            torch.testing.assert_close(_cpu(resumed[0].parameters()), _cpu(uninterrupted[0].parameters()), rtol=1e-8, atol=1e-10)
        assigned = _network().to("meta")
        assigned.load_state_dict(torch.load(file, map_location="jax")["model"], assign=True)
        assert {parameter.device.type for parameter in assigned.parameters()} == {"jax"}
        mapped = torch.load(file, map_location="cpu", mmap=True)["model"]
        torch.testing.assert_close(assigned.cpu().state_dict(), dict(mapped))
    file = io.BytesIO()
    torch.save(first[0], file)  # a whole module
    file.seek(0)
    torch.testing.assert_close(_cpu(torch.load(file, weights_only=False).parameters()), _cpu(first[0].parameters()))


class _Squares(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index * index


def check_loaders() -> None:
    """Batches of CPU tensors, in order and shuffled, and batches of tensors on the device."""
    for loader in (
        DataLoader(_Squares(), batch_size=4, drop_last=True, pin_memory=True),
        DataLoader(_Squares(), batch_size=4, drop_last=True, shuffle=True, generator=torch.Generator().manual_seed(0)),
    ):
        for x, y in loader:
            assert (x.to("jax").sum(1).square() / 9).tolist() == y.to("jax").tolist()
    data = TensorDataset(torch.arange(6.0).to("jax"), torch.arange(6).to("jax"))
    batches = [(x.device.type, x.tolist(), y.tolist()) for x, y in DataLoader(data, batch_size=3)]
    assert batches == [("jax", [0, 1, 2], [0, 1, 2]), ("jax", [3, 4, 5], [3, 4, 5])]


def check_lbfgs_with_a_closure() -> None:
    def train(device: str) -> Any:
        model = _network().to(device)
        (batch,) = _batches(1)
        x, y = (tensor.to(device) for tensor in batch)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(2)]

    _compare_with_cpu(train)


def check_checkpointed_layers_hooks_and_penalties() -> None:
    def train(device: str) -> Any:
        model = _network().to(device)
        model.requires_grad_(True)
        sums: list[float] = []
        model[5].weight.register_hook(lambda gradient: gradient * 2)
        model[6].register_full_backward_hook(
            lambda module, inputs_gradient, outputs_gradient: sums.append(outputs_gradient[0].sum().item())
        )
        model[7].register_forward_hook(lambda module, inputs, result: result * 1.5)
        x, y = (tensor.to(device) for tensor in _batches(1)[0])
        x.requires_grad_()
        hidden = checkpoint(model[:5], x, use_reentrant=False)
        loss = nn.functional.cross_entropy(model[5:](hidden), y)
        (input_gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + input_gradient.square().sum()).backward()
        return [sums, _cpu(parameter.grad for parameter in model.parameters()), _cpu([x.grad])]

    _compare_with_cpu(train)


def check_frozen_tied_and_reset_parameters() -> None:
    def train(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleDict({"embed": nn.Embedding(9, 4, padding_idx=0, max_norm=2.0), "body": nn.GRU(4, 4, batch_first=True)}).double()
        head = nn.Linear(4, 9, bias=False).double()
        head.weight = model["embed"].weight
        model["head"] = head
        model = model.to(device)
        assert model["head"].weight is model["embed"].weight
        model["body"].weight_hh_l0.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, nesterov=True)
        words = torch.tensor([[1, 2, 0], [3, 1, 4]], device=device)
        losses = []
        for step in range(3):
            hidden, _ = model["body"](model["embed"](words))
            loss = nn.functional.cross_entropy(model["head"](hidden).transpose(1, 2), words, ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step == 1:
                with torch.no_grad():
                    model["head"].weight.data[2].mul_(0.5)
                    nn.init.constant_(model["body"].bias_ih_l0, 0.1)
        return [losses, _cpu(model.parameters())]

    _compare_with_cpu(train)


def check_recurrent_layers() -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        x = torch.randn(2, 3, 4, dtype=torch.float64)
        layers = [
            nn.LSTM(4, 3, num_layers=2, bidirectional=True), nn.LSTM(4, 3, proj_size=2), nn.LSTM(4, 3, bias=False),
            nn.GRU(4, 3, bias=False, batch_first=True),
            nn.GRU(4, 3, 2), nn.RNN(4, 3, nonlinearity="relu"), nn.GRUCell(4, 3), nn.LSTMCell(4, 3), nn.RNNCell(4, 3),
        ]  # fmt: skip
        tensors = []
        for layer in layers:
            layer = layer.double().to(device)
            x_of_layer = (x[0] if isinstance(layer, nn.RNNCellBase) else x).to(device)
            results = pytree.tree_leaves(layer(x_of_layer))
            torch.stack([result.cos().sum() for result in results]).sum().backward()
            tensors += _cpu([*results, *(parameter.grad for parameter in layer.parameters())])
        packed = nn.utils.rnn.pack_padded_sequence(x.to(device), torch.tensor([3, 2]), batch_first=True)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(layers[3](packed)[0])
        return [*tensors, *_cpu([hidden])]

    _compare_with_cpu(run)


def check_modules_keep_their_parameters_when_they_move() -> None:
    """Tied weights stay tied. Optimizers, attributes, lists and gradients still belong to the same parameters."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model[0].weight.name_of_mine = "tied"
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.randn(4, 3)).cos().sum().backward()
    expected = copy.deepcopy(model)
    gradient = before[0].grad.clone()
    for device in ("jax", "cpu", "jax"):
        model.to(device)
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert model[2].weight is model[0].weight is before[0]
        assert [(p.device.type, type(p), p.requires_grad) for p in before] == [
            (device, nn.Parameter, p.requires_grad) for p in expected.parameters()
        ]
        assert before[0].name_of_mine == "tied"
        assert before[1].grad is None
        torch.testing.assert_close(before[0].grad.cpu(), gradient)
    optimizer.step()
    torch.testing.assert_close(model[2].weight.cpu(), expected[0].weight - 0.5 * gradient)
    assert model[2].weight.is_leaf
    assert model.half()[0].weight.dtype == torch.float16
    empty = nn.Linear(2, 2, device="meta").to_empty(device="jax")
    assert empty.weight.device.type == "jax"
    scripted, x = torch.jit.script(nn.Linear(2, 3)), torch.randn(4, 2)
    weight, expected_values = scripted.weight, scripted(x)
    for device in ("jax", "cpu"):
        assert scripted.to(device).weight is weight
        torch.testing.assert_close(scripted(x.to(device)).cpu(), expected_values)


def check_every_optimizer() -> None:
    """Two steps of each optimizer, with and without foreach. The state is on the device."""
    settings: dict[str, dict[str, Any]] = {
        "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adamax": {}, "ASGD": {}, "NAdam": {}, "RAdam": {},
        "RMSprop": {"centered": True, "momentum": 0.9}, "Rprop": {}, "SGD": {"momentum": 0.9, "dampening": 0.1},
    }  # fmt: skip

    def train(device: str, name: str, foreach: bool) -> Any:
        weights = [torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).to(device), torch.ones(4, dtype=torch.float64).to(device)]
        weights = [nn.Parameter(weight) for weight in weights]
        optimizer = getattr(torch.optim, name)(weights, lr=0.1, foreach=foreach, **settings[name])
        for step in range(2):
            for weight in weights:
                weight.grad = (weight.detach() + step).cos()
            optimizer.step()
        state_dict = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state_dict)
        slots = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        assert {value.device.type for value in slots} <= {device}
        return _cpu([*weights, *slots])

    for name in settings:
        for foreach in (False, True):
            _compare_with_cpu(lambda device, name=name, foreach=foreach: train(device, name, foreach))


def check_mixed_training_and_evaluation() -> None:
    """Dropout and batch norm between `train()` and `eval()`, and early stopping by a value."""
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 1)).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(0)
    x = torch.randn(32, 4, device="jax")
    y = x.sum(1, keepdim=True)

    def losses() -> Iterator[float]:
        while True:
            model.train()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(x), model(x))
                yield nn.functional.mse_loss(model(x), y).item()

    seen_losses = []
    for loss in losses():
        seen_losses.append(loss)
        if loss < 0.5 or len(seen_losses) == 60:
            break
    assert seen_losses[-1] < 0.5 < seen_losses[0]
    model.train()
    assert not torch.equal(model(x), model(x))


def check_exceptions_of_hooks_reach_the_caller() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("mine")

    for _ in range(3):
        x = torch.ones(2, device="jax", requires_grad=True)
        y = x * 2
        y.register_hook(fail)
        with pytest.raises(ValueError, match="mine"):
            y.sum().backward()
        (x * 3).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3, 3]
