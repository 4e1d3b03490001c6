"""Single measurements of a long table, kept in a file until the table is complete, so that an interrupted run can continue."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Cells:
    """The measurements of one table so far.

    A file is ignored if it was written in another environment, such as with other versions or on another machine.
    """

    def __init__(self, file: Path | None, environment: Mapping[str, str]) -> None:
        """Reads earlier measurements.

        Args:
            file: the file that keeps the measurements; None to keep nothing.
            environment: the facts that must be the same as in the file, except for the date.
        """
        self._file = file
        self._circumstances = {name: fact for name, fact in environment.items() if name != "date"}
        self._found: dict[str, Any] = {}
        if file is not None and file.exists():
            kept = json.loads(file.read_text())
            if kept["circumstances"] == self._circumstances:
                self._found = kept["cells"]

    def measured(self, name: str, measure: Callable[..., Any], *args: Any) -> Any:
        """Returns the measurement of this name from the interrupted run, or a new one. `measure` returns a value that JSON can hold."""
        if name not in self._found:
            self._found[name] = measure(*args)
            if self._file is not None:
                text = json.dumps({"circumstances": self._circumstances, "cells": self._found}, indent=1) + "\n"
                written = self._file.with_name(self._file.name + ".new")
                written.write_text(text)
                os.replace(written, self._file)
        return self._found[name]

    def done(self) -> None:
        """Deletes the file after the table is complete: the next run measures everything again."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
