"""The options of the backends. No other module parses options.

dynaxla's environment variables are read here, too, except for DYNAXLA_PROGRESS (observe/progress.py). Commands also look at DYNAXLA_CACHE.
"""

from __future__ import annotations

import copy
import difflib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from . import user_frames
from .cache_folder import cache_folder
from .errors import OptionError
from .observe import events
from .runtime.store import Store

log = logging.getLogger("dynaxla")


@dataclass(frozen=True)
class AllowedValues:
    """The allowed values of an option.

    Attributes:
        text: a description of the values, for errors and docs/options.md; "" if `choices` lists the values.
        accepts: returns True for an allowed value.
        choices: the values if they can be listed.
    """

    text: str
    accepts: Callable[[Any], bool]
    choices: tuple[str | bool, ...] = ()

    def __str__(self) -> str:
        *others, last = [self.text] if self.text else [repr(choice) for choice in self.choices]
        return f"{', '.join(others)} or {last}" if others else last


@dataclass(frozen=True)
class OptionDocumentation:
    """The documentation of an option, in the metadata of its field. It determines the check of values and the row in docs/options.md.

    Attributes:
        default: the default with the backend `backend` if the environment variable is not set.
        values: the allowed values.
        text: the meaning, in Markdown, with links from the folder docs.
        variable: the environment variable that sets the default, or "".
        example: a line that sets the variable.
        backend: the backend that has the option; "" for a setting that only the environment can change.
    """

    default: Any
    values: AllowedValues
    text: str
    variable: str = ""
    example: str = ""
    backend: str = "dynaxla"


def _one_of(*choices: str | bool) -> AllowedValues:
    return AllowedValues("", lambda value: isinstance(value, (str, bool)) and value in choices, choices)


def _is_dict(value: Any, *types: type) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) and isinstance(item, types) for key, item in value.items())


def _are_engines(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    return is_list and "dynaxla" in value and len(set(value)) == len(value)


_FLAG = _one_of(True, False)
_DIRECTORY = AllowedValues("a directory's path", lambda value: value is None or isinstance(value, (str, os.PathLike)))
_COUNT = AllowedValues("a whole number of at least 1", lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1)
_XLA = AllowedValues("a dict of XLA option names and values", lambda value: _is_dict(value, bool, int, float, str))
_IMPLEMENTATIONS = AllowedValues("a dict of op names and names of their implementations", lambda value: _is_dict(value, str))
# The engines of the backend dynaxla_auto without the option `engines`.
_DEFAULT_ENGINES = ("dynaxla", "inductor", "eager")
_ENGINES = AllowedValues(
    'a list of different names of backends of torch.compile, one of them "dynaxla", which runs the graphs that must not run twice',
    _are_engines,
)


def _field(
    default: Any,
    values: AllowedValues,
    text: str,
    *,
    variable: str = "",
    example: str = "",
    backend: str = "dynaxla",
    backend_default: Any = None,
    read: Callable[[str], Any] = str,
) -> Any:
    """Returns a field of `Options`.

    Args:
        default: the value if neither the environment variable nor an option sets the field.
        values, text, variable, example, backend: see `OptionDocumentation`.
        backend_default: the default with the backend `backend`, if it differs from `default`.
        read: parses the environment variable.
    """

    def default_factory() -> Any:
        if not variable or (given := os.environ.get(variable)) is None:
            return copy.copy(default)
        value = read(given)
        if not values.accepts(value):
            raise OptionError(
                f"the environment variable {variable}={given!r} is not valid", hint=f"{variable} is {values}; for example {example}"
            )
        return value

    documented_default = default if backend_default is None else backend_default
    documented = OptionDocumentation(documented_default, values, " ".join(text.split()), variable, example, backend)
    return field(default_factory=default_factory, metadata={"documentation": documented})


@dataclass(frozen=True)
class Options:
    """Options of `torch.compile(..., backend="dynaxla", options={...})`. docs/options.md is generated from these fields."""

    dump: str | None = _field(
        None,
        _DIRECTORY,
        """Write the ATen graph, the StableHLO and the optimized HLO of each compiled graph to this directory, and the list of passes that
        rewrote it (`NAME.passes.txt`). [Looking inside](looking-inside.md)""",
        variable="DYNAXLA_DUMP",
        example="DYNAXLA_DUMP=graphs",
    )
    compile: str = _field(
        "auto",
        _one_of("auto", "now", "background"),
        """When XLA compiles a graph for new sizes. `"now"`: before the call continues. `"background"`: in another thread, while torch's own
        kernels run the graph. `"auto"`: on the CPU, the first two programs of a graph with dynamic sizes as with `"now"`, and further ones
        as with `"background"`; otherwise as with `"now"`. [Sizes that change](sizes.md#when-xla-compiles)""",
        variable="DYNAXLA_COMPILE",
        example="DYNAXLA_COMPILE=now",
    )
    fallback: str = _field(
        "kernel",
        _one_of("kernel", "error"),
        """For an op without a lowering. `"kernel"`: torch's own kernel computes the op, called by the program or between two programs. This
        is counted and logged. `"error"`: the graph raises `UnsupportedOp`""",
    )
    freeze: bool = _field(
        False,
        _FLAG,
        """For inference: compute values that depend on parameters and buffers alone once, and again after one of those tensors changes.
        [Frozen weights](freezing.md) names the changes that PyTorch cannot detect""",
    )
    tune: bool = _field(
        False,
        _FLAG,
        """Measure all implementations of an op for each shape, and use the fastest instead of the one expected to be the fastest. The first
        call takes longer. The cache directory keeps the measurements, and `dynaxla tune` shows them""",
    )
    exact_rng: bool = _field(
        False,
        _FLAG,
        """Draw eager mode's random numbers: torch's own generator draws them before the program runs. Otherwise torch's generator draws
        only a seed, from which the program generates its own numbers""",
    )
    cache: str | None = _field(
        None,
        AllowedValues('a directory\'s path, or "" for none', _DIRECTORY.accepts),
        """The directory of traced graphs, compiled programs and measurements that later processes reuse. `None`: `dynaxla` in the user's
        cache directory. [Deployment](deployment.md)""",
        variable="DYNAXLA_CACHE",
        example="DYNAXLA_CACHE=",
    )
    sizes: str = _field(
        "auto",
        _one_of("auto", "exact", "buckets"),
        """The sizes that share an executable. `"exact"`: none do. `"buckets"`: sizes that change are rounded up, and inputs are padded.
        `"auto"`: the first two combinations of sizes get executables for exactly these sizes, and all others use buckets.
        [Sizes that change](sizes.md)""",
    )
    executables: int = _field(
        64,
        _COUNT,
        """The number of executables (one per combination of input sizes) that a graph keeps. Beyond it, the least recently used one is
        dropped""",
    )
    donate: bool = _field(
        True,
        _FLAG,
        """On the device "jax": donate the inputs that a graph writes to, so that XLA writes in place, unless something else refers to them.
        `False`: the old values stay alive until the program has succeeded""",
    )
    distributed: str = _field(
        "torch",
        _one_of("torch", "xla", "spmd"),
        """The component that runs the collectives of several processes. `"torch"`: the program calls those of `torch.distributed`. `"xla"`:
        it uses [XLA's own](many-processes.md#xlas-own-collectives), on the CPU. `"spmd"`: the same, and for a graph with DTensors
        [XLA's partitioner chooses](many-processes.md#collectives-that-xla-chooses) the collectives, instead of DTensor""",
    )
    xla: Mapping[str, bool | int | float | str] = _field(
        {},
        _XLA,
        """XLA's own options for every program, e.g. `{"xla_cpu_prefer_vector_width": 256}`. They override dynaxla's choices and
        `XLA_FLAGS`""",
    )
    engines: Sequence[str] = _field(
        (),
        _ENGINES,
        """Backends of `torch.compile` that compete: each graph is run by the fastest one whose results agree with eager mode.
        [Several engines](engines.md)""",
        backend="dynaxla_auto",
        backend_default=_DEFAULT_ENGINES,
    )
    implementations: Mapping[str, str] = _field(
        {},
        _IMPLEMENTATIONS,
        """The implementations of ops to use wherever they support the arguments, instead of those expected to be the fastest; see
        `dynaxla.lowering.implementations`""",
        variable="DYNAXLA_IMPLEMENTATIONS",
        example='DYNAXLA_IMPLEMENTATIONS="convolution=xla,contraction=onednn"',
        backend="",
        read=lambda text: _parse_pairs(text),
    )
    heap: str = _field(
        "keep",
        _one_of("keep", "leave"),
        """`keep`, the default: once a program needs much memory, glibc keeps freed memory, in the whole process. `leave`: glibc's settings
        are not changed. [Deployment](deployment.md#memory)""",
        variable="DYNAXLA_HEAP",
        example="DYNAXLA_HEAP=leave",
        backend="",
    )

    @staticmethod
    def parse(options: Mapping[str, Any] | None, mode: str | None, backend: str = "dynaxla") -> Options:
        """Returns the options that a user passed to torch.compile, after checking them. An old name issues a DeprecationWarning.

        Args:
            options: the values by name, or None.
            mode: one of torch.compile's presets, or None. The presets with autotuning set `tune`, unless `options` sets it;
                "reduce-overhead" changes nothing, and the log says so once.
            backend: the backend's name. Each backend accepts the options of "dynaxla".

        Raises: OptionError for an unknown option or mode, or for a wrong value.
        """
        given = _with_new_names({**_preset(mode), **(options or {})})
        known = {_OPTION_OF_FIELD.get(name, name): documented for name, documented in documentation().items()}
        for name, value in given.items():
            if name not in known:
                names = [name for name, documented in known.items() if documented.backend in ("dynaxla", backend)]
                matches = difflib.get_close_matches(name, names, n=1)
                suggestion = f"did you mean {matches[0]!r}? " if matches else ""
                raise OptionError(f"unknown option {name!r}", hint=f"{suggestion}the options are: {', '.join(names)}")
            documented = known[name]
            if not documented.values.accepts(value):
                raise OptionError(f"option {name}={value!r} is not valid", hint=f"{name} is {documented.values}")
            if documented.backend not in ("dynaxla", backend):
                replacement = (
                    f'an option of backend="{documented.backend}"'
                    if documented.backend
                    else f"the environment variable {documented.variable}"
                )
                _warn_deprecated(f"the option {name} is now {replacement}; dynaxla 0.2 refuses it here")
        for (option, value), others in _EXCLUSIVE_OPTIONS.items():
            for name, reason in others.items():
                if given.get(option) == value and given.get(name) in (True, "background"):
                    raise OptionError(f"option {option}={value!r} together with {name}={given[name]!r} is not supported", hint=reason)
        if "engines" in given or backend == "dynaxla_auto":
            given["engines"] = tuple(given.get("engines", _DEFAULT_ENGINES))
        field_of_option = {option: name for name, option in _OPTION_OF_FIELD.items()}
        return Options(**{field_of_option.get(name, name): value for name, value in given.items()})

    def store(self, folder: str) -> Store | None:
        """Returns the store in a folder of the cache directory; None if the cache is off, or if the user has no cache directory.

        If there are event listeners, also returns None for all folders except "tuning" and "self_tests", since cached graphs and programs
        have no line numbers of the user's code.

        Raises: OptionError if the user has chosen a directory that cannot be used.
        """
        if events.has_listeners() and folder not in ("tuning", "self_tests"):
            return None
        if self.cache is None:
            return _default_store(folder)
        path = cache_folder(folder, self.cache)
        return open_store(path) if path is not None else None

    @property
    def facts(self) -> tuple[Any, ...]:
        """The values of the options on which a compiled program depends.

        These are all options except `compile`, `executables`, `heap`, `engines`, and the directories `cache` and `dump`.
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
    """Returns the store in a folder. Calls with the same folder return the same object."""
    return Store(folder)


@functools.cache
def _default_store(folder: str) -> Store | None:
    """Returns a store in the user's cache directory; None, with a warning in the log, if there is no such directory that can be used."""
    try:
        path = cache_folder(folder, None)
        return open_store(path) if path is not None else None
    except (OptionError, RuntimeError) as error:  # RuntimeError: the user has no home
        log.warning("compiled programs are not kept for later processes: %s", error)
        return None


def documentation() -> dict[str, OptionDocumentation]:
    """Returns the documentation of each field of `Options`, by name."""
    return {item.name: item.metadata["documentation"] for item in fields(Options)}


# By field of `Options`: the option's name, if it differs from the field's name. The option has kept an old name.
_OPTION_OF_FIELD = {"implementations": "forms"}

# For each setting (an option and its value), the options that must not be turned on with it, with the reasons.
_EXCLUSIVE_OPTIONS = {
    ("compile", "background"): {
        "freeze": "freeze computes values at the first call that later calls read: leave one of the two options out",
        "tune": "tune measures, and calls that run at the same time would distort the times: leave one of the two options out",
    },
    ("distributed", "spmd"): dict.fromkeys(("compile", "freeze", "tune"), "leave one of the two options out"),
}


def _with_new_names(given: dict[str, Any]) -> dict[str, Any]:
    """Returns options with `distributed` in place of its old names `collectives` and `partition`. Raises: OptionError."""
    old_values = {name: given.pop(name) for name in ("collectives", "partition") if name in given}
    for name, value in old_values.items():
        if value not in ("torch", "xla"):
            raise OptionError(
                f"option {name}={value!r} is not valid", hint="its new name is distributed, which is 'torch', 'xla' or 'spmd'"
            )
        if "distributed" in given:
            raise OptionError(
                f"option {name} together with distributed is not supported", hint=f"leave {name} out, the old name of distributed"
            )
    if old_values == {"collectives": "torch", "partition": "xla"}:
        raise OptionError("option partition='xla' together with collectives='torch'", hint="give distributed='spmd' instead of both")
    new_value = "spmd" if old_values.get("partition") == "xla" else old_values.get("collectives", "torch")
    for name, value in old_values.items():
        _warn_deprecated(f"the option {name}={value!r} is now distributed={new_value!r}; dynaxla 0.2 removes the old name")
    return {**given, "distributed": new_value} if old_values else given


def _warn_deprecated(text: str) -> None:
    """Issues a DeprecationWarning at the user's line: the call of a compiled function, or of `compile_step`."""
    user_frames.warn_deprecated(text)


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
        _log_reduce_overhead()
    return _PRESETS[mode]


@functools.cache
def _log_reduce_overhead() -> None:
    log.info("mode='reduce-overhead' changes nothing: by default, each call of a graph runs one program, and dynaxla adds no CUDA graphs")


def _parse_pairs(text: str) -> dict[str, str]:
    """Parses "a=b,c=d". Raises: OptionError."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise OptionError(
            f"the environment variable DYNAXLA_IMPLEMENTATIONS={text!r} is not valid",
            hint='write "op=implementation,op=implementation", e.g. DYNAXLA_IMPLEMENTATIONS="convolution=xla"',
        )
    return {op.strip(): implementation.strip() for op, _, implementation in pairs}
