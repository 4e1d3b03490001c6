"""The API reference: the page of each public name. The sources are parsed, not imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "dynaxla"


@dataclass(frozen=True)
class Page:
    """A page of the reference.

    Attributes:
        title: Its title.
        beginning: Its first paragraph.
        names: The public names on it. For a module, the module's own public names.
        more: Names of objects that public functions take and return.
    """

    title: str
    beginning: str
    names: tuple[str, ...]
    more: tuple[str, ...] = ()


PAGES = {
    "compiling": Page(
        "Compiling",
        "A model is compiled by a backend's name, a step by a decorator, and both take [options](../options.md).",
        ("compile_step", "synchronize"),
        ("backend.dynaxla", "backend.dynaxla_auto", "backend.dynaxla_retrace"),
    ),
    "device": Page('The device "jax"', 'Tensors that live in XLA: see [The device "jax"](../device.md).', ("device",)),
    "sharding": Page("Many devices", "One program on a mesh of devices: see [Many devices](../many-devices.md).", ("sharding",)),
    "interop": Page(
        "JAX and PyTorch",
        "Functions of one library in the other: see [JAX in PyTorch](../jax-in-torch.md) and [PyTorch in JAX](../torch-in-jax.md).",
        ("as_jax", "as_torch", "to_jax", "to_torch"),
    ),
    "export": Page("Export", "Models as StableHLO: see [Export](../export.md).", ("export", "load"), ("artifact.model.ExportedModel",)),
    "observing": Page(
        "Looking inside",
        "Explanations of compiled functions, counters and times: see [Explain](../explain.md) and [Looking inside](../looking-inside.md).",
        ("explain", "metrics"),
        ("explained.Explanation",),
    ),
    "lowering": Page("Lowerings of your own", "For ops that dynaxla does not know: see [Adding a lowering](../add-an-op.md).", ("lowers",)),
    "errors": Page("Errors", "The classes of errors. For solutions see [Troubleshooting](../troubleshooting.md).", ("errors",)),
}
# The functions of dynaxla.metrics that are for users.
METRICS = (
    "report", "counter_names", "counter_value", "metric_names", "metric_data", "clear", "snapshot", "seconds", "reset",
)  # fmt: skip


def public_names() -> dict[str, str]:
    """Returns the module of each public name of dynaxla, from `__init__.pyi`. The module of a module is "."."""
    imports = [node for node in ast.parse((SOURCE / "__init__.pyi").read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f".{node.module or ''}" for node in imports for alias in node.names}


def members(module: str) -> list[str]:
    """Returns the public names of a public module: its functions for users, the names that a package re-exports, or its classes."""
    if module == "metrics":
        return list(METRICS)
    path = SOURCE / module / "__init__.py"
    tree = ast.parse((path if path.exists() else SOURCE / f"{module}.py").read_text())
    if path.exists():
        imports = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
        return [alias.asname for alias in imports if alias.asname == alias.name]
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def reference_pages() -> dict[str, str]:
    """Returns Markdown with a directive of mkdocstrings for each name, by page. Raises: LookupError for a name without a page."""
    modules = ("metrics", *(name for name, module in public_names().items() if module == "."))
    if missing := set(public_names()) - {name for page in PAGES.values() for name in page.names}:
        raise LookupError(f"these public names are on no page of website/public_names.py: {sorted(missing)}")
    pages = {}
    for file, page in PAGES.items():
        names = [
            public_name
            for name in page.names
            for public_name in ([f"{name}.{member}" for member in members(name)] if name in modules else [name])
        ]
        parts = [f"# {page.title}", page.beginning, *(f"::: dynaxla.{name}" for name in (*names, *page.more))]
        pages[file] = "\n\n".join(parts) + "\n"
    return pages
