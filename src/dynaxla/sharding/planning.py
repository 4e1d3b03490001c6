"""Searches for a sharding of a training step's parameters and batch on a mesh. XLA compiles the candidates, which do not run."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..config import Options
from ..device import storages
from ..device.strided_memory import StridedView
from ..engine.build import compile_for_planning
from ..engine.executable import Executable
from ..engine.options import quick_options
from ..engine.xla import CompiledGraph
from ..errors import ArgumentError, CaptureError
from ..guards.observation import Refused
from ..training.replayed_steps import StepPrograms
from ..training.step import CompiledStep
from . import traffic
from .marking import mark_sharding, shard_module
from .mesh import Mesh
from .placements import ParameterGroup, Placement, PlacementChoices, groups_of
from .text_tables import table, text_of
from .traffic import CollectiveTraffic, DeviceMemory
from .virtual_tensors import Dims, bytes_of_inputs, storage_key, virtual_inputs

_log = logging.getLogger("dynaxla")


@dataclass(frozen=True)
class Costs:
    """The cost model of a program, in seconds: flops / flops_per_second + bytes / bytes_per_second + collectives * seconds_per_collective.

    All three quantities are those of one device:

    - flops: The operations that XLA counts. The body of a loop counts once.
    - bytes: The data that the device sends in ring algorithms. For a result of b bytes among n devices: 2 b (n - 1) / n in an all-reduce,
      b (n - 1) in a reduce-scatter, b in a permute, and b (n - 1) / n in all other collectives.
    - collectives: The number of collectives.

    The model ignores memory bandwidth, and the overlap of computation and communication. The defaults are round numbers for a GPU in a
    machine with several GPUs.
    """

    flops_per_second: float = 1e14
    bytes_per_second: float = 1e11
    seconds_per_collective: float = 1e-5


@dataclass(frozen=True)
class PlacementTrial:
    """The result of trying a placement.

    A placement whose inputs alone do not fit into memory was not compiled. `memory` is then the size of the inputs, and `seconds` is
    infinite.

    Attributes:
        description: A description of the placement. "3, but ..." means the placement of the third trial with one change.
        memory: The bytes that the program needs on each device.
        seconds: The time by the cost model.
        flops: The operations of each device.
        moved: The bytes that each device sends.
        collectives: The number of collectives of each device.
    """

    description: str
    memory: int
    seconds: float = math.inf
    flops: float = 0.0
    moved: int = 0
    collectives: int = 0


@dataclass(frozen=True)
class Plan:
    """A sharding of parameters and a batch on a mesh. Its text is a table of all trials.

    Attributes:
        mesh: The mesh.
        specs: Specs by parameter name, for `shard_module`.
        inputs: The specs of the tensors among the step's arguments, in order.
        trial: The trial of this placement.
        collectives: The collectives of the program for this placement.
        memory: The memory of the program, in bytes.
        trials: All trials, in order.
    """

    mesh: Mesh
    specs: Mapping[str, tuple[Any, ...]]
    inputs: tuple[tuple[Any, ...], ...]
    trial: PlacementTrial
    collectives: tuple[CollectiveTraffic, ...]
    memory: DeviceMemory
    trials: tuple[PlacementTrial, ...]

    def apply(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> nn.Module:
        """Shards a model's parameters as planned, and optimizer state like the parameters. Buffers are replicated on each device.

        Raises the exceptions of `shard_module`.
        """
        shard_module(model, self.mesh, self.specs)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter, state in [item for optimizer in optimizers for item in optimizer.state.items() if id(item[0]) in names]:
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor) and storages.is_jax_tensor(tensor) and tensor.shape == parameter.shape:
                    mark_sharding(tensor, self.mesh, self.specs.get(names[id(parameter)], ()))
        return model

    def apply_to_inputs(self, *args: Any, **kwargs: Any) -> None:
        """Shards a step's arguments as planned. Raises the exceptions of `mark_sharding`."""
        for tensor, spec in zip(_tensors((args, kwargs)), self.inputs, strict=True):
            if storages.is_jax_tensor(tensor):
                mark_sharding(tensor, self.mesh, spec)

    def __str__(self) -> str:
        trials_table = table(
            "", "tried", "memory", "microseconds", "flops", "moved", "collectives", title=f"Placements on {self.mesh}, by device"
        )
        for number, trial in enumerate(self.trials, 1):
            mark = f"{number} *" if trial is self.trial else str(number)
            time = f"{trial.seconds * 1e6:,.2f}" if math.isfinite(trial.seconds) else "not compiled"
            figures = (f"{trial.flops:,.0f}", f"{trial.moved:,}", str(trial.collectives)) if math.isfinite(trial.seconds) else ("", "", "")
            trials_table.add_row(mark, trial.description, f"{trial.memory:,}", time, *figures)
        return text_of(trials_table)


def plan(
    step: Callable[..., Any],
    *args: Any,
    mesh: Any,
    memory: int | None = None,
    model: nn.Module | None = None,
    costs: Costs | None = None,
    compilations: int = 60,
    **kwargs: Any,
) -> Plan:
    """Searches for the sharding of a step's parameters and batch on a mesh that takes the least time (`Costs`) and fits into memory.

    The search first tries data parallelism, fully sharded parameters, pairs of matrices split by rows and by columns (tensor parallelism),
    and combinations of these. It then makes single changes to the best placement, as long as one of them is an improvement. Optimizer state
    and gradients are sharded like their parameters. Buffers are replicated. Tensors, modules, optimizers and random number generators are
    left unchanged. The trials are logged (INFO).

    Args:
        step: The result of compile_step, or a function that could be given to compile_step. It is recorded, as at a first call, and does
            not run.
        args: The positional arguments of a call of the step.
        kwargs: The keyword arguments of a call of the step.
        mesh: A `Mesh`, or torch's DeviceMesh with named dimensions.
        memory: The bytes that a program may need on each device; None for no limit.
        model: The module whose parameters are placed; by default the only module that the step reads.
        costs: The parameters of the cost model; see `Costs`.
        compilations: The maximum number of placements that XLA compiles.

    Raises:
        ArgumentError: `compilations` is not positive, no trial fits into `memory` (the message names the smallest trial), the step is not
            compiled to exactly one program, `model` is not given and the step does not read exactly one module with parameters, a parameter
            of the model is not on the device "jax", or a batch tensor does not fill its storage.
        CaptureError: The step cannot be recorded.
    """
    if compilations < 1:
        raise ArgumentError(f"compilations={compilations} allows no trial", hint="leave it out, or give a positive number")
    search = _PlacementSearch(_RecordedStep.of(step, args, kwargs, model), Mesh.of(mesh), memory, costs or Costs(), compilations)
    return search.run()


class _RecordedStep:
    """A step that is recorded as one program, which the search compiles for each placement.

    Attributes:
        program: The program.
        program_inputs: The inputs of one call of the program.
        model: The module whose parameters are placed.
        parameter_of: The name of the parameter like which a tensor is sharded, by the tensor's `storage_key`. The tensors are the
            parameters, and those of their gradients and optimizer state that have the parameter's shape.
        argument_tensors: The tensors among the step's arguments.
    """

    def __init__(
        self,
        program: CompiledGraph,
        program_inputs: list[Any],
        model: nn.Module,
        parameter_of: Mapping[int, str],
        argument_tensors: list[torch.Tensor],
    ) -> None:
        self.program = program
        self.program_inputs = program_inputs
        self.model = model
        self.parameter_of = parameter_of
        self.argument_tensors = argument_tensors

    @staticmethod
    def of(step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], model: nn.Module | None) -> _RecordedStep:
        """Records a step. Takes the arguments of `plan` with these names. Raises ArgumentError and CaptureError as `plan` does."""
        function, options = (step._function, step._options) if isinstance(step, CompiledStep) else (step, Options())
        quick = quick_options() if _platform() == "cpu" else {}  # the code never runs, so only compile time matters
        options = dataclasses.replace(options, cache="", dump=None, tune=False, xla={**quick, **options.xla})
        programs = StepPrograms(function, options)
        try:
            dry_run, (module, parameter_of) = programs.dry_run(args, kwargs, lambda walk: _model_and_state(walk, model))
        except Refused as error:
            hint = "do that outside of the step: a plan is made for a step that is one program"
            raise CaptureError(
                f"the step does something that a program cannot repeat: {error}", where=error.effect.where, hint=hint
            ) from None
        if dry_run is None:
            raise ArgumentError(
                f"{getattr(function, '__name__', function)!r} runs no XLA program: torch's kernels run it, or it computes nothing",
                hint="pass a training step that compiles to one program; the logger dynaxla says why torch runs a graph",
            )
        if not isinstance(dry_run.program, CompiledGraph):
            causes = "ops that no program can contain, tensors on several devices, numbers that only Python computes, freeze and exact_rng"
            hint = f"change what splits the step; possible causes: {causes}"
            raise ArgumentError(
                f"{getattr(function, '__name__', function)!r} is compiled to several programs, and a plan is for one program", hint=hint
            )
        return _RecordedStep(dry_run.program, dry_run.inputs, module, parameter_of, _tensors((args, kwargs)))


def _platform() -> str:
    import jax

    return jax.local_devices()[0].platform


def _model_and_state(walk: Any, model: nn.Module | None) -> tuple[nn.Module, dict[int, str]]:
    """Returns the model that a step reads, and `_RecordedStep.parameter_of`.

    Args:
        walk: The walk over the objects that the step reads.
        model: The model that the user gave, or None.

    Raises:
        ArgumentError: The step reads no module with parameters, or several, or the model is not on the device "jax".
    """
    if model is None:
        modules = [value for value in walk.objects.values() if isinstance(value, nn.Module)]
        inner = {id(child) for module in modules for child in module.modules() if child is not module}
        outer = list({id(module): module for module in modules if id(module) not in inner}.values())
        outer = [module for module in outer if any(True for _ in module.parameters())]
        if len(outer) != 1:
            kinds = ", ".join(type(module).__name__ for module in outer) or "none"
            raise ArgumentError(f"the step reads {len(outer)} modules with parameters ({kinds})", hint="choose one: plan(..., model=model)")
        model = outer[0]
    for name, parameter in model.named_parameters():
        if not storages.is_jax_tensor(parameter):
            raise ArgumentError(
                f'the parameter {name} is on {parameter.device}, and a plan needs the whole model on the device "jax"',
                hint='call dynaxla.device.enable() and model.to("jax")',
            )
    parameter_of: dict[int, str] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = [(parameter, state) for optimizer in walk.optimizers.values() for parameter, state in optimizer.state.items()]
    for parameter, state in [*((parameter, {}) for parameter in model.parameters()), *states]:
        if (name := names.get(id(parameter))) is not None:
            for tensor in (parameter, parameter.grad, *state.values()):
                if isinstance(tensor, torch.Tensor) and storages.is_jax_tensor(tensor) and tensor.shape == parameter.shape:
                    parameter_of[storage_key(tensor)] = name
    return model, parameter_of


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


class _PlacementSearch:
    """A search for the best placement of a recorded step. The other arguments are those of `plan`."""

    def __init__(self, recorded: _RecordedStep, mesh: Mesh, memory: int | None, costs: Costs, compilations: int) -> None:
        self._recorded, self._mesh, self._memory, self._costs, self._max_compilations = recorded, mesh, memory, costs, compilations
        self._groups: list[ParameterGroup] = groups_of(recorded.model)
        # The size of the first dimension of the first tensor argument with dimensions. The tensor arguments on the device "jax" whose first
        # dimension has this size are the batch.
        self._batch_size = next((tensor.shape[0] for tensor in recorded.argument_tensors if tensor.dim()), None)
        for tensor in recorded.argument_tensors:
            if self._is_batch(tensor) and not StridedView.of(tensor).fills(tensor.untyped_storage().nbytes()):
                raise ArgumentError(
                    f"an argument of shape {list(tensor.shape)} is a view of a part of another tensor, so it cannot be on a mesh by itself",
                    hint="pass a copy to the step: x.clone()",
                )
        self._choices = PlacementChoices(self._groups, mesh, self._batch_size)
        self._tried: dict[Placement, PlacementTrial] = {}
        self._compilation_count = 0
        self._traced: Any = None  # the traced step, which all compilations share
        self._best: tuple[Placement, Executable] | None = None  # the best placement that fits into memory, and its program

    def run(self) -> Plan:
        """Searches as `plan` describes. Raises: ArgumentError if no trial fits into memory."""
        starting_points = self._choices.starting_points()
        for description, placement in sorted(starting_points.items(), key=lambda item: self._input_bytes(item[1])):
            self._try(description, placement)
        best = min(self._tried, key=self._score)
        is_better = True
        while is_better and self._compilation_count < self._max_compilations:
            is_better = False
            number = list(self._tried).index(best) + 1  # in the order of trials
            for description, placement in self._untried_neighbors(best):
                self._try(f"{number}, but {description}", placement)
                if placement in self._tried and self._score(placement) < self._score(best):
                    best, is_better = placement, True
                    break
        if self._best is None or self._excess(self._tried[best]):
            raise self._no_fit_error()
        return self._plan(*self._best)

    def _untried_neighbors(self, placement: Placement) -> Iterator[tuple[str, Placement]]:
        for description, other in self._choices.neighbors(placement):
            if self._compilation_count >= self._max_compilations:
                return
            if other not in self._tried:
                yield description, other

    def _try(self, description: str, placement: Placement) -> None:
        """Compiles a placement, unless its inputs alone do not fit into memory, and stores its trial.

        Does nothing for a placement that was tried already, or if no compilations are left.
        """
        if placement in self._tried or self._compilation_count >= self._max_compilations:
            return
        input_bytes = self._input_bytes(placement)
        if self._memory is not None and input_bytes > self._memory:
            trial, executable = PlacementTrial(description, input_bytes), None
        else:
            self._compilation_count += 1
            trial, executable = self._compile(description, placement)
        self._tried[placement] = trial
        _log.info(
            "plan: after %d of %d compilations: %s: %d bytes, %g s",
            self._compilation_count,
            self._max_compilations,
            description,
            trial.memory,
            trial.seconds,
        )
        if executable is not None and not self._excess(trial) and min(self._tried, key=self._score) == placement:
            self._best = placement, executable

    def _compile(self, description: str, placement: Placement) -> tuple[PlacementTrial, Executable]:
        """Compiles the step for a placement. Returns the trial, with the program's memory and cost, and the program."""
        program = self._recorded.program
        inputs = virtual_inputs(self._recorded.program_inputs, self._mesh, self._dims_by_storage(placement))
        executable, self._traced = compile_for_planning(program.unit, program.unit.specialise(inputs), self._traced)
        assert executable.program is not None
        collectives, memory = traffic.collectives_of(executable), traffic.memory_of(executable)
        flops = float(executable.program.costs().get("flops", 0.0))
        moved = sum(self._bytes_sent(item) for item in collectives)
        count = sum(item.count for item in collectives)
        costs = self._costs
        seconds = flops / costs.flops_per_second + moved / costs.bytes_per_second + count * costs.seconds_per_collective
        return PlacementTrial(description, memory.arguments + memory.results + memory.temporary, seconds, flops, moved, count), executable

    def _bytes_sent(self, item: CollectiveTraffic) -> int:
        """Returns the bytes that a device sends: see `Costs`. A collective whose axes are not known counts as one over the whole mesh."""
        sizes = dict(zip(self._mesh.names, self._mesh.sizes, strict=True))
        names = item.axes.split(", ")
        count = math.prod(sizes[name] for name in names) if all(name in sizes for name in names) else math.prod(self._mesh.sizes)
        factors = {"all-reduce": 2 * (count - 1) / count, "reduce-scatter": count - 1, "collective-permute": 1}
        return round(item.bytes * factors.get(item.kind, (count - 1) / count))

    def _score(self, placement: Placement) -> tuple[float, float, int]:
        """Returns the sort key of a placement that was tried: the best placement has the smallest key."""
        trial = self._tried[placement]
        return self._excess(trial), trial.seconds, trial.memory

    def _excess(self, trial: PlacementTrial) -> int:
        """Returns the number of bytes by which a trial exceeds the memory limit."""
        return 0 if self._memory is None else max(0, trial.memory - self._memory)

    def _input_bytes(self, placement: Placement) -> int:
        return bytes_of_inputs(self._recorded.program_inputs, self._mesh, self._dims_by_storage(placement))

    def _dims_by_storage(self, placement: Placement) -> dict[int, Dims]:
        """Returns the mesh axes of each dimension of parameters, gradients, optimizer state and batch, by `storage_key`."""
        by_name = self._dims_by_name(placement)
        dims_of_parameters = {key: by_name[name] for key, name in self._recorded.parameter_of.items()}
        return dims_of_parameters | {
            storage_key(tensor): self._input_dims(tensor, placement) for tensor in self._recorded.argument_tensors if self._is_batch(tensor)
        }

    def _is_batch(self, tensor: torch.Tensor) -> bool:
        return storages.is_jax_tensor(tensor) and tensor.dim() > 0 and tensor.shape[0] == self._batch_size

    def _input_dims(self, tensor: torch.Tensor, placement: Placement) -> Dims:
        return (placement.batch,) if self._is_batch(tensor) and placement.batch else ()

    def _dims_by_name(self, placement: Placement) -> dict[str, Dims]:
        """Returns the mesh axes of each dimension of all parameters, by name."""
        by_name: dict[str, Dims] = {}
        for group, dims in zip(self._groups, placement.dims, strict=True):
            by_name.update(dict.fromkeys(group.names, dims))
            by_name.update(dict.fromkeys(group.followers, dims[:1]))
        return by_name

    def _no_fit_error(self) -> ArgumentError:
        smallest = min(self._tried.values(), key=lambda trial: trial.memory)
        needs = "needs" if math.isfinite(smallest.seconds) else "reads"
        return ArgumentError(
            f"none of {len(self._tried)} placements on {self._mesh} fits into {self._memory} bytes on each device: "
            f"{smallest.description!r}, the smallest one, {needs} {smallest.memory} bytes",
            hint="use more memory, more devices, a smaller batch, or more compilations",
        )

    def _plan(self, placement: Placement, executable: Executable) -> Plan:
        specs = {name: _spec(dims) for name, dims in self._dims_by_name(placement).items() if any(dims)}
        inputs = tuple(_spec(self._input_dims(tensor, placement)) for tensor in self._recorded.argument_tensors)
        collectives = tuple(traffic.collectives_of(executable))
        trials = tuple(self._tried.values())
        return Plan(self._mesh, specs, inputs, self._tried[placement], collectives, traffic.memory_of(executable), trials)


def _spec(dims: Dims) -> tuple[Any, ...]:
    """Returns the axes of each dimension as a spec for `mark_sharding`."""
    return tuple(None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims)
