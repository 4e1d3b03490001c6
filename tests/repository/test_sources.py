"""Checks that the sources read addresses only in `buffers/`, and use private entry points only in the modules for them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dynaxla
from support.releases import NEWER

ROOT = Path(dynaxla.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
PRIVATE = tuple(f"runtime/{name}.py" for name in ("private", "private_fsdp", "private_processes", "private_self_tests"))

# Names that give the address of a tensor or an array.
ADDRESSES = frozenset(["data_ptr", "const_data_ptr", "mutable_data_ptr", "unsafe_buffer_pointer", "__array_interface__", "storage_at"])

# Modules that are private as a whole.
MODULES = ("torch._C", "jax._src", "jaxlib")

# Names with an underscore that are not private.
OPEN = frozenset(
    [
        # Modules and names that all backends of torch.compile use.
        *("_aot_autograd", "_decomp", "_device", "_dynamo", "_functorch", "_guards", "_inductor", "_ops", "_prims", "_prims_common"),
        *("_pytree", "_python_dispatch", "_subclasses", "_boxed_call", "_torchdynamo_orig_callable"),
        *("_disable_current_modes", "_get_current_dispatch_mode_stack", "_get_current_function_mode_stack"),
        # The namespace of collectives in graphs.
        "_c10d_functional",
        # Attributes of ops.
        *("_schema", "_opname", "_overloadname", "_can_decompose"),
        # Base classes in torch.nn; named tuples; CPython.
        *("_BatchNorm", "_DropoutNd", "_fields", "_replace", "_getframe", "_is_owned", "_at_fork_reinit"),
    ]
)

# Functions that look up an attribute by a string.
LOOKUPS = frozenset(["getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "resolve_name"])

# The owner of an imported name, in the results of `named`.
IMPORTED = "import"

# Mentions that are allowed, by file and name, with the reason.
REASONS = {
    ("forks.py", "jax._src.xla_bridge"): "a child asks whether it was imported, and may import nothing for that",
    ("forks.py", "_backends"): "the same",
}


def dotted(node: ast.AST) -> str:
    """Returns `a.b.c` as text. Parts that are not names are omitted."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def named(text: str) -> list[tuple[int, str, str]]:
    """Returns the line, name and owner of all names in a source: attributes, imports, and attributes that are looked up by a string.

    Other strings do not count: a list of methods that a user's code may call may contain "data_ptr".
    """
    names: list[tuple[int, str, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            names.append((node.lineno, node.attr, dotted(node.value)))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [(node.lineno, part, IMPORTED) for name in imported(node) for part in name.split(".")]
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in LOOKUPS:
            strings = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            names += [(node.lineno, part, dotted(node.args[0])) for name in strings for part in name.split(".")]
    return names


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Returns the names that an import from another package has."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]


@functools.cache
def in_private_modules(text: str) -> list[tuple[int, str]]:
    """Returns the line and the name of each mention of a private module, also by a string with only such a name."""
    mentions: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            mentions += [(node.lineno, name) for name in imported(node)]
        elif isinstance(node, ast.Attribute):
            mentions.append((node.lineno, dotted(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value and " " not in node.value:
            mentions.append((node.lineno, node.value))
    return [(line, name) for line, name in mentions if f"{name}.".startswith(tuple(f"{module}." for module in MODULES))]


@functools.cache
def own_names(text: str) -> frozenset[str]:
    """Returns the names that a source defines: functions, classes, variables, attributes of its objects."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) in ("self", "cls"):
            names.add(node.attr)
    return frozenset(names)


def addresses(sources: dict[str, str]) -> list[str]:
    """Returns the places where a source outside `buffers/` reads an address."""
    return [
        f"{file}:{line}: {name}"
        for file, text in sources.items()
        if file not in PRIVATE and not file.startswith("buffers/")
        for line, name, _ in named(text)
        if name in ADDRESSES or name.endswith("_data_ptr_")
    ]


def private_modules(sources: dict[str, str]) -> list[str]:
    """Returns the places where a source outside the modules for private entry points names a private module, or a name in it."""
    return [
        f"{file}:{line}: {name}"
        for file, text in sources.items()
        if file not in PRIVATE
        for line, name in in_private_modules(text)
        if (file, name) not in REASONS
    ]


def private_attributes(sources: dict[str, str]) -> list[str]:
    """Returns the places where such a source uses a name with an underscore that is neither dynaxla's nor in `OPEN`."""
    ours = frozenset().union(*map(own_names, sources.values()))
    return [
        f"{file}:{line}: {name}"
        for file, text in sources.items()
        if file not in PRIVATE
        for line, name, owner in named(text)
        if name.startswith("_")
        and not name.startswith("__")
        and name not in OPEN
        and (owner == IMPORTED or name not in ours)
        and not owner.startswith("torch.ops.")
        and not (owner.rpartition(".")[2] in ("torch", "aten", "prims") and is_op(name))
        and (file, name) not in REASONS
    ]


def is_op(name: str) -> bool:
    return hasattr(torch.ops.aten, name) or hasattr(torch.ops.prims, name) or any(name in op.split(".") for op in NEWER)


def test_addresses_stay_in_buffers() -> None:
    assert not addresses(SOURCES)


def test_private_modules_are_named_only_in_the_modules_for_them() -> None:
    assert not private_modules(SOURCES)


def test_private_attributes_are_named_only_in_the_modules_for_them() -> None:
    assert not private_attributes(SOURCES)


@pytest.mark.parametrize(
    ("source", "check"),
    [
        ("x.data_ptr()", addresses),
        ("f = torch.Tensor.data_ptr", addresses),
        ("getattr(x, 'data_ptr')", addresses),
        ("operator.methodcaller('data_ptr')(x)", addresses),
        ("storage._swap_data_ptr_(other)", addresses),
        ("from jaxlib import xla_client", private_modules),
        ("import jaxlib.xla_client as client", private_modules),
        ("from jax._src import xla_bridge", private_modules),
        ("import jax._src.core", private_modules),
        ("torch._C._to_dlpack(x)", private_modules),
        ("from torch import _C", private_modules),
        ("from torch._C._dynamo import guards", private_modules),
        ("sys.modules['jax._src.xla_bridge']", private_modules),
        ("lowered._lowering.compile_args", private_attributes),
        ("getattr(torch.compiler, '_is_compiling_flag')", private_attributes),
        ("torch.compiler._is_compiling_flag = True", private_attributes),
        ("tensor.untyped_storage()._cdata", private_attributes),
        ("from torch.utils._foreign import thing", private_attributes),
    ],
)
def test_planted_uses_are_found(source: str, check: Callable[[dict[str, str]], list[str]]) -> None:
    (place,) = {line.rpartition(":")[0] for line in check({**SOURCES, "training/planted.py": f"\n{source}\n"})}
    assert place == "training/planted.py:2"


@pytest.mark.parametrize(
    "source", ["READS_MEMORY = ['data_ptr', 'tolist']", "'''Of jaxlib's, and of torch._C's. See data_ptr.'''", "x = aten._softmax"]
)
def test_strings_and_docstrings_do_not_count(source: str) -> None:
    planted = {"training/planted.py": source}
    assert not addresses(planted) + private_modules(planted) + private_attributes(planted)
    assert not addresses({"buffers/planted.py": "x.data_ptr()"})
