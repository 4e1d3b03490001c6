"""Runners that torch can pickle, for `torch.compile(...).aot_compile` and other features that pickle AOTAutograd's results.

torch pickles AOTAutograd's metadata, and lets each backend's result class pickle itself. dynaxla's class reduces itself to bytes that
contain no pickle: a hash, the graph as JSON, and the store entries of the graph's programs. The entries are records (JSON) and programs in
XLA's or StableHLO's serialised form. They cover each combination of input sizes that was compiled before the artifact was written. A
process that loads the artifact builds a new runner. The runner compiles missing programs from the graph, such as programs that call torch's
kernels, or the program of a backward pass that never ran.

Source: torch/_inductor/output_code.py (OutputCode), torch/_functorch/_aot_autograd/aot_autograd_result.py (BundledOutputCodeLoadable).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._inductor.output_code import OutputCode

from ..buffers.overlaps import AliasGuard
from ..capture.graph import AtenGraph, written_inputs
from ..capture.graph_json import Unwritable, decoded, encoded
from ..config import Options
from ..errors import ArtifactError, OptionError, UnsupportedTensor
from ..lowering import registry
from ..runtime import machine
from ..runtime.bundles import Bundle
from .protocol import Runner
from .scheduler import engine_for
from .xla import CompiledGraph, Xla

_RESULTS = "torch._functorch._aot_autograd.aot_autograd_result"
# True if this version of torch pickles the results of backends other than Inductor.
IS_POSSIBLE = importlib.util.find_spec(_RESULTS) is not None and hasattr(importlib.import_module(_RESULTS), "BundledOutputCodeLoadable")
_DIGEST_SIZE = 32
# Options that are not saved: the process that loads an artifact uses its own.
_LOCAL_OPTIONS = ("cache", "dump")


class Artifact(OutputCode):
    """A graph's runner that torch can pickle.

    Args:
        graph: The graph and its properties, as JSON values.
        options: The options of the compilation.
        bundle: The store entries of the graph's programs.

    Raises: ArtifactError for a graph that cannot be serialised; the engine's errors.
    """

    def __init__(self, graph: Mapping[str, Any], options: Options, bundle: Bundle) -> None:
        super().__init__()
        self._boxed_call = True
        self._graph, self._options, self._bundle = graph, options, bundle
        self._overlaps: AliasGuard | None = None

    @staticmethod
    def of(graph: AtenGraph, options: Options) -> Artifact:
        """Returns the artifact of a graph. Its programs are compiled for the graph's example inputs if all sizes are static."""
        if options.tune:
            raise OptionError(
                "aot_compile does not support the option tune", hint="leave tune out: it measures in the process that runs the program"
            )
        try:
            nodes = encoded(graph.module)
        except Unwritable as error:
            raise ArtifactError(
                f"{graph.name} cannot be written to a file: it has {error}",
                hint="use torch.compile(...) without aot_compile, and a cache directory (option cache) for later processes",
            ) from None
        fields = {
            "name": graph.name,
            "phase": graph.phase,
            "static": list(graph.static),
            "remade": sorted(graph.rederived_outputs),
            "written": sorted(written_inputs(graph.module.graph).values()) if graph.phase != "backward" else [],
            "nodes": nodes,
        }
        artifact = Artifact(fields, options, Bundle())
        for compiled in artifact._runner_and_graphs[1]:
            compiled.prepare()
        return artifact

    @functools.cached_property
    def _runner_and_graphs(self) -> tuple[Runner, Sequence[CompiledGraph]]:
        """The runner, and the list of its compiled graphs. The list grows when the runner compiles further graphs."""
        engine = _BundlingXla(self._options, self._bundle)
        return engine_for(self._options, innermost=engine).runner(self._aten_graph()), engine.graphs

    def _aten_graph(self) -> AtenGraph:
        fields = self._graph
        registry.fill()  # loads the modules of lowerings, some of which define ops of dynaxla
        try:
            module = decoded(fields["nodes"])
        except AttributeError as error:
            raise ArtifactError(
                f"{fields['name']} calls an op that is not registered: {error}", hint="first import the module that registers it"
            ) from error
        rederived_outputs = frozenset(fields["remade"])
        return AtenGraph(fields["name"], module, tuple(fields["static"]), fields["phase"], rederived_outputs=rederived_outputs)

    def __call__(self, inputs: list[Any]) -> Any:
        """Runs the graph.

        Raises: the errors of a runner; UnsupportedTensor for a written input that shares memory with another input or overlaps itself.
        """
        if self._graph["written"]:
            self._check_overlaps(inputs)
        return self._runner_and_graphs[0](inputs)

    def _check_overlaps(self, inputs: list[Any]) -> None:
        overlaps = self._overlaps or AliasGuard(inputs, self._graph["written"], self._graph["static"], static=True)
        if not (overlaps.found_no_overlap if self._overlaps is None else overlaps.check(inputs)):
            raise UnsupportedTensor(
                f"{self._graph['name']} writes to an input that shares memory with another input or overlaps itself",
                hint="pass a clone of that input, or use torch.compile(...) without aot_compile",
            )
        self._overlaps = overlaps

    # Methods of torch's OutputCode

    def prepare_for_serialization(self) -> None:
        """Does nothing: the artifact can always be pickled (see `__reduce__`)."""

    def post_compile(self, *_: Any, **__: Any) -> None:
        """Builds the runner when torch has loaded the artifact, so that errors are raised at load time."""
        _ = self._runner_and_graphs

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Does nothing: there are no Triton kernels."""

    def __copy__(self) -> Artifact:
        return self

    def __deepcopy__(self, _: Any) -> Artifact:
        return self

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return load, (self.content(),)

    def content(self) -> bytes:
        """Returns the artifact as bytes for `load`: a hash, a line of JSON, and the store entries."""
        entries = sorted(self._bundle.entries.items())
        header = {
            "made": _environment(),
            "options": {name: value for name, value in dataclasses.asdict(self._options).items() if name not in _LOCAL_OPTIONS},
            "graph": self._graph,
            "entries": [[folder, key, len(data)] for (folder, key), data in entries],
        }
        content = json.dumps(header).encode() + b"\n" + b"".join(data for _, data in entries)
        return hashlib.blake2b(content, digest_size=_DIGEST_SIZE).digest() + content


def load(content: bytes) -> Artifact:
    """Returns the artifact from the bytes of `Artifact.content`.

    Raises: ArtifactError for damaged bytes, and for an artifact of other versions or another processor.
    """
    body = content[_DIGEST_SIZE:]
    if content[:_DIGEST_SIZE] != hashlib.blake2b(body, digest_size=_DIGEST_SIZE).digest():
        raise ArtifactError(
            f"a compiled artifact is damaged: its hash does not match its {len(body)} bytes",
            hint="copy the file again, or compile and save it again",
        )
    line, _, rest = body.partition(b"\n")
    header = json.loads(line)
    saved, present = header["made"], _environment()
    if saved != present:
        differences = [
            f"{name} {saved.get(name)}, and this process has {value}" for name, value in present.items() if saved.get(name) != value
        ]
        raise ArtifactError(
            f"a compiled artifact was made with {'; '.join(differences)}", hint="compile and save it again in this environment"
        )
    entries, start = {}, 0
    for folder, key, size in header["entries"]:
        entries[folder, key] = rest[start : start + size]
        start += size
    return Artifact(header["graph"], Options(**header["options"]), Bundle(entries))


def _environment() -> dict[str, str]:
    """Returns the versions and the processor, which must be equal in the processes that save and load an artifact.

    Python's version is not among them, because torch itself compares it.
    """
    names = ("dynaxla", "torch", "jax", "jaxlib")
    processor = hashlib.blake2b(machine.processor_facts().encode(), digest_size=8).hexdigest()
    capability = torch.backends.cpu.get_cpu_capability()
    return {**dict(zip(names, machine.versions(), strict=True)), "the processor": f"{machine.processor_name()} ({capability}, {processor})"}


class _BundlingXla(Xla):
    """An XLA engine that lists its compiled graphs. Its stores read from a bundle first, and copy the entries that they use to it."""

    def __init__(self, options: Options, bundle: Bundle) -> None:
        super().__init__(options)
        self.store = lambda folder: bundle.in_front_of(folder, options.store(folder))
        self.graphs: list[CompiledGraph] = []

    def runner(self, graph: AtenGraph) -> CompiledGraph:
        compiled = super().runner(graph)
        self.graphs.append(compiled)
        return compiled
