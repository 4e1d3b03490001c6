"""Tables as text, formatted by rich."""

from __future__ import annotations

import io
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(*columns: str, title: str) -> Table:
    """Returns an empty table with these columns. Python's random number generator keeps its state."""
    state = random.getstate()
    from rich.table import Table  # its import draws from Python's random number generator

    random.setstate(state)
    return Table(*columns, title=title)


def text_of(*tables: Table) -> str:
    """Returns tables as text. Python's random number generator keeps its state."""
    state = random.getstate()
    from rich.console import Console

    random.setstate(state)
    text = io.StringIO()
    Console(width=140, file=text).print(*tables)
    return text.getvalue()
