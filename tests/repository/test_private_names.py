"""Checks that docs/private-names.md has a row for each private name of torch, JAX and jaxlib in the sources (see test_sources.py)."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from test_sources import MODULES, OPEN, PRIVATE, SOURCES, dotted, imported, own_names

from dynaxla.runtime import private_fsdp
from support.paths import ROOT

PAGE = ROOT / "docs" / "private-names.md"

# The number of rows. It may only decrease.
MOST = 139

# Names without a public fallback whose existence is not checked before their first use: if one is missing, Python raises AttributeError.
# No name may be added to this list.
UNCHECKED = frozenset(
    [
        "torch.Tensor._base",
        "torch.Tensor._is_param",
        "torch.Tensor._version",
        "torch.UntypedStorage._cdata",
        "torch._C._distributed_c10d.FakeWork",
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
        "torch._library.custom_ops.CustomOpDef._init_fn",
        "torch._ops.OpOverload._op_dk",
        "torch.autograd.graph.Node._sequence_nr",
        "torch.distributed.ProcessGroup._allgather_base",
        "torch.distributed.ProcessGroup._get_backend",
        "torch.distributed.ProcessGroup._reduce_scatter_base",
        "torch.distributed.distributed_c10d._world",
        "torch.distributed.tensor.DTensor._local_tensor",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv._suppress_guards_tls",
        "torch.nn.Module._call_impl",
        "torch.nn.Module._forward_hooks",
        "torch.nn.Module._forward_pre_hooks",
        "torch.nn.parallel.DistributedDataParallel._join_config",
        "torch.nn.parallel.DistributedDataParallel._module_parameters",
        "torch.nn.parallel.DistributedDataParallel._use_python_reducer",
        "torch.testing._internal.common_methods_invocations.op_db",
        "torch.utils._sympy.reference.PythonReferenceAnalysis",
    ]
)

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\.?")


def is_private(name: str) -> bool:
    in_private_module = f"{name}.".startswith(tuple(f"{module}." for module in MODULES))
    return in_private_module or any(re.match("_(?!_)", part) and part not in OPEN for part in name.split("."))


def private_names(text: str) -> dict[str, int]:
    """Returns the private names in a source, with the line of the first mention.

    A name begins with the package, or is only an attribute if its owner is unknown. A string that looks like a name counts as one, since
    names are also looked up by strings.
    """
    own = own_names(text)
    mentions: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            mentions += [(node.lineno, name) for name in imported(node)]
        elif isinstance(node, ast.Attribute):
            name, owner = dotted(node), dotted(node.value)
            if owner not in ("self", "cls", "private"):  # names of dynaxla
                mentions.append((node.lineno, name if name.startswith(("torch.", "jax.", "jaxlib.")) else node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value) and node.value not in own:
            mentions.append((node.lineno, node.value))
    lines: dict[str, int] = {}
    for line, name in sorted(mentions):
        if is_private(name):
            lines.setdefault(name, line)
    return {name: line for name, line in lines.items() if not any(other.startswith(f"{name}.") for other in lines)}


def stands_for(row: str, name: str) -> bool:
    """True if a row is about a name, which may lack the beginning of its path, or may be the module of the row's name."""
    return f".{row}".endswith(f".{name}") or row.startswith(f"{name}.")


@functools.cache
def rows() -> dict[tuple[str, str], list[str]]:
    """Returns the cells of each row, without the name, by file and name."""
    cells_by_name: dict[tuple[str, str], list[str]] = {}
    file = ""
    for line in PAGE.read_text().splitlines():
        if heading := re.match(r"## `(\w+\.py)`", line):
            file = f"runtime/{heading[1]}"
        elif row := re.fullmatch(r"\| `([\w.]+)` \| (.+) \|", line):
            assert (file, row[1]) not in cells_by_name, f"two rows of {row[1]}"
            cells_by_name[file, row[1]] = row[2].split(" | ")
    return cells_by_name


def without_rows(sources: dict[str, str]) -> list[str]:
    """Returns a message for each name without a row on the page."""
    return [
        f"docs/private-names.md needs a row for {file}:{line}: | `{name}` | what it is for | its public way, or none | releases |"
        for file in PRIVATE
        for name, line in private_names(sources[file]).items()
        if not any(stands_for(row, name) for _, row in rows())
    ]


def test_all_names_have_a_row() -> None:
    assert not without_rows(SOURCES)


def test_all_rows_have_a_name() -> None:
    names = {file: private_names(SOURCES[file]) for file in PRIVATE}
    unused = [row for file, row in rows() if not any(f".{row}".endswith(f".{name}") for name in names[file])]
    assert not unused, f"delete these rows of docs/private-names.md, or move them to the file that has the name: {unused}"


def test_all_rows_are_complete() -> None:
    releases = r"all|all, in builds with CUDA|torch (2\.11|2\.13|2\.15)(, (2\.13|2\.15))*|jax (0\.10|0\.11|0\.12)(, (0\.11|0\.12))*"
    assert not [name for (_, name), cells in rows().items() if len(cells) != 3 or not re.fullmatch(releases, cells[2])]


def test_number_of_names_only_decreases() -> None:
    assert len(rows()) <= MOST, f"{len(rows())} private names: use public ones"
    assert len(rows()) == MOST, f"fewer names than before: set MOST to {len(rows())}"


def test_names_without_a_public_fallback_are_checked_before_use() -> None:
    """They are checked by `_require` or by FSDP2's lists, or their user raises UnsupportedVersion by `_unsupported`."""
    checked = {
        "_get_fsdp_state",
        *private_fsdp._FUNCTIONS,
        *private_fsdp._IN_STATE,
        *private_fsdp._IN_GROUP,
        *private_fsdp._IN_PARAMETER,
        *private_fsdp._IN_GROUP_2_15,
        *private_fsdp._IN_PARAMETER_2_15,
    }
    for file in PRIVATE:
        for node in ast.walk(ast.parse(SOURCES[file])):
            if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("_require", "_lacks"):
                checked |= {item.value.partition(".compile_args")[0] for item in node.args if isinstance(item, ast.Constant)}
    without_fallback = [name for (_, name), cells in rows().items() if cells[1] == "none"]
    assert {name for name in without_fallback if not any(f".{name}".endswith(f".{checked_name}") for checked_name in checked)} == UNCHECKED


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("torch._C._gone(x)", "torch._C._gone"),
        ("x = _find('torch._C._gone')", "torch._C._gone"),
        ("x = [_find(f'torch._C.{name}') for name in names]", "torch._C."),
        ("names = ('_gone', 'other')", "_gone"),
        ("from jax._src import gone", "jax._src.gone"),
        ("tensor._gone = 1", "_gone"),
        ("torch.compiler._gone", "torch.compiler._gone"),
    ],
)
def test_new_private_name_needs_a_row(source: str, name: str) -> None:
    file = PRIVATE[0]
    (message,) = without_rows({**SOURCES, file: f"{SOURCES[file]}\n{source}\n"})
    assert f"{file}:{SOURCES[file].count(chr(10)) + 2}: | `{name}` |" in message


@pytest.mark.parametrize(
    "source", ["private._gone(x)", "self._gone", "'''See torch._C._gone.'''", "torch.compile(x)", "torch._dynamo.gone"]
)
def test_public_names_and_names_of_dynaxla_need_no_row(source: str) -> None:
    assert not private_names(source)
