"""Tests of a training script of torch_xla with the changes of docs/torch-xla.md: on eight devices, it trains as in eager mode."""

from __future__ import annotations

import re

import torch

from dynaxla.bench.suites import import_package
from support.paths import ROOT
from support.processes.device_checks import NEEDS_DEVICE
from support.processes.scripts import completed

pytestmark = NEEDS_DEVICE

# A script in the style of torch_xla's user guide for SPMD.
SCRIPT = """
import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from transformers import GPT2Config, GPT2LMHeadModel

xr.use_spmd()
count = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(count), (count // 2, 2), ("fsdp", "tp"))
torch.manual_seed(0)
settings = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 32}
model = GPT2LMHeadModel(GPT2Config(**settings, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).to(torch_xla.device())
for name, parameter in model.named_parameters():
    if name.endswith(("c_attn.weight", "c_fc.weight")):
        xs.mark_sharding(parameter, mesh, ("fsdp", "tp"))
    elif name.endswith(("c_proj.weight", "wte.weight")):
        xs.mark_sharding(parameter, mesh, ("tp", "fsdp"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
tokens = torch.randint(0, 512, (16, 32), generator=generator).to(torch_xla.device())
xs.mark_sharding(tokens, mesh, ("fsdp", None))
for _ in range(4):
    with torch_xla.step():
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
"""
# The replacements that the page names, by torch_xla's code.
CHANGES = {
    "import torch_xla\n": "import dynaxla\n\ndynaxla.device.enable()\n",
    "import torch_xla.distributed.spmd as xs\n": "",
    "import torch_xla.runtime as xr\n": "",
    "xr.use_spmd()\n": "",
    "xr.global_runtime_device_count()": "torch.jax.device_count()",
    "xs.Mesh(np.arange(count), (": "dynaxla.sharding.Mesh((",
    "torch_xla.device()": 'torch.device("jax")',
    "xs.mark_sharding(": "dynaxla.sharding.mark_sharding(",
    "torch_xla.step()": "dynaxla.device.lazy()",
}


def test_page_names_all_changes() -> None:
    page = (ROOT / "docs" / "torch-xla.md").read_text()
    for old, new in CHANGES.items():
        for code in (old, new):
            for name in re.findall(r"\b(?:xs|xr|torch_xla|dynaxla|torch\.jax)\.[\w.]+|torch\.device\(\"jax\"\)", code):
                assert name in page or name.startswith("torch_xla."), name
    assert not re.search(r"torch_xla|\bx[sr]\.", _changed())


def test_changed_script_gives_the_losses_of_eager_mode() -> None:
    # The wheel of torchvision, which transformers imports, may be for another build of torch.
    script = f"from dynaxla.bench.suites import import_package\nimport_package('transformers')\n{_changed()}"
    process = completed(script, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert process.returncode == 0, process.stderr[-3000:]
    losses = [float(line.split()[1]) for line in process.stdout.splitlines() if line.startswith("loss ")]
    torch.testing.assert_close(losses, _losses_of_eager_mode(), rtol=1e-4, atol=1e-4)
    assert losses[-1] < losses[0]


def _changed() -> str:
    script = SCRIPT
    for old, new in CHANGES.items():
        assert old in script
        script = script.replace(old, new)
    return script


def _losses_of_eager_mode() -> list[float]:
    torch.manual_seed(0)
    settings = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 32}
    transformers = import_package("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 512, (16, 32), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
