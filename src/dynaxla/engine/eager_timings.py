"""The choice between a padded program and torch's kernels, by measurement, for calls with equal rounded sizes."""

from __future__ import annotations

# The number of timings of the program, and of torch's kernels. Other work of the machine only adds to a time, so the minimum counts.
_TRIALS = 3


class EagerTimings:
    """Timings of the padded program and of torch's kernels for one combination of rounded sizes.

    The program takes the same time for all true sizes of its bucket. The time of torch's kernels is taken to be proportional to the number
    of valid elements (elements that are not padding). Thread-safe without a lock: a timing that a race loses is measured again.
    """

    def __init__(self) -> None:
        self._program: list[float] = []
        self._kernels: list[float] = []  # seconds, scaled up to true sizes that equal the rounded sizes

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
        """True if the timings are complete, and the program is slower than torch's kernels even for a call without padding."""
        return self.is_complete and self.prefers_kernels(1.0)

    def prefers_kernels(self, valid_fraction: float) -> bool:
        """True if torch's kernels should run a call. Until the timings are complete, the program and the kernels take turns.

        Args:
            valid_fraction: See `CallPlan`.
        """
        if self.is_complete:
            return min(self._kernels) * valid_fraction < min(self._program)
        return len(self._kernels) < len(self._program)

    def add_program(self, seconds: float) -> None:
        """Adds a timing of the program."""
        self._program.append(seconds)

    def add_kernels(self, seconds: float, valid_fraction: float) -> None:
        """Adds a timing of torch's kernels, for a call with this fraction of valid elements."""
        self._kernels.append(seconds / valid_fraction)
