"""The faster way to run calls whose sizes are rounded to the same values: the program, or torch's kernels with the true sizes."""

from __future__ import annotations

# Timings of each way. Other work of the machine only adds to a time, so the least counts.
_TRIALS = 3


class Race:
    """Times of both ways for one combination of rounded sizes.

    The program takes the same time for all true sizes. Torch's kernels are expected to take time in proportion to the valid elements.
    Thread-safe: a lost timing is measured again.
    """

    def __init__(self) -> None:
        self._program: list[float] = []
        self._kernels: list[float] = []  # scaled to calls without padding

    @property
    def is_decided(self) -> bool:
        return len(self._program) >= _TRIALS and len(self._kernels) >= _TRIALS

    @property
    def has_begun(self) -> bool:
        """True if the program has been timed."""
        return bool(self._program)

    @property
    def is_lost(self) -> bool:
        """True if the race is decided, and the program is slower than torch's kernels even if nothing is padded."""
        return self.is_decided and self.prefers_kernels(1.0)

    def prefers_kernels(self, share: float) -> bool:
        """True if torch's kernels should run a call. Until the race is decided, both take turns, and the program begins.

        Args:
            share: The number of valid elements divided by the number of padded ones.
        """
        if self.is_decided:
            return min(self._kernels) * share < min(self._program)
        return len(self._kernels) < len(self._program)

    def add_program(self, seconds: float) -> None:
        self._program.append(seconds)

    def add_kernels(self, seconds: float, share: float) -> None:
        self._kernels.append(seconds / share)
