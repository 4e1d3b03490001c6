"""A run of the benchmark over several models, with a progress bar."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import engines as engine_table
from . import report, suites
from .measure import BenchSettings, measure, process_settings, warm_up_engines


def run(
    cases: list[suites.BenchCase],
    chosen: list[engine_table.BenchEngine],
    settings: BenchSettings,
    suite: str,
    notes: list[str] | None = None,
) -> report.BenchReport:
    """Measures the cases, with a progress bar on stderr. After Ctrl-C, returns a report of the models measured so far."""
    result = report.BenchReport(suite, settings, [engine.name for engine in chosen], list(notes or []))
    with process_settings(settings.setup.threads) as process_notes, ProgressBar(len(cases)) as progress:
        result.notes += process_notes
        try:
            progress.show("starting the engines")
            warm_up_engines(chosen, settings.setup)
            for case in cases:
                result.models.append(measure(case, chosen, settings, progress))
        except KeyboardInterrupt:
            result.notes.append(f"Interrupted: {len(result.models)} of {len(cases)} models measured.")
    return result


class ProgressBar:
    """A progress bar over all models, which count equally."""

    def __init__(self, models: int) -> None:
        percentage = TextColumn("{task.percentage:>3.0f}%")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), percentage, TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=models)
        self._models_begun = 0
        self._model = ""
        self._steps = 1.0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def begin(self, model: str, steps: int) -> None:
        self._progress.update(self._task, completed=self._models_begun)
        self._model, self._steps = model, steps
        self._models_begun += 1

    def step(self, text: str, steps: float = 1) -> None:
        self._progress.update(self._task, description=f"{self._model}: {text}", advance=steps / self._steps)
