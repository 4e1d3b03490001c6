"""Exported models: a program with its weights. They are saved, loaded and called without torch."""

from __future__ import annotations

import builtins
import os
import shutil
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from . import manifest as manifests
from .manifest import DTYPES, NARROW_DTYPES, ArraySpec, DamagedModelError, Manifest
from .stablehlo import as_jax_exported
from .structures import StructureMismatch, flatten, unflatten
from .xla_options import jit_with_cpu_options

MANIFEST, PROGRAM, WEIGHTS = "manifest.json", "program.mlirbc", "weights.safetensors"
_MAGIC = b"dynaxla.exported\n"
_EXPORT_AGAIN = "export the model again with this dynaxla, or copy the whole directory again if a file is damaged"


class ExportedModel:
    """A model as a StableHLO program, with its weights. `dynaxla.export` and `dynaxla.load` return such objects.

    Attributes:
        manifest: the names, shapes and dtypes of all inputs, outputs and weights.
        weights: the weights that the program takes, as NumPy arrays by name. The caller must not write to them.
    """

    def __init__(self, manifest: Manifest, program: bytes, weights: Mapping[str, np.ndarray]) -> None:
        """Checks the weights against the manifest, and that the program (serialized StableHLO) calls no forbidden function.

        Raises: ArtifactError if a weight is missing or has another shape or dtype, or if the program cannot be read or calls a function
        that an exported program must not call.
        """
        self.manifest = manifest
        self.weights = dict(weights)
        self._program = program
        for spec in manifest.weights:
            _check_weight(spec, self.weights.get(spec.name))
        try:
            self._exported = as_jax_exported(manifest, program)
        except DamagedModelError as error:
            raise _artifact_error(str(error), _EXPORT_AGAIN) from None
        self._function = _refuse_derivatives(self._exported.call, manifest.name)
        self._run = jit_with_cpu_options(self._function)
        self._device_weights: list[jax.Array] | None = None
        self._device_weights_lock = threading.Lock()

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms on which the program runs, by JAX's names."""
        return self.manifest.platforms

    def mlir_text(self) -> str:
        """Returns the program as StableHLO text."""
        text: str = self._exported.mlir_module()
        return text

    def call(self, *args: Any, key: Any = None, weights: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Calls the model, also under `jax.jit`.

        The program computes with the dtypes of its manifest, and its results have these dtypes, even if JAX's 64-bit types are off in this
        process. JAX arrays then have at most 32 bits, so a 32-bit array is accepted for a 64-bit input (int32 for int64), and widened.

        Args:
            args: the positional arguments, in the structure of the arguments at export, with NumPy or JAX arrays in place of tensors.
            key: a key of `jax.random`, for a model that draws random numbers.
            weights: new values for some of the weights, by name, e.g. the updates of an earlier call.
            kwargs: the keyword arguments, in the same way.

        Returns: the results in tuples, lists and dicts, with JAX arrays in place of tensors. For a model that writes to its buffers, as
        batch norms do in training, returns (results, updates). `updates` has the new values of these buffers, by name.

        Raises: ArtifactError for unsuitable arguments, and if JAX differentiates the call; the error of eager mode for values that the
        model rejects, such as IndexError for an index out of range (not under `jax.jit`, where such values are not detected).
        """
        manifest = self.manifest
        arguments = self._arguments(args, kwargs)
        self._check_sizes(arguments)
        with jax.enable_x64(True):
            program_inputs = [*self._weights(weights or {}), *([_key_data(key)] if self._takes_key(key) else []), *arguments]
            outputs = iter(self._run(*program_inputs))
        results = unflatten(manifest.results, outputs)
        updates = {name: next(outputs) for name in manifest.updates}
        if manifest.checks:
            self._raise_failed_check(next(outputs))
        return (results, updates) if manifest.updates else results

    def compiled_for(self, device: jax.Device, shapes: Sequence[Sequence[int]]) -> jax.stages.Compiled:
        """Compiles the program for a device of a topology (jax.experimental.topologies), which need not exist. The result cannot be called.

        Args:
            device: the device.
            shapes: the shape of each of the manifest's inputs.

        Raises: ArtifactError if the program is not for the device's platform; jax.errors.JaxRuntimeError from XLA's compiler, also if the
        program needs more memory than the device has.
        """
        manifest = self.manifest
        if device.platform not in self.platforms:
            raise _artifact_error(
                f"{manifest.name} is for {', '.join(self.platforms)}, not for {device.platform}",
                f'export it with platforms=("{device.platform}",)',
            )
        arrays = [(spec.shape, DTYPES[spec.dtype]) for spec in manifest.weights]
        arrays += [((2,), np.dtype(np.uint32))] * manifest.draws_random
        arrays += [(tuple(shape), DTYPES[spec.dtype]) for spec, shape in zip(manifest.inputs, shapes, strict=True)]
        sharding = jax.sharding.SingleDeviceSharding(device)
        with jax.enable_x64(True):
            avals = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arrays]
            lowered = jax.jit(self._function).trace(*avals).lower(lowering_platforms=(device.platform,))
        return lowered.compile()

    def serialize(self) -> bytes:
        """Returns the whole model as bytes, for `dynaxla.load`."""
        parts = self._files()
        parts[MANIFEST] = manifests.encode(self.manifest, parts)
        sizes = b"".join(len(parts[name]).to_bytes(8, "little") for name in (MANIFEST, PROGRAM, WEIGHTS))
        return _MAGIC + sizes + parts[MANIFEST] + parts[PROGRAM] + parts[WEIGHTS]

    def save(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes `manifest.json`, `program.mlirbc` (StableHLO) and `weights.safetensors` to a directory that is new or empty.

        A new directory appears only when all files are complete. An empty directory gets complete files, the manifest last.

        Args:
            overwrite: True to replace the directory if it holds an exported model.

        Raises: ArtifactError if the directory is not empty and may not be replaced, if it cannot be written, or if the safetensors format
        lacks the dtype of a weight.
        """
        target = Path(directory)
        try:
            exists, is_empty = os.path.lexists(target), target.is_dir() and not any(target.iterdir())
            if exists and not is_empty and not (overwrite and (target / MANIFEST).is_file()):
                if overwrite:
                    raise _artifact_error(f"{target} is neither empty nor an exported model", "choose another directory")
                if not target.is_dir():
                    raise _artifact_error(f"{target} is not a directory", "choose another directory")
                hint = "choose another directory, or give overwrite=True to replace an exported model"
                raise _artifact_error(f"{target} is not empty", hint)
            files = self._files()
            _write(target, {**files, MANIFEST: manifests.encode(self.manifest, files)}, exists, is_empty)
        except OSError as error:
            raise _artifact_error(f"{target} cannot be written: {error}", "choose another directory") from error

    def _files(self) -> dict[str, bytes]:
        """Returns the contents of all files but the manifest, by name. Raises: ArtifactError for weights that safetensors cannot store."""
        try:
            weights = safetensors.numpy.save(self.weights)
        except (safetensors.SafetensorError, ValueError, KeyError) as error:
            unsupported = [f"{name} ({array.dtype})" for name, array in self.weights.items() if array.dtype not in _SAVED_DTYPES]
            reason = f"the format has no dtype for {', '.join(unsupported)}" if unsupported else str(error)
            raise _artifact_error(
                f"the weights cannot be written as safetensors: {reason}",
                "convert these weights to another dtype, such as complex64 for complex128, and export the model again",
            ) from None
        return {PROGRAM: self._program, WEIGHTS: weights}

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the arrays in a call's arguments, in the order and with the dtypes of the program's inputs."""
        structure = self.manifest.arguments
        try:
            positional, named = structure["items"]
            values = [*flatten(positional, tuple(args), "args"), *flatten(named, kwargs, "kwargs")]
        except StructureMismatch as error:
            raise _artifact_error(f"{self.manifest.name}: {error}", f"it takes {self._signature()}") from None
        return [self._argument(spec, path, value) for spec, (path, value) in zip(self.manifest.inputs, values, strict=True)]

    def _argument(self, spec: ArraySpec, path: str, value: Any) -> Any:
        """Returns an argument as an array with the dtype that the program takes.

        A Python number is cast if NumPy's casting rule "same_kind" allows that. An array of another dtype is accepted, and widened, only if
        its dtype is `NARROW_DTYPES[spec.dtype]`.

        Args:
            spec: the input of the program.
            path: the path of the argument, for errors.
            value: a NumPy or JAX array, or a Python number.

        Raises: ArtifactError for another dtype.
        """
        dtype = DTYPES[spec.dtype]
        hint = f"use {path}.astype({spec.dtype!r}): only 32-bit arrays are widened"
        with jax.enable_x64(True):
            if isinstance(value, (bool, int, float, complex)):
                hint = f"pass an array of {spec.dtype}: a Python number is cast only as NumPy's rule 'same_kind' allows"
                value = np.asarray(value)
                value = value.astype(dtype) if np.can_cast(value.dtype, dtype, "same_kind") else value
            elif not isinstance(value, jax.Array):
                value = np.asarray(value)
            if value.dtype == dtype:
                return value
            if value.dtype.name == NARROW_DTYPES.get(spec.dtype):
                return value.astype(dtype)
        raise _artifact_error(f"{path} ({spec}) was passed as {value.dtype.name}", hint)

    def _check_sizes(self, arguments: Sequence[Any]) -> None:
        """Raises ArtifactError for wrong shapes. Dimensions that are expressions, such as 2*length, are left to JAX's own checks."""
        sizes: dict[str, tuple[int, str]] = {}  # by dimension: its size, and the first input dimension that has it
        for spec, value in zip(self.manifest.inputs, arguments, strict=True):
            matches = len(value.shape) == len(spec.shape)
            matches = matches and all(
                expected == size for expected, size in zip(spec.shape, value.shape, strict=True) if isinstance(expected, int)
            )
            if not matches:
                raise _artifact_error(f"{spec} was passed with shape {list(value.shape)}", f"it takes {self._signature()}")
            for dim, (name, size) in enumerate(zip(spec.shape, value.shape, strict=True)):
                if name not in self.manifest.dimensions or not isinstance(size, int):
                    continue
                location = f"dimension {dim} of {spec.name}"
                low, high = self.manifest.dimensions[str(name)]
                first_size, first_location = sizes.setdefault(str(name), (size, location))
                if first_size != size:
                    raise _artifact_error(
                        f"{name} is {first_size} in {first_location}, and {size} in {location}", f"it takes {self._signature()}"
                    )
                if size < low or (high is not None and size > high):
                    limits = f"{low} or more" if high is None else f"{low} to {high}"
                    raise _artifact_error(
                        f"{name} is {size} in {location}, and the program supports {limits}", "export it with other dynamic_shapes"
                    )

    def _signature(self) -> str:
        return ", ".join(map(str, self.manifest.inputs)) or "no arrays"

    def _takes_key(self, key: Any) -> bool:
        """True if the program takes a random key. Raises ArtifactError for a missing key, and for a key that the program does not take."""
        if self.manifest.draws_random and key is None:
            raise _artifact_error(
                f"{self.manifest.name} draws random numbers, and needs a key",
                "use call(..., key=jax.random.key(0)), with another key for each call",
            )
        if key is not None and not self.manifest.draws_random:
            raise _artifact_error(f"{self.manifest.name} draws no random numbers", "call it without a key")
        return self.manifest.draws_random

    def _weights(self, replacements: Mapping[str, Any]) -> list[Any]:
        """Returns the weights that the program takes: from `replacements`, by name, or else the model's own.

        The model's own weights are copied to JAX's default device at the first call, and stay there.
        """
        specs = self.manifest.weights
        if unknown := replacements.keys() - {spec.name for spec in specs}:
            known = ", ".join(spec.name for spec in specs) or "none: they are constants of the program"
            raise _artifact_error(f"{self.manifest.name} takes no weights {', '.join(sorted(unknown))}", f"it takes {known}")
        with self._device_weights_lock:
            if self._device_weights is None:
                with jax.ensure_compile_time_eval():
                    self._device_weights = [jax.device_put(self.weights[spec.name]) for spec in specs]
        return [
            _weight(spec, replacements[spec.name]) if spec.name in replacements else stored
            for spec, stored in zip(specs, self._device_weights, strict=True)
        ]

    def _raise_failed_check(self, failed_check: Any) -> None:
        """Raises the exception of the check with this index. Does nothing for -1 (no check failed), nor for a tracer (under `jax.jit`)."""
        if isinstance(failed_check, jax.core.Tracer) or (index := int(failed_check)) < 0:
            return
        check = self.manifest.checks[index]
        error = getattr(builtins, check.error, None)
        raise (error if isinstance(error, type) and issubclass(error, Exception) else RuntimeError)(check.message)


def _write(target: Path, files: Mapping[str, bytes], exists: bool, is_empty: bool) -> None:
    """Writes files to a directory. If a file cannot be written, the directory is unchanged.

    Args:
        target: the directory.
        files: the contents of the files, by name.
        exists: True if the directory exists. It is replaced, unless it is empty.
        is_empty: True if the directory exists and is empty.

    Raises: OSError.
    """
    # The files are written to a temporary directory on the same file system. Complete files are then moved to their places by renames,
    # which need no space on the disk.
    unfinished = (target if is_empty else target.parent) / f".{target.name}.{uuid.uuid4().hex}"
    try:
        unfinished.mkdir(parents=True)
        for name, data in files.items():
            with open(unfinished / name, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if is_empty:
            _move_into(target, unfinished, files)
        elif exists:
            previous = target.parent / f".{target.name}.{uuid.uuid4().hex}"
            target.rename(previous)
            try:
                unfinished.rename(target)
            except OSError:
                previous.rename(target)
                raise
            shutil.rmtree(previous, ignore_errors=True)
        else:
            unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _move_into(target: Path, unfinished: Path, names: Iterable[str]) -> None:
    """Moves files, in order, from `unfinished` (a directory in `target`) to `target`. If a move fails, removes the files moved before.

    Raises: OSError from a failed move; FileExistsError if `target` has other files, since another process must have written them.
    """
    if len(list(target.iterdir())) > 1:
        raise FileExistsError(f"another process writes to {target}")
    moved = []
    try:
        for name in names:
            moved.append((unfinished / name).rename(target / name))
    except OSError:
        for path in moved:
            path.unlink()
        raise


def load(source: str | os.PathLike[str] | bytes) -> ExportedModel:
    """Loads an exported model from a directory that `ExportedModel.save` wrote, or from the bytes of `serialize`.

    Loading needs JAX and safetensors, but not torch, and runs no code from the files. The hashes detect damage. They do not authenticate
    the author.

    Raises: ArtifactError if `source` is no exported model; if hashes, names, shapes or dtypes do not match; or if the program calls a
    function that an exported program must not call.
    """
    files = _split(source) if isinstance(source, bytes) else _files_of(Path(source))
    try:
        manifest = manifests.decode(files.pop(MANIFEST), files)
        weights = {name: _array(entry) for name, entry in safetensors.deserialize(files[WEIGHTS])}
    except (DamagedModelError, safetensors.SafetensorError) as error:
        prefix = "" if isinstance(source, bytes) else f"{source}: "
        raise _artifact_error(f"{prefix}{error}", _EXPORT_AGAIN) from None
    return ExportedModel(manifest, files[PROGRAM], weights)


def _files_of(directory: Path) -> dict[str, bytes]:
    """Reads the files of a saved model, by name. Raises: ArtifactError."""
    files = {}
    for name in (MANIFEST, PROGRAM, WEIGHTS):
        try:
            files[name] = (directory / name).read_bytes()
        except OSError as error:
            raise _artifact_error(
                f"{directory} is not an exported model: {name}: {error.strerror}", "pass the directory that save wrote"
            ) from None
    return files


def _split(data: bytes) -> dict[str, bytes]:
    """Splits the bytes of `ExportedModel.serialize` into files, by name. Raises: ArtifactError."""
    start = len(_MAGIC) + 24
    if not data.startswith(_MAGIC) or len(data) < start:
        raise _artifact_error("these bytes are not an exported model", "pass the bytes that serialize returned")
    sizes = [int.from_bytes(data[offset : offset + 8], "little") for offset in range(len(_MAGIC), start, 8)]
    expected = start + sum(sizes)
    if len(data) != expected:
        state = "incomplete" if len(data) < expected else "followed by other bytes"
        raise _artifact_error(
            f"the exported model is {state}: it has {expected} bytes, and {len(data)} were passed",
            "pass exactly the bytes that serialize returned",
        )
    files = {}
    for name, size in zip((MANIFEST, PROGRAM, WEIGHTS), sizes, strict=True):
        files[name], start = data[start : start + size], start + size
    return files


# Dtypes by their names in the safetensors format.
_SAFETENSORS_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "I8": "int8", "I16": "int16", "I32": "int32",
    "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip

_SAVED_DTYPES = frozenset(DTYPES[name] for name in _SAFETENSORS_DTYPES.values())


def _array(entry: Mapping[str, Any]) -> np.ndarray:
    """Returns an item of `safetensors.deserialize` as an array. Raises: DamagedModelError for a dtype that dynaxla does not know."""
    if entry["dtype"] not in _SAFETENSORS_DTYPES:
        raise DamagedModelError(f"the weights have a dtype {entry['dtype']}, which this version of dynaxla does not support")
    return np.frombuffer(entry["data"], DTYPES[_SAFETENSORS_DTYPES[entry["dtype"]]]).reshape(entry["shape"])


def _check_weight(spec: ArraySpec, value: Any) -> None:
    """Raises ArtifactError if a weight is None, or has another shape or dtype than the program takes."""
    if value is None:
        raise _artifact_error(f"the weight {spec} is missing", _EXPORT_AGAIN)
    if tuple(value.shape) != spec.shape or value.dtype != DTYPES[spec.dtype]:
        raise _artifact_error(
            f"the weight {spec.name} is {value.dtype}{list(value.shape)}, and the program takes {spec.dtype}{list(spec.shape)}",
            "pass a weight with that shape and dtype",
        )


def _weight(spec: ArraySpec, value: Any) -> Any:
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    _check_weight(spec, value)
    return value


def _key_data(key: Any) -> Any:
    """Returns the data (uint32[2]) of a threefry key, which may be a typed key or its data. Raises: ArtifactError for another value."""
    data = jax.random.key_data(key) if isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if getattr(data, "shape", None) != (2,) or data.dtype != np.uint32:
        raise _artifact_error("key is not a key of JAX's threefry generator", 'use jax.random.key(0, impl="threefry2x32")')
    return data


def _refuse_derivatives(function: Any, name: str) -> Any:
    """Wraps a function so that it raises ArtifactError if JAX differentiates it, since the exported program has no derivative."""

    @jax.custom_vjp
    def call(*arrays: Any) -> Any:
        return function(*arrays)

    def forward(*_: Any) -> Any:
        raise _artifact_error(
            f"{name} is an exported program, which has no derivative", "use dynaxla.to_jax, whose function JAX can differentiate"
        )

    call.defvjp(forward, lambda *_: ())
    return call


def _artifact_error(message: str, hint: str) -> Exception:
    """Returns an ArtifactError. errors.py is imported only here, because it imports torch if torch is installed, which takes seconds."""
    from ..errors import ArtifactError

    return ArtifactError(message, hint=hint)
