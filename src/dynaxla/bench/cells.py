"""Single measurements of a long table, kept in a file until the table is whole: a run that was stopped goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Cells:
    """What has been measured of one table.

    A file of another table, of other versions, other sources or another machine is not gone on with.
    """

    def __init__(self, file: Path | None, environment: Mapping[str, str]) -> None:
        """file: None, to keep nothing. environment: what is to be the same; its date is not compared."""
        self._file = file
        self._circumstances = {name: fact for name, fact in environment.items() if name != "date"}
        self._found: dict[str, Any] = {}
        if file is not None and file.exists():
            kept = json.loads(file.read_text())
            if kept["circumstances"] == self._circumstances:
                self._found = kept["cells"]

    def measured(self, name: str, measure: Callable[..., Any], *args: Any) -> Any:
        """The measurement of this name: that of the run that was stopped, or a new one. measure: gives what JSON can hold."""
        if name not in self._found:
            self._found[name] = measure(*args)
            if self._file is not None:
                text = json.dumps({"circumstances": self._circumstances, "cells": self._found}, indent=1) + "\n"
                written = self._file.with_name(self._file.name + ".new")
                written.write_text(text)
                os.replace(written, self._file)
        return self._found[name]

    def done(self) -> None:
        """The table is whole: the next run measures anew."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
