"""Run scenarios, and compare all that others can see: before each, meanwhile (from a second thread), afterwards, and at the exit.

Each has a process of its own: a child, made before anything has been compiled, of the one that has imported everything.
"""

from __future__ import annotations

import atexit
import os
import sys

import jax.numpy  # noqa: F401  (importing it is no scenario's doing)
import torch

# What TorchDynamo and AOTAutograd let others see while they trace: so it is with backend="aot_eager" too. torch's generator they put back
# afterwards, as the scenarios do.
TORCHS_OWN = {
    "torch.compiler", "torch.fx tracing", "torch.anomaly", "warnings.filters", "names of warnings", "operators", "kernels for Meta",
    "torch random",
}  # fmt: skip

# torch 2.11 has no settings of one thread: what TorchDynamo sets while it traces, and what a scenario sets for itself, all threads see.
if torch.__version__ < (2, 12):
    TORCHS_OWN |= {
        "torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access", "torch._dynamo.config.capture_dynamic_output_shape_ops",
    }  # fmt: skip

# It listens to the log.
ALLOWED = {
    "no_dead_ends": {"logger dynaxla"},
    "the_device": {"logger torch._subclasses.fake_tensor"},
    "meshes": {"logger torch._subclasses.fake_tensor"},
}
# The changes that `dynaxla.device.enable` is meant to make, for the life of the process: a device of torch's, on JAX's own client.
LASTING = {
    "the_device": {
        "torch accelerator", "names of Tensor", "names of Module", "kernels for CPU", "jax's clients", "jax's handler of forks", "atexit",
    }
}  # fmt: skip
LASTING["meshes"] = LASTING["the_device"]


def settle() -> None:
    """Have torch do what it does once per process. A backward pass comes first: one on fake tensors would begin threads for eight GPUs in
    a build for CUDA that sees none, and children could run none."""
    torch.ones((), requires_grad=True).backward()
    torch.optim.AdamW([torch.zeros(1)])
    torch.optim.SGD([torch.zeros(1)])
    function = torch.compile(lambda x: torch.nn.functional.dropout(x.sin() * 2).sum(), backend="aot_eager", dynamic=True)
    with torch.random.fork_rng(devices=[]):
        function(torch.ones(3, requires_grad=True)).backward()


def main(names: list[str]) -> int:
    """Prints which scenarios have failed, behind what they say themselves."""
    torch.set_num_threads(1)
    settle()
    from .visible import Watch, differences, lines, snapshot

    lasting: set[str] = set()

    def check(when: str, found: dict[str, tuple[object, object]]) -> None:
        found = {name: values for name, values in found.items() if name not in lasting}
        if found:
            print(when, *lines(found), sep="\n", file=sys.stderr, flush=True)
            os._exit(3)

    # What is registered first is called last: after all that dynaxla or JAX may do at the exit.
    atexit.register(lambda: check("at the exit", differences(before, snapshot())))
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
    check("meanwhile", {key: values for key, values in watch.seen.items() if key not in allowed})
    check("afterwards", differences(before, snapshot()))
    assert watch.reads > 3, watch.reads
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
