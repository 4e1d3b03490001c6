"""Runs scenarios, and compares the visible state: before each scenario, during it (in a second thread), after it, and at exit.

Each scenario has its own process. The parent process has imported everything, and forks before it has compiled anything.
"""

from __future__ import annotations

import atexit
import os
import sys

import jax.numpy  # noqa: F401  (imported here, so that no scenario imports it)
import torch

# State that TorchDynamo and AOTAutograd change while they trace, also with backend="aot_eager". They restore torch's generator afterwards,
# as the scenarios do.
TORCHS_OWN = {
    "torch.compiler", "torch.fx tracing", "torch.anomaly", "warnings.filters", "names of warnings", "operators", "kernels for Meta",
    "torch random",
}  # fmt: skip

# torch 2.11 has no settings for one thread only, so all threads see the settings that TorchDynamo or a scenario changes.
if torch.__version__ < (2, 12):
    TORCHS_OWN |= {
        "torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access", "torch._dynamo.config.capture_dynamic_output_shape_ops",
    }  # fmt: skip

# Changes by the scenarios themselves: these add handlers to loggers.
ALLOWED = {
    "no_dead_ends": {"logger dynaxla"},
    "the_device": {"logger torch._subclasses.fake_tensor"},
    "meshes": {"logger torch._subclasses.fake_tensor"},
}
# Permanent changes that `dynaxla.device.enable` makes on purpose: a new device type of torch, on a client of JAX.
LASTING = {
    "the_device": {
        "torch accelerator", "names of Tensor", "names of Module", "kernels for CPU", "jax's clients", "jax's handler of forks", "atexit",
    }
}  # fmt: skip
LASTING["meshes"] = LASTING["the_device"]


def settle() -> None:
    """Makes torch do all that it does once per process.

    A backward pass comes first. If the first backward pass had fake tensors, a build for CUDA without a GPU would start threads for eight
    GPUs, and child processes could not run backward passes.
    """
    torch.ones((), requires_grad=True).backward()
    torch.optim.AdamW([torch.zeros(1)])
    torch.optim.SGD([torch.zeros(1)])
    function = torch.compile(lambda x: torch.nn.functional.dropout(x.sin() * 2).sum(), backend="aot_eager", dynamic=True)
    with torch.random.fork_rng(devices=[]):
        function(torch.ones(3, requires_grad=True)).backward()


def main(names: list[str]) -> int:
    """Runs scenarios, and prints the names of those that fail after their own messages."""
    torch.set_num_threads(1)
    settle()
    from .visible import Watch, differences, lines, snapshot

    lasting: set[str] = set()

    def check(when: str, changes: dict[str, tuple[object, object]]) -> None:
        changes = {name: values for name, values in changes.items() if name not in lasting}
        if changes:
            print(when, *lines(changes), sep="\n", file=sys.stderr, flush=True)
            os._exit(3)

    # The first registered function is called last: after those that dynaxla and JAX register.
    atexit.register(lambda: check("at exit", differences(before, snapshot())))
    before = snapshot()
    import dynaxla

    assert dynaxla.compile_step
    check("after the import", differences(before, snapshot()))
    from .scenarios import SCENARIOS

    before = snapshot()
    failed = 0
    for name in names:
        child = os.fork()
        if not child:
            break
        if os.waitpid(child, 0)[1]:
            failed += 1
            print(f"failed: {name}", file=sys.stderr, flush=True)
    else:
        return int(failed > 0)
    before, lasting = snapshot(), LASTING.get(name, set())
    with Watch() as watch:
        SCENARIOS[name]()
    allowed = TORCHS_OWN | ALLOWED.get(name, set())
    check("during the scenario", {key: values for key, values in watch.seen.items() if key not in allowed})
    check("after the scenario", differences(before, snapshot()))
    assert watch.reads > 3, watch.reads
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
