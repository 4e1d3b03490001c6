"""Measured choice, for calls with equal rounded sizes: the padded program, or torch's kernels with the true sizes."""

from __future__ import annotations

# The number of timings of each of the two. Other work of the machine only adds to a time, so the minimum counts.
_TRIALS = 3


class EagerTimings:
    """Timings of the padded program and of torch's kernels for one combination of rounded sizes.

    The program takes the same time for all true sizes. Torch's kernels are expected to take time in proportion to the valid elements.
    Thread-safe: a lost timing is measured again.
    """

    def __init__(self) -> None:
        self._program: list[float] = []
        self._kernels: list[float] = []  # scaled to calls without padding

    @property
    def is_complete(self) -> bool:
        """True if the program and the kernels have been timed often enough."""
        return len(self._program) >= _TRIALS and len(self._kernels) >= _TRIALS

    @property
    def has_program(self) -> bool:
        """True if the program has been timed."""
        return bool(self._program)

    @property
    def program_is_slower(self) -> bool:
        """True if all timings are known, and the program is slower than torch's kernels even if nothing is padded."""
        return self.is_complete and self.prefers_kernels(1.0)

    def prefers_kernels(self, valid_fraction: float) -> bool:
        """True if torch's kernels should run a call. Until the timings are complete, both run in turn, and the program runs first.

        Args:
            valid_fraction: The number of valid elements divided by the number of padded ones.
        """
        if self.is_complete:
            return min(self._kernels) * valid_fraction < min(self._program)
        return len(self._kernels) < len(self._program)

    def add_program(self, seconds: float) -> None:
        self._program.append(seconds)

    def add_kernels(self, seconds: float, valid_fraction: float) -> None:
        self._kernels.append(seconds / valid_fraction)
