"""The options of the backends. Nothing else reads options or environment variables."""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import OptionError
from .observe import events
from .runtime.store import Store

log = logging.getLogger("dynaxla")


@dataclass(frozen=True)
class Options:
    """Options of `torch.compile(..., backend="dynaxla", options={...})`.

    Attributes:
        dump: a directory for each compiled graph's ATen, StableHLO and optimized HLO. Default: the variable DYNAXLA_DUMP, or none.
        engines: backends of torch.compile, "dynaxla" among them, e.g. ["dynaxla", "inductor", "eager"]: for each graph the fastest of those
            that do what eager mode does; see docs/engines.md. (): dynaxla alone.
        executables: how many executables (one per combination of input sizes) a graph keeps; beyond it the one not used for the longest
            time is dropped, and compiled again when it is needed.
        compile: when XLA compiles a graph for new sizes: "now", before the call goes on; "background", in another thread, while torch's own
            kernels run the graph: numbers are those of torch's kernels until a program is ready, and then XLA's. A graph that draws random
            numbers is compiled now, since they would be others; see lowering/interchange.py for what else is. Steps are compiled in the
            same way. See `dynaxla.finish_compilations`.
        fallback: what happens to an op without a lowering: "kernel", the program calls torch's own kernel on its own buffers (counted and
            logged); "error", UnsupportedOp.
        forms: how an op is computed wherever that way fits, instead of the one expected to be fastest, by op, e.g. {"convolution": "xla"};
            see dynaxla.lowering.forms. Default: the variable DYNAXLA_FORMS, e.g. "convolution=xla,contraction=onednn", or none.
        freeze: for inference: what parameters and buffers alone decide (batch norms folded into convolutions, weights cast by autocast or
            packed for oneDNN's kernels) is computed once, and again after one of them has changed, as far as PyTorch can see: see
            `FrozenProgram` for what it cannot.
        tune: measure, for each shape of an op that has several forms, all that fit, and take the fastest, instead of the one that is
            expected to be. The first call takes longer; what was measured is kept in the cache directory. See `dynaxla tune`.
        donate: on the device "jax", inputs that a graph writes to (parameters, buffers, caches) are given to its program, which writes in
            place in XLA's memory, unless something else refers to them. False: the program makes them anew, and the old ones stay until it
            has succeeded. Tensors in torch's own memory are never given away.
        exact_rng: random numbers are those that eager mode would draw: torch's own generator draws them, before the program runs.
            Without it a seed is drawn, and the program makes its own numbers of it.
        collectives: of several processes, on the CPU: "torch": a program calls the collectives of torch.distributed; "xla": they are XLA's
            own, among clients of XLA's over the processes; see docs/many-processes.md.
        partition: of graphs with DTensors: who chooses the collectives: "torch": DTensor does, as in eager mode, op by op; "xla": XLA gets
            the graph of whole tensors with their placements, and its partitioner chooses. Collectives are XLA's own then, as with
            collectives="xla". Graphs that it cannot be given go the way of "torch", which is counted ("not_partitioned") and logged, or
            refused with fallback="error"; see docs/many-processes.md.
        cache: a directory for what later processes need not do again: compiled programs (on the CPU; without calls of torch's kernels or
            of oneDNN, which XLA cannot write to a file), traced graphs for inference on the CPU, and measurements. "": none. Default:
            the variable DYNAXLA_CACHE, or dynaxla in the user's directory of caches.
        sizes: "exact": an executable for each combination of input sizes; "buckets": sizes that change are rounded up to powers of two and
            the numbers halfway between them, inputs are padded, and one executable serves all sizes of a bucket. Graphs with an op for
            which dynaxla does not know how are compiled for exact sizes, and the log says so. "auto": the first four combinations that a
            graph meets have exact executables, which are faster, and all others buckets. A training step (`compile_step`) has exact ones.
        heap: "keep": once a program needs much memory, glibc is told, for the whole process, to keep what is freed; see runtime/heap.py.
            "leave": glibc's settings stay as they are. Default: the variable DYNAXLA_HEAP, or "keep".
        xla: XLA's own options, by name, for every program, e.g. {"xla_cpu_prefer_vector_width": 256}.
    """

    dump: str | None = field(default_factory=lambda: os.environ.get("DYNAXLA_DUMP"))
    engines: Sequence[str] = ()
    executables: int = 64
    compile: str = "now"
    fallback: str = "kernel"
    forms: Mapping[str, str] = field(default_factory=lambda: _pairs(os.environ.get("DYNAXLA_FORMS", "")))
    freeze: bool = False
    tune: bool = False
    donate: bool = True
    exact_rng: bool = False
    collectives: str = "torch"
    partition: str = "torch"
    cache: str | None = field(default_factory=lambda: os.environ.get("DYNAXLA_CACHE"))
    sizes: str = "auto"
    heap: str = field(default_factory=lambda: _heap(os.environ.get("DYNAXLA_HEAP", "keep")))
    xla: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    @staticmethod
    def parse(options: Mapping[str, Any] | None, mode: str | None) -> Options:
        """mode: one of torch.compile's presets. Those that ask for autotuning mean `tune`, unless options say otherwise; "reduce-overhead"
        means the default, and the log says so once.

        Raises: OptionError for an unknown option or mode, or a wrong type.
        """
        given = {**_preset(mode), **(options or {})}
        known = {item.name: item for item in fields(Options)}
        for name, value in given.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                meant = f"did you mean {close[0]!r}? " if close else ""
                raise OptionError(f"unknown option {name!r}", hint=f"{meant}the options are: {', '.join(known)}")
            _check(name, value)
        if given.get("compile") == "background":
            for name in _NOT_IN_BACKGROUND:
                if given.get(name, False):
                    raise OptionError(f"option compile='background' beside {name}", hint=f"{name} {_NOT_IN_BACKGROUND[name]}")
        if given.get("partition") == "xla":
            for name, wrong in _NOT_PARTITIONED.items():
                if name in given and given[name] == wrong:
                    hint = (
                        "leave collectives out, or say 'xla': then they are XLA's own" if name == "collectives" else "leave one of both out"
                    )
                    raise OptionError(f"option partition='xla' beside {name}={wrong!r}", hint=hint)
            given["collectives"] = "xla"
        if "engines" in given:
            given["engines"] = tuple(given["engines"])
        return Options(**given)

    def store(self, folder: str) -> Store | None:
        """The part of the cache directory that is called `folder`; None if there is to be none, or no directory of the user's, and for
        programs while somebody wants to know of what lines they are made.

        Raises: OptionError for a directory that was asked for, but cannot be used.
        """
        if events.is_heard() and folder not in ("tuning", "self_tests"):
            return None
        if self.cache is not None:
            return open_store(Path(self.cache).expanduser().absolute() / folder) if str(self.cache) else None
        return _default_store(folder)

    @property
    def facts(self) -> tuple[Any, ...]:
        """What a program depends on: all but when it is compiled, where it is kept and written, how many are, and what else may run."""
        return tuple(
            sorted(value.items()) if isinstance(value := getattr(self, item.name), Mapping) else value
            for item in fields(self)
            if item.name not in ("cache", "compile", "dump", "engines", "executables", "heap")
        )

    @property
    def dump_directory(self) -> Path | None:
        """Where graphs are written; None for nowhere."""
        return Path(self.dump) if self.dump is not None else None


@functools.cache
def open_store(folder: Path) -> Store:
    """The store in a folder; one object for each folder."""
    return Store(folder)


@functools.cache
def _default_store(folder: str) -> Store | None:
    """Where there is no such directory, as in some containers, work goes on without it."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return open_store(caches / "dynaxla" / folder)
    except (OptionError, RuntimeError) as error:  # RuntimeError: the user has no home
        log.warning("nothing is kept between processes: %s", error)
        return None


_NOT_IN_BACKGROUND = {
    "freeze": "computes at the first call what later ones read: leave one of both out",
    "tune": "measures, and calls that run beside it would be measured too: leave one of both out",
}

# What XLA's partitioner cannot have beside it.
_NOT_PARTITIONED = {"collectives": "torch", "compile": "background", "freeze": True, "tune": True}

# torch.compile's presets, in words of our own options.
_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {},
    "max-autotune": {"tune": True},
    "max-autotune-no-cudagraphs": {"tune": True},
}


def _preset(mode: str | None) -> dict[str, Any]:
    """The options that a mode stands for. Raises: OptionError for one that torch.compile does not have either."""
    if mode is None:
        return {}
    if mode not in _PRESETS:
        raise OptionError(f"unknown mode {mode!r}", hint=f"the modes are: {', '.join(_PRESETS)}")
    if mode == "reduce-overhead":
        _say_what_reduces_overhead()
    return _PRESETS[mode]


@functools.cache
def _say_what_reduces_overhead() -> None:
    log.info("mode='reduce-overhead' is the default: a graph is one program at every call, without CUDA graphs of its own")


def _pairs(text: str) -> dict[str, str]:
    """What "a=b,c=d" says. Raises: OptionError."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise OptionError(f"DYNAXLA_FORMS={text!r}", hint='write "op=form,op=form", e.g. DYNAXLA_FORMS="convolution=xla"')
    return {op.strip(): form.strip() for op, _, form in pairs}


def _heap(setting: str) -> str:
    """Raises: OptionError."""
    if setting not in ("keep", "leave"):
        raise OptionError(f"DYNAXLA_HEAP={setting!r}", hint='DYNAXLA_HEAP is "keep" or "leave"')
    return setting


def _check(name: str, value: Any) -> None:
    if name in ("dump", "cache"):
        good, wanted = value is None or isinstance(value, (str, os.PathLike)), "a directory's path"
    elif name == "engines":
        good = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
        good = good and "dynaxla" in value and len(set(value)) == len(value)
        wanted = 'a list of names of backends of torch.compile, each once, and "dynaxla" among them, which runs what must not be run twice'
    elif name == "executables":
        good, wanted = isinstance(value, int) and not isinstance(value, bool) and value >= 1, "a whole number from 1 up"
    elif name in ("donate", "exact_rng", "freeze", "tune"):
        good, wanted = isinstance(value, bool), "True or False"
    elif name == "fallback":
        good, wanted = value in ("kernel", "error"), "'kernel' or 'error'"
    elif name == "compile":
        good, wanted = value in ("now", "background"), "'now' or 'background'"
    elif name in ("collectives", "partition"):
        good, wanted = value in ("torch", "xla"), "'torch' or 'xla'"
    elif name == "sizes":
        good, wanted = value in ("auto", "exact", "buckets"), "'auto', 'exact' or 'buckets'"
    elif name == "heap":
        good, wanted = value in ("keep", "leave"), "'keep' or 'leave'"
    elif name == "forms":
        good = isinstance(value, Mapping) and all(isinstance(item, str) for pair in value.items() for item in pair)
        wanted = "a dict of op names and names of forms"
    else:
        good = isinstance(value, Mapping) and all(
            isinstance(key, str) and isinstance(item, (bool, int, float, str)) for key, item in value.items()
        )
        wanted = "a dict of XLA option names and values"
    if not good:
        raise OptionError(f"option {name}={value!r}", hint=f"{name} is {wanted}")
