"""Checks of the environment for `dynaxla doctor`. Each check returns findings: facts, problems, and how to fix the problems."""

from __future__ import annotations

import enum
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .artifact.xla_options import CPU_OPTIONS
from .backend import dynaxla
from .buffers.addresses import is_aligned
from .capture.graph_cache import foreign_kernels
from .config import Options
from .errors import OptionError
from .lowering.cpu import onednn_support
from .observe import metrics
from .runtime import clients, devices, private, streams, transfer

# The newest and the oldest releases with which dynaxla is tested, by package.
TESTED = {name: newest for name, (_, newest) in private.KNOWN.items()}
OLDEST = {name: oldest for name, (oldest, _) in private.KNOWN.items()}
OLDEST_PYTHON = (3, 11)
_OPTIONAL = ("torchvision", "timm", "transformers", "matplotlib")
_JAX_MEMORY = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
)
_BACKENDS = ("dynaxla", "dynaxla_auto", "dynaxla_retrace")
_ENTRY_POINTS = "torch_dynamo_backends"


class Status(enum.Enum):
    """The meaning of a finding.

    Attributes:
        NOTE: a fact without a judgement.
        GOOD: checked and correct.
        DOUBT: works, but slower, only in part, or untested.
        BROKEN: must be fixed.
    """

    NOTE = "-"
    GOOD = "ok"
    DOUBT = "?"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: versions, devices, backends, fast paths, kernels, caches, environment, allocator or check.
        what: the checked object, e.g. a package or a variable.
        value: the result. For a feature: "live", "gated: REASON" (available but not used), "missing", or "off" (by a setting).
        status: the meaning of the value.
        fix: a fix, or "".
    """

    topic: str
    what: str
    value: str
    status: Status = Status.NOTE
    fix: str = ""


def examine(gpu: bool = False) -> list[Finding]:
    """Returns the findings of all checks, in the order of display. Compiles and runs a tiny function on each kind of device.

    Args:
        gpu: True if torch and JAX must see an NVIDIA GPU.
    """
    examinations: list[Callable[[], Iterable[Finding]]] = [
        examine_versions, examine_devices, *([examine_gpu] if gpu else []), examine_backends, examine_fast_paths, examine_kernels,
        examine_jax_defaults, examine_caches, examine_environment, examine_allocator, examine_programs,
    ]  # fmt: skip
    findings: list[Finding] = []
    for examination in examinations:
        try:
            findings += examination()
        except Exception as error:
            what = examination.__name__.removeprefix("examine_")
            findings.append(
                Finding(what, "examination", f"{type(error).__name__}: {error}", Status.BROKEN, "report this: the doctor itself failed")
            )
    return findings


def examine_versions() -> list[Finding]:
    findings = [check_python(sys.version_info[:2])]
    found = {name: _version(name) for name in ("torch", "jax", "jaxlib", "numpy", "dynaxla", *_OPTIONAL)}
    for name in ("torch", "jax"):
        findings.append(check_version(name, found[name]))
    findings.append(check_jaxlib(found["jax"], found["jaxlib"]))
    for name in ("numpy", "dynaxla"):
        findings.append(Finding("versions", name, found[name] or "not installed as a package"))
    for name in _OPTIONAL:
        value = found[name] or "not installed: only `dynaxla bench` needs it (pip install 'dynaxla[bench]')"
        findings.append(Finding("versions", name, value))
    return findings


def check_python(version: tuple[int, ...]) -> Finding:
    if version < OLDEST_PYTHON:
        fix = f"too old: create an environment with Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
        return Finding("versions", "python", ".".join(map(str, version)), Status.BROKEN, fix)
    return Finding("versions", "python", platform.python_version(), Status.GOOD)


def check_version(name: str, version: str | None) -> Finding:
    if version is None:
        return Finding("versions", name, "not installed", Status.BROKEN, f"pip install '{name}>={OLDEST[name]}'")
    if private.release(version) < private.release(OLDEST[name]):
        return Finding("versions", name, version, Status.BROKEN, f"too old: pip install '{name}>={OLDEST[name]}'")
    if private.release(version) > private.release(TESTED[name]):
        fix = f"newer than {name} {TESTED[name]}, the newest tested release; if something fails: pip install '{name}=={TESTED[name]}.*'"
        return Finding("versions", name, version, Status.DOUBT, fix)
    return Finding("versions", name, version, Status.GOOD)


def check_jaxlib(jax_version: str | None, jaxlib_version: str | None) -> Finding:
    if jaxlib_version is None:
        return Finding("versions", "jaxlib", "not installed", Status.BROKEN, "pip install --upgrade jax jaxlib")
    if jax_version is not None and private.release(jaxlib_version) != private.release(jax_version):
        return Finding(
            "versions", "jaxlib", jaxlib_version, Status.DOUBT, f"it does not match jax {jax_version}: pip install --upgrade jax jaxlib"
        )
    return Finding("versions", "jaxlib", jaxlib_version, Status.GOOD)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine_devices() -> list[Finding]:
    cuda = torch.cuda.is_available()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU only"
    gpus = ", ".join(f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())) if cuda else ""
    findings = [Finding("devices", "torch sees", f"cpu{', ' + gpus if gpus else ''} (build: {build})", Status.GOOD)]
    if torch.version.cuda and not cuda:
        findings.append(
            Finding("devices", "torch and CUDA", "a CUDA build that finds no GPU", Status.NOTE, "nothing to do if this machine has no GPU")
        )
    for platform_name in ["cpu", *([devices.platform_of(torch.device("cuda"))] if cuda else [])]:
        findings.append(_jax_platform(platform_name))
    return [*findings, *_libtpu()]


def _libtpu() -> list[Finding]:
    """Reports libtpu, the compiler and runtime for TPUs, if it is installed. Only JAX uses it: tensors on TPUs are on the device "jax"."""
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return []
    backend = jax.default_backend()
    if backend == "tpu":
        return [Finding("devices", f"libtpu {version}", f"jax sees {', '.join(map(str, jax.local_devices()))}", Status.GOOD)]
    fix = "nothing to do if this machine has no TPU; else let the variable JAX_PLATFORMS name tpu, or unset it"
    return [Finding("devices", f"libtpu {version}", f"JAX's default backend is {backend}", Status.NOTE, fix)]


def examine_gpu() -> list[Finding]:
    """Returns the obstacles to the use of an NVIDIA GPU.

    Returns no findings if torch finds a GPU: then `examine_devices` checks if JAX sees it too.
    """
    if torch.cuda.is_available():
        return []
    if not torch.version.cuda:
        fix = "install a CUDA build of torch: https://pytorch.org/get-started"
        found = [Finding("devices", "torch and a GPU", "not a CUDA build", Status.BROKEN, fix)]
    else:
        fix = "check that nvidia-smi shows a GPU, that its driver supports this CUDA, and that CUDA_VISIBLE_DEVICES does not hide it"
        found = [Finding("devices", "torch and a GPU", f"CUDA {torch.version.cuda} finds no GPU", Status.BROKEN, fix)]
    return [*found, _jax_platform("cuda")]


def _jax_platform(name: str) -> Finding:
    try:
        # The runtime keeps JAX from preallocating the GPU's memory when it creates its client.
        devices.jax_device(torch.device("cpu" if name == "cpu" else "cuda"))
        found = jax.local_devices(backend=name)
    except Exception as error:
        if name == "cpu":
            fix = "unset JAX_PLATFORMS, or add cpu to it" if os.environ.get("JAX_PLATFORMS") else "pip install --upgrade jax jaxlib"
        else:
            cuda_major = (torch.version.cuda or "13").partition(".")[0]
            plugin = f"jax[cuda{cuda_major}]" if name == "cuda" else f"jax[{name}]"
            fix = f"JAX does not see a GPU: pip install '{plugin}'"
        return Finding("devices", f"jax sees {name}", str(error).partition("\n")[0], Status.BROKEN, fix)
    return Finding("devices", f"jax sees {name}", ", ".join(map(str, found)), Status.GOOD)


def examine_backends(listed: Iterable[str] | None = None, entry_points: Iterable[str] | None = None) -> list[Finding]:
    """Checks that torch.compile finds dynaxla's backends.

    Args:
        listed: the backends that torch lists. Default: the backends in this process.
        entry_points: the names of the installed entry points. Default: the entry points of this environment.
    """
    if listed is None:
        listed = torch._dynamo.list_backends()
    if entry_points is None:
        entry_points = [point.name for point in importlib.metadata.entry_points(group=_ENTRY_POINTS)]
    listed, entry_points = set(listed), set(entry_points)
    findings = []
    for name in _BACKENDS:
        if name in listed:
            findings.append(Finding("backends", name, f'found by torch.compile(model, backend="{name}")', Status.GOOD))
        elif name in entry_points:
            fix = "torch looked for backends before dynaxla was installed: restart the process"
            findings.append(Finding("backends", name, "installed, but torch does not list it", Status.BROKEN, fix))
        else:
            fix = "a copy on the import path is not enough: pip install dynaxla, or pip install -e . in its source"
            findings.append(Finding("backends", name, f"no entry point in the group {_ENTRY_POINTS}", Status.BROKEN, fix))
    return findings


def examine_fast_paths(paths: Mapping[str, str] | None = None, missing: Iterable[str] | None = None) -> list[Finding]:
    """Checks the fast paths, which are private APIs with a public alternative, and finds missing private APIs without an alternative.

    Args:
        paths: the states of the fast paths by name, as `private.fast_paths` returns them. Default: the states after the self-tests.
        missing: the names of private APIs. Default: the private APIs that this environment lacks.
    """
    if paths is None:
        clients.cpu_device()  # runs the self-tests
        paths = private.fast_paths()
    slow_hint = (
        f"a slower public API is used: calls work but take longer; the tested releases are jax {TESTED['jax']} and torch {TESTED['torch']}"
    )
    broken_hint = (
        f"features that need it fail: install jax {OLDEST['jax']} to {TESTED['jax']} and torch {OLDEST['torch']} to {TESTED['torch']}"
    )
    return [
        Finding("fast paths", name, "missing, without a replacement", Status.BROKEN, broken_hint)
        for name in (private.missing if missing is None else missing)
    ] + [
        Finding("fast paths", name, state, *((Status.GOOD,) if state == "live" else (Status.DOUBT, slow_hint)))
        for name, state in paths.items()
    ]


def examine_caches() -> list[Finding]:
    """Checks that the cache directory can be used, and that traced graphs are cached, too."""
    if os.environ.get("DYNAXLA_CACHE") == "":
        return [Finding("caches", "programs and traced graphs", "off: DYNAXLA_CACHE is empty")]
    try:
        store = Options().store("programs")
    except OptionError as error:
        return [Finding("caches", "programs and traced graphs", f"broken: {error.message}", Status.BROKEN, error.hint)]
    if store is None:
        fix = "the warning above has the reason; set DYNAXLA_CACHE to another directory"
        return [Finding("caches", "programs and traced graphs", "off: the user has no cache directory", Status.DOUBT, fix)]
    found = [Finding("caches", "programs", f"live: {store.folder.parent}", Status.GOOD)]
    if others := foreign_kernels():
        value = f"gated: a package other than torch has registered kernels from Python: {', '.join(others[:3])}"
        found.append(Finding("caches", "traced graphs", value, Status.NOTE))
    else:
        found.append(Finding("caches", "traced graphs", "live", Status.GOOD))
    return found


def examine_kernels() -> list[Finding]:
    if reason := onednn_support.why_not():
        fix = "nothing to do if this machine is not x86-64; without oneDNN, XLA's own kernels run, and most of them are slower"
        return [Finding("kernels", "oneDNN inside XLA:CPU", f"gated: {reason}", Status.DOUBT, fix)]
    return [Finding("kernels", "oneDNN inside XLA:CPU", "live: computes convolutions and matrix products", Status.GOOD)]


def examine_jax_defaults(add: Callable[[Any, Any], Any] | None = None) -> list[Finding]:
    """Checks a sum that some releases of XLA:CPU compute wrongly with default options, which dynaxla's own programs do not use.

    Args:
        add: computes sum(q * k.reshape(1, 1, 64, 8, 8)) over dimension 3. Default: a function that JAX compiles for the CPU.
    """
    with jax.default_device(clients.cpu_device()):
        found = (add or jax.jit(lambda q, k: (q * k.reshape(1, 1, 64, 8, 8)).sum(3)))(
            np.ones((1, 2, 1, 8, 8), np.float32), np.ones((1, 64, 64), np.float32)
        )
    if np.array_equal(found, np.full((1, 2, 64, 8), 8)):
        return []
    fix = (
        "only programs that JAX compiles for the CPU by itself can be wrong, such as functions of dynaxla.to_jax under jax.jit: "
        f"use jax 0.12, or set XLA_FLAGS={' '.join(f'--{name}={value}' for name, value in CPU_OPTIONS.items())}"
    )
    return [Finding("kernels", "sums under jax.jit", "wrong with this release of JAX on this processor", Status.NOTE, fix)]


def examine_environment(variables: Mapping[str, str] | None = None, cuda: bool | None = None) -> list[Finding]:
    """Checks the environment variables that affect dynaxla.

    Args:
        variables: the environment. Default: `os.environ`.
        cuda: True if torch has a GPU. Default: `torch.cuda.is_available()`.
    """
    variables = os.environ if variables is None else variables
    cuda = torch.cuda.is_available() if cuda is None else cuda
    findings = []

    def found(name: str, status: Status, fix: str = "") -> None:
        findings.append(Finding("environment", name, variables[name], status, fix))

    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if variables.get(name, "0") == "1":
            found(name, Status.BROKEN, f"torch.compile does nothing while it is set: unset {name}")
    platforms = variables.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        found("JAX_PLATFORMS", Status.DOUBT, f"CPU tensors cannot be compiled: set JAX_PLATFORMS={platforms},cpu, or unset it")
    elif platforms:
        found("JAX_PLATFORMS", Status.NOTE)
    for name in _JAX_MEMORY:
        if name not in variables:
            continue
        if cuda and name == "XLA_PYTHON_CLIENT_PREALLOCATE" and variables[name].lower() not in ("false", "0"):
            found(
                name,
                Status.DOUBT,
                "JAX takes most of the GPU's memory when it starts, and torch runs out of memory: set it to false, or unset it",
            )
        elif cuda and "MEM_FRACTION" in name and "XLA_PYTHON_CLIENT_PREALLOCATE" not in variables:
            found(
                name,
                Status.DOUBT,
                "JAX takes this share of the GPU's memory when it starts: set XLA_PYTHON_CLIENT_PREALLOCATE=false to let it grow",
            )
        else:
            found(name, Status.NOTE)
    for name in ("XLA_FLAGS", "PJRT_NPROC", "JAX_ENABLE_X64", "DYNAXLA_DUMP", "TORCH_LOGS"):
        if name in variables:
            found(name, Status.NOTE)
    if "LD_PRELOAD" in variables:
        found("LD_PRELOAD", Status.NOTE, "if it replaces malloc, see the allocator below")
    return findings or [Finding("environment", "variables", "no variable that affects dynaxla is set", Status.GOOD)]


def examine_allocator(tensors: Sequence[torch.Tensor] | None = None) -> list[Finding]:
    """Checks that torch's allocator aligns CPU tensors so that XLA can share their memory.

    Args:
        tensors: newly allocated tensors on the CPU. Default: tensors of a few sizes.
    """
    if tensors is None:
        tensors = [torch.empty(size) for size in (1, 3, 17, 100, 1000, 4099, 100_003, 1_000_001)]
    misaligned = sum(not is_aligned(tensor) for tensor in tensors)
    if misaligned:
        fix = (
            f"XLA shares memory only at multiples of {transfer.ALIGNMENT} bytes, so these are copied at each call: "
            "remove the allocator that replaces torch's (LD_PRELOAD)"
        )
        return [Finding("allocator", "torch's CPU memory", f"{misaligned} of {len(tensors)} tensors misaligned", Status.DOUBT, fix)]
    return [Finding("allocator", "torch's CPU memory", f"aligned to {transfer.ALIGNMENT} bytes", Status.GOOD)]


def examine_programs(backend: Callable[..., Any] | None = None) -> list[Finding]:
    """Compiles and runs x * 2 + 1 on each kind of device.

    Args:
        backend: a backend of torch.compile. Default: `dynaxla`.
    """
    findings = []
    for name in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        try:
            is_correct, copies = _run_program(torch.device(name), backend or dynaxla)
        except Exception as error:
            fix = "fix the devices above and the steps below that do not work; if all of them work, report this"
            findings.append(Finding("check", f"x * 2 + 1 on {name}", f"{type(error).__name__}: {str(error).strip()}", Status.BROKEN, fix))
            findings += examine_steps(torch.device(name))
            continue
        value = "compiled, and the result is right" if is_correct else "compiled, and the result is wrong"
        fix = "" if is_correct else "do not use this installation; report it with the versions above"
        findings.append(Finding("check", f"x * 2 + 1 on {name}", value, Status.GOOD if is_correct else Status.BROKEN, fix))
        value_text = "the input was shared with XLA" if not copies else f"the input was copied ({copies} copies in 3 calls)"
        fix = "" if not copies else "calls work but take longer: see the fast paths and the allocator above"
        findings.append(Finding("check", f"zero-copy on {name}", value_text, Status.DOUBT if copies else Status.GOOD, fix))
    return findings


def examine_steps(device: torch.device) -> list[Finding]:
    """Runs each step of a call on a device separately, to find the step that fails."""
    numbers = np.arange(8, dtype=np.float32)

    def array_on_xla() -> jax.Array:
        return jax.device_put(numbers, devices.jax_device(device))

    def import_tensor(with_stream: bool = False) -> jax.Array:
        xla_device = devices.jax_device(device)
        stream = streams.of(devices.with_index(device), xla_device).stream_for_import() if with_stream else None
        return transfer.import_tensor(torch.from_numpy(numbers).to(device), xla_device, stream)

    steps: dict[str, Callable[[], Any]] = {
        "JAX alone": lambda: jax.jit(lambda x: x + 0)(array_on_xla()),
        "torch's memory handed to XLA": import_tensor,
        **({"torch's memory handed to XLA, ordered by a stream": lambda: import_tensor(with_stream=True)} if device.type == "cuda" else {}),
        "XLA's memory handed to torch": lambda: transfer.export_array(array_on_xla(), 1 if device.type == "cuda" else None),
    }
    findings = []
    for name, step in steps.items():
        try:
            total = float(step().sum())
        except Exception as error:
            value, status = f"{type(error).__name__}: {str(error).strip()}", Status.BROKEN
        else:
            is_right = total == numbers.sum()
            value, status = ("works", Status.GOOD) if is_right else (f"gives {total} instead of {numbers.sum()}", Status.BROKEN)
        fix = "" if status is Status.GOOD else "this step fails: report it with the versions above"
        findings.append(Finding("check", f"{name} ({device})", value, status, fix))
    return findings


def _run_program(device: torch.device, backend: Callable[..., Any]) -> tuple[bool, int]:
    """Compiles and runs a function three times, with in-place changes of its input.

    Returns: True if all results are correct; the number of copied inputs.
    """

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    compiled = torch.compile(function, backend=backend)
    before = metrics.snapshot().get("input_copies", 0)
    x = torch.arange(1024, dtype=torch.float32, device=device)
    is_correct = True
    for _ in range(3):
        is_correct = is_correct and torch.equal(compiled(x), function(x))
        x.add_(1)
    return is_correct, metrics.snapshot().get("input_copies", 0) - before


_STYLES = {Status.NOTE: "dim", Status.GOOD: "green", Status.DOUBT: "yellow", Status.BROKEN: "bold red"}


def as_dict(finding: Finding) -> dict[str, str]:
    """Returns the finding for JSON; `status` is "note", "good", "doubt" or "broken"."""
    return {**asdict(finding), "status": finding.status.name.lower()}


# The minimum width of a console, in columns, for a table with one column per fact. A narrower table would split names.
_TABLE_WIDTH = 100


def show(findings: Iterable[Finding], console: Console) -> None:
    """Prints all findings, and then the fixes of findings that are in doubt or broken."""
    findings = list(findings)
    console.print(_table(findings) if console.width >= _TABLE_WIDTH else _narrow_table(findings))
    fixable = [finding for finding in findings if finding.status in (Status.DOUBT, Status.BROKEN)]
    if not fixable:
        console.print("Nothing is wrong.", style="bold green")
    for finding in fixable:
        console.print(Text(f"{finding.status.value:>6}  {finding.what}: {finding.value}"), style=_STYLES[finding.status])
        console.print(Text(f"        {finding.fix}"))


def _table(findings: Iterable[Finding]) -> Table:
    """Returns a table with the columns topic, what, value and status."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for wraps in (False, True, True, False):
        table.add_column(no_wrap=not wraps, overflow="fold")
    topic = ""
    for finding in findings:
        cells = ("" if finding.topic == topic else finding.topic, finding.what, finding.value, finding.status.value)
        # Text, not str, since rich would read brackets, as in dynaxla[bench], as markup.
        table.add_row(*map(Text, cells), style=_STYLES[finding.status])
        topic = finding.topic
    return table


def _narrow_table(findings: Iterable[Finding]) -> Table:
    """Returns a table with the columns status and text, and a separate row above the findings of each topic."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            table.add_row("", Text(f"{finding.topic}:"))
        table.add_row(Text(finding.status.value), Text(f"{finding.what}: {finding.value}"), style=_STYLES[finding.status])
        topic = finding.topic
    return table
