"""Tests of exported models: saving, loading and calls, with and without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import dynaxla
from cases.processes.without_torch import compare_without_torch
from dynaxla.artifact.model import ExportedModel
from dynaxla.errors import ArtifactError

BATCH = Dim("batch")


class Tokens(nn.Module):
    """A module with int64 inputs and outputs, an embedding, and a bfloat16 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.narrow = nn.Linear(4, 3).bfloat16()

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self.table(ids)
        return {"large": ids.sum(1) + 2**40, "rows": rows, "half": self.narrow(rows.bfloat16())}


@pytest.fixture(scope="module")
def tokens() -> tuple[nn.Module, ExportedModel]:
    torch.manual_seed(0)
    module = Tokens().eval()
    shapes = ({0: BATCH, 1: Dim("length", max=8)},)
    return module, dynaxla.export(module, (torch.zeros(3, 5, dtype=torch.int64),), dynamic_shapes=shapes)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 10, shape)


def test_results_in_a_process_without_torch(tokens: tuple[nn.Module, ExportedModel], tmp_path: Path) -> None:
    module, exported = tokens
    compare_without_torch(tmp_path, {"tokens": (module, exported, [(ids(2, 5),), (ids(1, 8),), (ids(4, 1),)])})


def test_sums_that_xlas_default_options_compute_wrongly() -> None:
    """With jaxlib 0.10.2 and AVX-512, XLA's default options give a wrong result, so exported programs are compiled with other options."""

    class Scores(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (q * k.reshape(1, 1, 64, 8, 8)).sum(3)

    q, k = torch.randn(1, 2, 1, 8, 8), torch.randn(1, 64, 64)
    exported = dynaxla.export(Scores(), (q, k))
    torch.testing.assert_close(torch.from_numpy(np.array(exported.call(q.numpy(), k.numpy()))), Scores()(q, k))


def test_call_with_constants_inside_jit() -> None:
    """JAX refused it: a program inside another `jax.jit` has no options of its own, and constants are no tracers."""
    module, x = nn.Linear(4, 3), torch.randn(2, 4)
    exported = dynaxla.export(module, (x,))
    expected = module(x).detach().numpy()
    np.testing.assert_allclose(jax.jit(lambda: exported.call(x.numpy()))(), expected, rtol=1e-5, atol=1e-6)
    _, rows = jax.lax.scan(lambda carry, _: (carry, exported.call(x.numpy())), 0.0, np.ones(2))
    np.testing.assert_allclose(rows, [expected] * 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wide", [False, True])
def test_result_dtypes_do_not_depend_on_jax_enable_x64(tokens: tuple[nn.Module, ExportedModel], wide: bool) -> None:
    module, exported = tokens
    x = ids(2, 3)
    with jax.enable_x64(wide):
        arrays = [x.numpy(), jax.numpy.asarray(x.numpy()), x.numpy().astype(np.int32)]
        eager_calls = [exported.call(array) for array in arrays]
        jitted = jax.jit(exported.call)(x.numpy())
        assert jax.numpy.asarray(np.int64(1)).dtype == ("int64" if wide else "int32")
    for results in (*eager_calls, jitted):
        assert results["large"].dtype == np.int64
        assert results["half"].dtype == jax.numpy.bfloat16
        assert np.array_equal(np.asarray(results["large"]), module(x)["large"].numpy())


def test_models_loaded_from_bytes_and_directory_are_equal(tokens: tuple[nn.Module, ExportedModel], tmp_path: Path) -> None:
    module, exported = tokens
    exported.save(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["manifest.json", "program.mlirbc", "weights.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    x = ids(3, 2)
    for loaded in (dynaxla.load(tmp_path / "model"), dynaxla.load(exported.serialize())):
        assert loaded.manifest == exported.manifest
        assert np.array_equal(loaded.call(x.numpy())["rows"], module(x)["rows"].detach().numpy())
        assert loaded.mlir_text() == exported.mlir_text()
    assert "stablehlo" in exported.mlir_text()


def test_save_replaces_a_model_only_with_overwrite(tokens: tuple[nn.Module, ExportedModel], tmp_path: Path) -> None:
    _, exported = tokens
    exported.save(tmp_path / "model")
    with pytest.raises(ArtifactError, match=r"model is not empty(.|\n)*overwrite=True"):
        exported.save(tmp_path / "model")
    exported.save(tmp_path / "model", overwrite=True)
    dynaxla.load(tmp_path / "model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ArtifactError, match="neither empty nor an exported model"):
        exported.save(tmp_path / "other", overwrite=True)
    with pytest.raises(ArtifactError, match="file is not a directory"):
        exported.save(tmp_path / "other" / "file")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent.name != "model") == ["file", "model", "other"]


def test_failed_overwrite_keeps_the_old_model(
    tokens: tuple[nn.Module, ExportedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, exported = tokens
    exported.save(tmp_path / "model")
    rename, renamed = Path.rename, []

    def second_fails(path: Path, target: Path) -> Path:
        renamed.append(path)
        if len(renamed) == 2:
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(ArtifactError, match="Permission denied"):
        exported.save(tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    dynaxla.load(tmp_path / "model")


@pytest.mark.parametrize("overwrite", [False, True])
def test_save_into_an_empty_directory_keeps_the_directory(
    overwrite: bool, tokens: tuple[nn.Module, ExportedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory keeps its inode and permissions, as a mount point or a working directory must."""
    tmp_path.chmod(0o700)
    before = tmp_path.stat()
    monkeypatch.chdir(tmp_path)
    tokens[1].save(".", overwrite=overwrite)
    after = tmp_path.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "program.mlirbc", "weights.safetensors"]
    dynaxla.load(tmp_path)


def test_save_leaves_no_files_if_another_process_writes_to_the_directory(
    tokens: tuple[nn.Module, ExportedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def fsync_while_another_process_writes(file: int) -> None:
        (tmp_path / "other").touch()
        fsync(file)

    monkeypatch.setattr("os.fsync", fsync_while_another_process_writes)
    with pytest.raises(ArtifactError, match="another process writes to"):
        tokens[1].save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("last", ["program.mlirbc", "manifest.json"])
def test_save_leaves_no_files_if_a_rename_fails(
    last: str, tokens: tuple[nn.Module, ExportedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def rename_or_fail(path: Path, target: Path) -> Path:
        if path.name == last:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_or_fail)
    with pytest.raises(ArtifactError, match="Input/output error"):
        tokens[1].save(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model", ""], ids=["new", "empty"])
def test_save_leaves_no_files_if_the_disk_is_full(
    name: str, tokens: tuple[nn.Module, ExportedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ArtifactError, match="No space left"):
        tokens[1].save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def _truncate(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-7])


def _edit(**changes: Any) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        (folder / "manifest.json").write_text(json.dumps(manifest | changes))

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated manifest": (_truncate("manifest.json"), "the manifest is not JSON"),
    "truncated program": (_truncate("program.mlirbc"), "program.mlirbc has .* bytes, and the manifest says"),
    "truncated weights": (_truncate("weights.safetensors"), "weights.safetensors has .* bytes"),
    "missing weights": (lambda folder: (folder / "weights.safetensors").unlink(), "weights.safetensors: No such file"),
    "another format": (_edit(format="other"), "does not have the format"),
    "a later version": (_edit(version=2), "version 2 of its format, and this dynaxla reads version 1"),
    "changed shapes": (_edit(inputs=[]), "the manifest was changed"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_model_is_refused(damage: str, tokens: tuple[nn.Module, ExportedModel], tmp_path: Path) -> None:
    apply_damage, message = DAMAGE[damage]
    tokens[1].save(tmp_path / "model")
    apply_damage(tmp_path / "model")
    with pytest.raises(ArtifactError, match=message):
        dynaxla.load(tmp_path / "model")


def test_files_of_another_model_are_refused(tokens: tuple[nn.Module, ExportedModel], tmp_path: Path) -> None:
    tokens[1].save(tmp_path / "model")
    path = tmp_path / "model" / "weights.safetensors"
    path.write_bytes(bytes(reversed(path.read_bytes())))
    with pytest.raises(ArtifactError, match="its hash differs from the hash in the manifest"):
        dynaxla.load(tmp_path / "model")
    data = tokens[1].serialize()
    for damaged, message in ((data[:-1], r"bytes, and \d+ were passed"), (b"PK" + data, "not an exported model")):
        with pytest.raises(ArtifactError, match=message):
            dynaxla.load(damaged)


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "too many": ((np.zeros((2, 3), np.int64),) * 2, {}, "args has 2 items, and had 1 at export"),
    "by another name": ((), {"ids": np.zeros((2, 3), np.int64)}, "args has 0 items"),
    "rank": ((np.zeros(3, np.int64),), {}, r"ids: int64\[batch, length\] was passed with shape \[3\]"),
    "too long": ((np.zeros((2, 9), np.int64),), {}, "length is 9 in dimension 1 of ids, and the program supports 1 to 8"),
    "dtype": ((np.zeros((2, 3), np.float32),), {}, "was passed as float32"),
    "key": ((np.zeros((2, 3), np.int64),), {"key": 1}, "draws no random numbers"),
    "weights": ((np.zeros((2, 3), np.int64),), {"weights": {"other": 1}}, "takes no weights other"),
    "misshaped weight": ((np.zeros((2, 3), np.int64),), {"weights": {"narrow.bias": np.zeros(3)}}, "the weight narrow.bias"),
}


@pytest.mark.parametrize("call", CALLS)
def test_invalid_calls_are_refused(call: str, tokens: tuple[nn.Module, ExportedModel]) -> None:
    args, kwargs, message = CALLS[call]
    with pytest.raises(ArtifactError, match=message):
        tokens[1].call(*args, **kwargs)


def test_invalid_index_raises_as_in_eager_mode(tokens: tuple[nn.Module, ExportedModel]) -> None:
    with pytest.raises(IndexError, match="index out of range in self"):
        tokens[1].call(np.full((2, 3), 10))


def test_gradient_of_an_exported_model_is_refused(tokens: tuple[nn.Module, ExportedModel]) -> None:
    exported = dynaxla.export(nn.Linear(2, 1), (torch.zeros(1, 2),))
    with pytest.raises(ArtifactError, match="has no derivative"):
        jax.grad(lambda x: exported.call(x).sum())(np.zeros((1, 2), np.float32))


def test_call_with_other_weights(tokens: tuple[nn.Module, ExportedModel]) -> None:
    _, exported = tokens
    rows = exported.call(np.zeros((1, 1), np.int64), weights={"table.weight": np.ones((10, 4), np.float32)})["rows"]
    assert np.array_equal(rows, np.ones((1, 1, 4)))
    assert not np.array_equal(exported.call(np.zeros((1, 1), np.int64))["rows"], rows)
