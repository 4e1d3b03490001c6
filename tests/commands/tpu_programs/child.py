"""The process of a group: `python -m commands.tpu_programs.child RESULTS CELL...` adds a line to the results for each cell."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from commands.compiled_programs import results

from .cells import cells


def main(path: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    by_name = {str(cell): cell for cell in cells()}
    for name in names:
        start = time.process_time()
        line: dict[str, Any] = {"cell": name}
        try:
            line["programs"] = by_name[name].make()
        except Exception:
            line["error"] = traceback.format_exc()
        line["seconds"] = round(time.process_time() - start, 1)
        results.add(path, line)
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
