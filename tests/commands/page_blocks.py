"""The Python blocks of a page. `python tests/commands/page_blocks.py README.md` prints them as one program."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def blocks_of(page: Path) -> list[str]:
    """Returns the page's Python blocks, in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    print("\n".join(blocks_of(Path(sys.argv[1]))))
