"""The manifest of an exported model, `manifest.json`: its arguments and results, its arrays, and the files that belong to it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .structures import Structure, count_arrays

FORMAT = "dynaxla.exported"
VERSION = 1
# Dtypes by their names in a manifest. Dtypes that NumPy lacks come from ml_dtypes, as in JAX.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
        "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
# The 32-bit dtype that JAX uses in place of each 64-bit dtype while its 64-bit types are off.
NARROW_DTYPES = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


class DamagedModelError(Exception):
    """Raised for a manifest, a program or weights that are damaged, invalid, or of another format version. The message is the reason."""


@dataclass(frozen=True)
class ArraySpec:
    """An array that a program takes or returns.

    Attributes:
        name: the array's name.
        shape: the size of each dimension: a number, or text for a size that depends on dynamic dimensions, such as "batch" or "2*length".
        dtype: NumPy's name of the dtype.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class CheckSpec:
    """A check that a program makes at run time.

    Attributes:
        error: the name of the built-in exception that the call raises if the check fails, such as "IndexError".
        message: the exception's message.
    """

    error: str
    message: str


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`. The attributes' names are keys of the file, which also has a format, a version and hashes.

    The program takes the weights, then the data of a random key (uint32[2]) if it draws random numbers, then the inputs. It returns the
    outputs, then the new values of the weights in `updates`. If there are checks, its last result is the index of the first failed check
    (int32[]; -1 if none failed).

    Attributes:
        name: the model's name.
        platforms: JAX's names of the platforms that the program supports.
        dimensions: the smallest and the largest size of each dynamic dimension, by name. The largest size is None if it has no limit.
        weights: the weights that the program takes as arguments; empty if they are constants of the program.
        inputs: the arrays among a call's arguments, in order.
        outputs: the arrays among a call's results, in order.
        arguments: the structure of a call's arguments: a tuple of the positional and the keyword arguments.
        results: the structure of a call's results.
        updates: the names of the weights whose new values the program returns.
        checks: the checks at run time.
        draws_random: True if the program draws random numbers.
        calling_convention: the program's `calling_convention_version` in `jax.export.Exported`.
        is_polymorphic: True if sizes or the platform are known only at a call (`uses_global_constants` in `jax.export.Exported`).
        made_with: versions of the packages that exported the model, for information only.
    """

    name: str
    platforms: tuple[str, ...]
    dimensions: Mapping[str, tuple[int, int | None]]
    weights: tuple[ArraySpec, ...]
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]
    arguments: Structure
    results: Structure
    updates: tuple[str, ...]
    checks: tuple[CheckSpec, ...]
    draws_random: bool
    calling_convention: int
    is_polymorphic: bool
    made_with: Mapping[str, str]

    def program_inputs(self) -> tuple[ArraySpec, ...]:
        """Returns the arrays that the program takes, in order."""
        key = (ArraySpec("key", (2,), "uint32"),) if self.draws_random else ()
        return self.weights + key + self.inputs

    def program_outputs(self) -> tuple[ArraySpec, ...]:
        """Returns the arrays that the program returns, in order."""
        by_name = {spec.name: spec for spec in self.weights}
        failed_check = (ArraySpec("failed_check", (), "int32"),) if self.checks else ()
        return self.outputs + tuple(by_name[name] for name in self.updates) + failed_check


def encode(manifest: Manifest, files: Mapping[str, bytes]) -> bytes:
    """Encodes a manifest as JSON, with the size and hash of each of `files`, and with a hash of the JSON itself."""
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    content["files"] = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return json.dumps({**content, "sha256": _sha256(content)}, indent=1).encode()


def decode(data: bytes, files: Mapping[str, bytes]) -> Manifest:
    """Decodes the output of `encode`, and checks the files that belong to the manifest.

    Args:
        data: the encoded manifest.
        files: the content of the program and of the weights, by file name.

    Raises: DamagedModelError for another format or version, for a changed or incomplete manifest, and for files that are changed, missing
        or not in the manifest.
    """
    try:
        content = json.loads(data)
    except ValueError as error:
        raise DamagedModelError(f"the manifest is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedModelError(f"the manifest does not have the format {FORMAT!r}")
    if content.get("version") != VERSION:
        raise DamagedModelError(
            f"the exported model has version {content.get('version')!r} of its format, and this dynaxla reads version {VERSION}"
        )
    stored_digest = content.pop("sha256", None)
    if stored_digest != _sha256(content):
        raise DamagedModelError("the manifest was changed: its hash does not match its content")
    try:
        _check_files(content["files"], files)
        return _decoded_manifest(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedModelError(f"the manifest is incomplete or has invalid values: {type(error).__name__}: {error}") from None


def _check_files(expected_files: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Compares files with their sizes and hashes in the manifest. Raises: DamagedModelError."""
    for name in expected_files.keys() | files.keys():
        if name not in files or name not in expected_files:
            raise DamagedModelError(f"the file {name} is {'missing' if name not in files else 'not in the manifest'}")
        size, file = expected_files[name]["size"], files[name]
        if len(file) != size:
            raise DamagedModelError(f"the file {name} has {len(file)} bytes, and the manifest says {size}")
        if hashlib.sha256(file).hexdigest() != expected_files[name]["sha256"]:
            raise DamagedModelError(f"the file {name} was changed: its hash differs from the hash in the manifest")


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _decoded_manifest(content: Mapping[str, Any]) -> Manifest:
    """Builds a manifest from decoded JSON. Raises: KeyError, TypeError or ValueError if fields are missing or invalid."""
    fields = {field.name: content[field.name] for field in dataclasses.fields(Manifest)}
    for name in ("weights", "inputs", "outputs"):
        fields[name] = tuple(_decoded_array_spec(spec) for spec in fields[name])
    fields["checks"] = tuple(CheckSpec(**check) for check in fields["checks"])
    fields["dimensions"] = {name: (int(low), None if high is None else int(high)) for name, (low, high) in fields["dimensions"].items()}
    fields["platforms"], fields["updates"] = tuple(fields["platforms"]), tuple(fields["updates"])
    manifest = Manifest(**fields)
    in_arguments, in_results = count_arrays(manifest.arguments), count_arrays(manifest.results)
    if in_arguments != len(manifest.inputs):
        raise ValueError(f"its arguments have {in_arguments} arrays, and it lists {len(manifest.inputs)} inputs")
    if in_results != len(manifest.outputs):
        raise ValueError(f"its results have {in_results} arrays, and it lists {len(manifest.outputs)} outputs")
    if unknown := set(manifest.updates) - {spec.name for spec in manifest.weights}:
        raise ValueError(f"it lists updates of {sorted(unknown)}, which are not weights")
    return manifest


def _decoded_array_spec(fields: Mapping[str, Any]) -> ArraySpec:
    spec = ArraySpec(fields["name"], tuple(fields["shape"]), fields["dtype"])
    if spec.dtype not in DTYPES or not all(isinstance(size, (int, str)) for size in spec.shape):
        raise ValueError(f"the array {spec} has an unknown dtype or an invalid size")
    return spec
