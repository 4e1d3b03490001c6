"""What the sources may not say: addresses outside of `buffers/`, and private entry points outside of the modules for them."""

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

# What gives the address of a tensor or an array.
ADDRESSES = frozenset(["data_ptr", "const_data_ptr", "mutable_data_ptr", "unsafe_buffer_pointer", "__array_interface__", "storage_at"])

# The roots of what is private as a whole.
MODULES = ("torch._C", "jax._src", "jaxlib")

# Names with an underscore that are not private.
OPEN = frozenset(
    [
        # What every backend of torch.compile is written against.
        *("_aot_autograd", "_decomp", "_device", "_dynamo", "_functorch", "_guards", "_inductor", "_ops", "_prims", "_prims_common"),
        *("_pytree", "_python_dispatch", "_subclasses", "_boxed_call", "_torchdynamo_orig_callable"),
        *("_disable_current_modes", "_get_current_dispatch_mode_stack", "_get_current_function_mode_stack"),
        # The namespace of collectives in graphs.
        "_c10d_functional",
        # What ops say of themselves.
        *("_schema", "_opname", "_overloadname", "_can_decompose"),
        # Base classes in torch.nn; named tuples; CPython.
        *("_BatchNorm", "_DropoutNd", "_fields", "_replace", "_getframe", "_is_owned", "_at_fork_reinit"),
    ]
)

# What looks for an attribute by a string.
ASKING = frozenset(["getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "resolve_name"])

# What an imported name is the name in.
IMPORTED = "import"

# (file, name): mentions that have a reason.
REASONS = {
    ("forks.py", "jax._src.xla_bridge"): "a child asks whether it was imported, and may import nothing for that",
    ("forks.py", "_backends"): "the same",
}


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; what is no name is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def named(text: str) -> list[tuple[int, str, str]]:
    """Line, name, and what it is the name in, of all that a source names: attributes, what it imports, and attributes that it asks for by a
    string. Other strings name nothing: a list of methods that a user's code may call may have `data_ptr` in it."""
    found: list[tuple[int, str, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            found.append((node.lineno, node.attr, dotted(node.value)))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [(node.lineno, part, IMPORTED) for name in imported(node) for part in name.split(".")]
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ASKING:
            strings = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            found += [(node.lineno, part, dotted(node.args[0])) for name in strings for part in name.split(".")]
    return found


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What an import from another package names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]


@functools.cache
def in_private_modules(text: str) -> list[tuple[int, str]]:
    """Line and name of all that a source names in private modules, be it by a string that is nothing but such a name."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [(node.lineno, name) for name in imported(node)]
        elif isinstance(node, ast.Attribute):
            found.append((node.lineno, dotted(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value and " " not in node.value:
            found.append((node.lineno, node.value))
    return [(line, name) for line, name in found if f"{name}.".startswith(tuple(f"{module}." for module in MODULES))]


@functools.cache
def own_names(text: str) -> frozenset[str]:
    """What a source itself gives names to: functions, classes, variables, attributes of its objects."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) in ("self", "cls"):
            found.add(node.attr)
    return frozenset(found)


def addresses(sources: dict[str, str]) -> list[str]:
    """Where a source outside of `buffers/` asks for an address."""
    return [
        f"{file}:{line}: {name}"
        for file, text in sources.items()
        if file not in PRIVATE and not file.startswith("buffers/")
        for line, name, _ in named(text)
        if name in ADDRESSES or name.endswith("_data_ptr_")
    ]


def private_modules(sources: dict[str, str]) -> list[str]:
    """Where a source outside of the modules for them names a private module, or something in it."""
    return [
        f"{file}:{line}: {name}"
        for file, text in sources.items()
        if file not in PRIVATE
        for line, name in in_private_modules(text)
        if (file, name) not in REASONS
    ]


def private_attributes(sources: dict[str, str]) -> list[str]:
    """Where a source outside of the modules for them names something with an underscore that is neither ours nor open to all."""
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


def test_private_modules_are_named_in_one_module() -> None:
    assert not private_modules(SOURCES)


def test_private_attributes_are_named_in_one_module() -> None:
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
def test_what_is_planted_is_found(source: str, check: Callable[[dict[str, str]], list[str]]) -> None:
    (found,) = {line.rpartition(":")[0] for line in check({**SOURCES, "training/planted.py": f"\n{source}\n"})}
    assert found == "training/planted.py:2"


@pytest.mark.parametrize(
    "source", ["READS_MEMORY = ['data_ptr', 'tolist']", "'''Of jaxlib's, and of torch._C's. See data_ptr.'''", "x = aten._softmax"]
)
def test_what_only_names_is_not(source: str) -> None:
    planted = {"training/planted.py": source}
    assert not addresses(planted) + private_modules(planted) + private_attributes(planted)
    assert not addresses({"buffers/planted.py": "x.data_ptr()"})
