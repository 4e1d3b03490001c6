"""Programs that use the device "jax" and end in different ways: the code, the exit status, and the last lines of stderr and stdout."""

from __future__ import annotations

BEGINNING = """
import atexit, os, sys, threading, time, torch, dynaxla
dynaxla.device.enable()
x = torch.ones(3, device="jax")
(x * 2).tolist()
"""

# A thread that has computed something, and waits for more work.
_THREAD = """
import queue
given, done = queue.Queue(), queue.Queue()

def work():
    while True:
        done.put((given.get() @ x).item())

threading.Thread(target=work, daemon=True).start()
given.put(x)
assert done.get(timeout=300) == 3
"""

ENDS: dict[str, tuple[str, int, str, str]] = {
    "work under way, tensors in globals and in cycles": (
        """
large = torch.randn(600, 600).to("jax")
kept = torch.nn.Linear(4, 4).to("jax")
loss = kept(torch.ones(2, 4, device="jax")).sum()
loss.backward(retain_graph=True)
cycle = [large]
cycle.append(cycle)
for _ in range(20):
    large = large @ large * 1e-2
""",
        0,
        "",
        "",
    ),
    "a recording whose results are not read": ("dynaxla.device.set_mode('lazy'); y = x * 2; x.add_(y); sys.exit(3)", 3, "", ""),
    "sys.exit in a lazy block": ("with dynaxla.device.lazy(): y = x * 2; sys.exit(3)", 3, "", ""),
    "an exception in a lazy block": (
        "with dynaxla.device.lazy(): y = x * 2; raise ValueError('mine')",
        1,
        "ValueError: mine",
        "",
    ),
    "a recording that fails at the end": (
        "dynaxla.device.set_mode('lazy'); y = x.index_select(0, torch.tensor([7], device='jax'))",
        0,
        "",
        "",
    ),
    "an atexit function reads a result": (
        "dynaxla.device.set_mode('lazy'); y = x * 2; atexit.register(lambda: print(y.tolist()))",
        0,
        "",
        "[2.0, 2.0, 2.0]",
    ),
    "os._exit": ("dynaxla.device.set_mode('lazy'); y = x * 2; os._exit(5)", 5, "", ""),
    "os._exit in a lazy block, with a thread": (_THREAD + "with dynaxla.device.lazy(): y = x * 2; os._exit(5)", 5, "", ""),
    "a thread that continues after the main thread": (
        "threading.Thread(target=lambda: (time.sleep(0.3), print((x * 2).tolist()))).start()",
        0,
        "",
        "[2.0, 2.0, 2.0]",
    ),
    "a daemon thread that waits": (_THREAD, 0, "", ""),
    "a daemon thread that waits, in lazy mode": ("dynaxla.device.set_mode('lazy')\n" + _THREAD + "y = x * 2; sys.exit(3)", 3, "", ""),
}
