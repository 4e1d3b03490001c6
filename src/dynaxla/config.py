"""The options of the backends. No other module parses options or reads dynaxla's environment variables."""

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
        dump: a directory for the ATen graph, the StableHLO and the optimized HLO of each compiled graph, and for lists of the passes that
            rewrote it (NAME.passes.txt). Default: the environment variable
            DYNAXLA_DUMP, or none.
        engines: backends of torch.compile, which must include "dynaxla", e.g. ["dynaxla", "inductor", "eager"]. Each graph is run by the
            fastest backend whose results agree with eager mode; see docs/engines.md. (): dynaxla alone.
        executables: the number of executables (one per combination of input sizes) that a graph keeps. Beyond it the least recently used
            executable is dropped, and compiled again when it is needed.
        compile: when XLA compiles a graph for new sizes. "now": before the call continues. "background": in another thread, while torch's
            own kernels run the graph, so that results come from torch's kernels until the program is ready, and from XLA afterwards. A
            graph that draws random numbers is always compiled now, since XLA would draw other numbers; lowering/torch_equivalence.py names
            the other exceptions. Steps are compiled in the same way. See `dynaxla.synchronize`.
        fallback: the treatment of an op without a lowering. "kernel": the program calls torch's own kernel on the program's buffers, which
            is counted and logged. "error": raises UnsupportedOp.
        forms: by op, the implementation to use wherever it supports the op's arguments, instead of the one expected to be the fastest, e.g.
            {"convolution": "xla"}; see dynaxla.lowering.forms. Default: the environment variable DYNAXLA_FORMS, e.g.
            "convolution=xla,contraction=onednn", or none.
        freeze: for inference: values that depend on parameters and buffers alone (batch norms folded into convolutions, weights cast by
            autocast or packed for oneDNN's kernels) are computed once, and again after one of those tensors changes. `FrozenValues` names
            the changes that PyTorch cannot detect.
        tune: measure, for each shape of an op with several implementations, all that support it, and use the fastest instead of the one
            expected to be the fastest. The first call takes longer; measurements are kept in the cache directory. See `dynaxla tune`.
        donate: on the device "jax": inputs that a graph writes to (parameters, buffers, caches) are donated to its program, which writes in
            place in XLA's memory, unless something else refers to them. False: the program allocates new arrays, and the old ones stay
            alive until it has succeeded. Tensors in torch's own memory are never donated.
        exact_rng: random numbers are those of eager mode: torch's own generator draws them before the program runs. Otherwise the generator
            draws only a seed, from which the program generates its own numbers.
        collectives: with several processes, on the CPU. "torch": a program calls the collectives of torch.distributed. "xla": a program
            uses XLA's own collectives, among XLA clients that span the processes; see docs/many-processes.md.
        partition: for graphs with DTensors: the component that chooses the collectives. "torch": DTensor does, op by op as in eager mode.
            "xla": XLA's partitioner does, for the graph of global tensors with their placements; the collectives are XLA's own then, as
            with collectives="xla". Graphs that XLA cannot partition are compiled as with "torch", which is counted ("not_partitioned") and
            logged, or raise an error with fallback="error"; see docs/many-processes.md.
        cache: a directory that later processes reuse. It holds compiled programs (on the CPU; without calls of torch's kernels or of
            oneDNN, which XLA cannot write to a file), traced graphs for inference on the CPU, and measurements. "": none. Default: the
            environment variable DYNAXLA_CACHE, or the folder dynaxla in the user's cache directory.
        sizes: "exact": one executable for each combination of input sizes. "buckets": sizes that change are rounded up to powers of two or
            to the numbers halfway between them, inputs are padded, and one executable serves all sizes of a bucket; graphs with an op that
            dynaxla cannot pad are compiled for exact sizes, and the log says so. "auto": the first four combinations of sizes of a graph
            have exact executables, which are faster, and all others use buckets. A training step (`compile_step`) has exact executables.
        heap: "keep": once a program needs much memory, dynaxla sets glibc, for the whole process, to keep freed memory; see
            runtime/heap.py. "leave": glibc's settings are not changed. Default: the environment variable DYNAXLA_HEAP, or "keep".
        xla: XLA's own options by name, for every program, e.g. {"xla_cpu_prefer_vector_width": 256}.
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
        """Returns the options that a user passed to torch.compile, after checking them.

        Args:
            options: the values by name, or None.
            mode: one of torch.compile's presets, or None. The presets with autotuning set `tune`, unless options say otherwise;
                "reduce-overhead" is the default, and the log says so once.

        Raises: OptionError for an unknown option or mode, or for a wrong value.
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
                    raise OptionError(f"option compile='background' together with {name}", hint=f"{name} {_NOT_IN_BACKGROUND[name]}")
        if given.get("partition") == "xla":
            for name, wrong in _NOT_PARTITIONED.items():
                if name in given and given[name] == wrong:
                    hint = "leave collectives out, or set it to 'xla'" if name == "collectives" else "leave one of the two options out"
                    raise OptionError(f"option partition='xla' together with {name}={wrong!r}", hint=hint)
            given["collectives"] = "xla"
        if "engines" in given:
            given["engines"] = tuple(given["engines"])
        return Options(**given)

    def store(self, folder: str) -> Store | None:
        """Returns the store in the folder of the cache directory with this name.

        None if the cache is off, or if the user has no cache directory. While there are event listeners, None also for all folders but
        "tuning" and "self_tests", since cached programs have no line numbers of the user's code.

        Raises: OptionError for a directory that the user chose but that cannot be used.
        """
        if events.has_listeners() and folder not in ("tuning", "self_tests"):
            return None
        if self.cache is not None:
            return open_store(Path(self.cache).expanduser().absolute() / folder) if str(self.cache) else None
        return _default_store(folder)

    @property
    def facts(self) -> tuple[Any, ...]:
        """The values of the options that a compiled program depends on.

        Left out are the time of compilation, the directories, the number of executables, glibc's settings, and the other engines.
        """
        return tuple(
            sorted(value.items()) if isinstance(value := getattr(self, item.name), Mapping) else value
            for item in fields(self)
            if item.name not in ("cache", "compile", "dump", "engines", "executables", "heap")
        )

    @property
    def dump_directory(self) -> Path | None:
        """The directory to write graphs to, or None."""
        return Path(self.dump) if self.dump is not None else None


@functools.cache
def open_store(folder: Path) -> Store:
    """Returns the store in a folder: one object for each folder."""
    return Store(folder)


@functools.cache
def _default_store(folder: str) -> Store | None:
    """Returns a store in the user's cache directory, or None where there is no such directory, as in some containers."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return open_store(caches / "dynaxla" / folder)
    except (OptionError, RuntimeError) as error:  # RuntimeError: the user has no home
        log.warning("compiled programs are not kept for later processes: %s", error)
        return None


_NOT_IN_BACKGROUND = {
    "freeze": "computes values at the first call that later calls read: leave one of the two options out",
    "tune": "measures, and calls that run at the same time would distort the times: leave one of the two options out",
}

# Options that partition="xla" cannot be combined with, and their rejected values.
_NOT_PARTITIONED = {"collectives": "torch", "compile": "background", "freeze": True, "tune": True}

# The presets of torch.compile, as dynaxla's options.
_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {},
    "max-autotune": {"tune": True},
    "max-autotune-no-cudagraphs": {"tune": True},
}


def _preset(mode: str | None) -> dict[str, Any]:
    """Returns the options of a preset of torch.compile. Raises: OptionError for an unknown preset."""
    if mode is None:
        return {}
    if mode not in _PRESETS:
        raise OptionError(f"unknown mode {mode!r}", hint=f"the modes are: {', '.join(_PRESETS)}")
    if mode == "reduce-overhead":
        _say_what_reduces_overhead()
    return _PRESETS[mode]


@functools.cache
def _say_what_reduces_overhead() -> None:
    log.info("mode='reduce-overhead' changes nothing: by default, each call of a graph runs one program, and dynaxla adds no CUDA graphs")


def _pairs(text: str) -> dict[str, str]:
    """Parses "a=b,c=d". Raises: OptionError."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise OptionError(f"DYNAXLA_FORMS={text!r}", hint='write "op=form,op=form", e.g. DYNAXLA_FORMS="convolution=xla"')
    return {op.strip(): form.strip() for op, _, form in pairs}


def _heap(setting: str) -> str:
    """Checks the value of DYNAXLA_HEAP and returns it. Raises: OptionError."""
    if setting not in ("keep", "leave"):
        raise OptionError(f"DYNAXLA_HEAP={setting!r}", hint='set DYNAXLA_HEAP to "keep" or "leave"')
    return setting


def _check(name: str, value: Any) -> None:
    if name in ("dump", "cache"):
        good, wanted = value is None or isinstance(value, (str, os.PathLike)), "a directory's path"
    elif name == "engines":
        good = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
        good = good and "dynaxla" in value and len(set(value)) == len(value)
        wanted = 'a list of different names of backends of torch.compile, with "dynaxla", which runs graphs that must not run twice'
    elif name == "executables":
        good, wanted = isinstance(value, int) and not isinstance(value, bool) and value >= 1, "a whole number of at least 1"
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
