"""The API reference: which of the public names stands on which page. The sources are read, nothing is imported."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "dynaxla"
# By page: its title, the modules of `dynaxla._PUBLIC` that it shows, and how it begins.
PAGES = {
    "compiling": (
        "Compiling",
        ("backend", "training", "runtime.background", "runtime.late_checks"),
        "A model is compiled by a backend's name, a step by a decorator, and both take [options](../options.md).",
    ),
    "device": ('The device "jax"', ("device",), 'Tensors that live in XLA: see [The device "jax"](../device.md).'),
    "sharding": ("Many devices", ("sharding",), "One program on a mesh of devices: see [Many devices](../many-devices.md)."),
    "interop": (
        "JAX and PyTorch",
        ("interop",),
        "Functions of one library in the other: see [JAX in PyTorch](../jax-in-torch.md) and [PyTorch in JAX](../torch-in-jax.md).",
    ),
    "export": ("Export", ("interop.export", "artifact.model"), "Models as StableHLO: see [Export](../export.md)."),
    "observing": (
        "Looking inside",
        ("explained", "observe"),
        "What became of a function, and counters and times: see [Explain](../explain.md) and [Looking inside](../looking-inside.md).",
    ),
    "lowering": ("Lowerings of your own", ("lowering",), "For ops that dynaxla does not know: see [Adding a lowering](../add-an-op.md)."),
    "errors": ("Errors", ("errors",), "What each means; for what to do, see [Troubleshooting](../troubleshooting.md)."),
}
# What users call in a module that is a public name itself.
METRICS = (
    "report", "counter_names", "counter_value", "metric_names", "metric_data", "clear", "snapshot", "seconds", "reset",
)  # fmt: skip


def public_names() -> dict[str, tuple[str, ...]]:
    """The public names by the module that has them, as `dynaxla._PUBLIC` lists them."""
    for node in ast.parse((SOURCE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_PUBLIC":
            found: dict[str, tuple[str, ...]] = ast.literal_eval(node.value)
            return found
    raise LookupError("dynaxla/__init__.py has no _PUBLIC")


def reexported(package: str) -> list[str]:
    """What a package gives its users: the names that its __init__ imports as themselves."""
    tree = ast.parse((SOURCE / package / "__init__.py").read_text())
    imports = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return [alias.asname for alias in imports if alias.asname == alias.name]


def reference_pages() -> dict[str, str]:
    """Markdown with a directive of mkdocstrings for each name, by page. Raises: LookupError for a module that no page shows."""
    public = public_names()
    if missing := set(public) - {module for _, modules, _ in PAGES.values() for module in modules}:
        raise LookupError(f"these modules of dynaxla._PUBLIC are on no page of website/public_names.py: {sorted(missing)}")
    pages = {}
    for page, (title, modules, beginning) in PAGES.items():
        names = [f"dynaxla.{name}" for module in modules for name in public.get(module, ()) if name != "metrics"]
        if "observe" in modules:
            names += [f"dynaxla.observe.metrics.{name}" for name in METRICS]
        if "sharding" in modules:
            names += [f"dynaxla.sharding.{name}" for name in reexported("sharding") if f"dynaxla.{name}" not in names]
        if "training" in modules:
            names.append("dynaxla.config.Options")
        pages[page] = "\n\n".join([f"# {title}", beginning, *(f"::: {name}" for name in names)]) + "\n"
    return pages
