"""The process that compiles some cases: `python -m commands.lower_everywhere.tpu_child RESULTS CASE...`.

It appends a line of JSON for each case. Without cases it only loads libtpu.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
import warnings
from pathlib import Path

import torch

from cases.conformance.trial import quiet
from commands.compiled_programs import results
from dynaxla.runtime.topologies import topology

from .cases import PLATFORMS, Case
from .tpu_compiler import TOPOLOGY
from .trial import outcome


def main(path: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    device = topology("tpu", TOPOLOGY).devices[0]
    with warnings.catch_warnings():
        quiet()
        for name in names:
            case = Case(*name.split("/"))
            started = time.monotonic()
            outcomes = {platform: outcome(case, platform, device if platform == "tpu" else None) for platform in PLATFORMS}
            line = {"cell": name, "outcomes": {platform: dataclasses.asdict(item) for platform, item in outcomes.items()}}
            results.add(path, {**line, "seconds": round(time.monotonic() - started, 1)})
            if case.kind == "model":
                gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
