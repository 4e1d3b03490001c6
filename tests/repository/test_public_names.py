"""Checks of the public names: the names of `import dynaxla`, the old names, and the types that a type checker sees."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest
import torch

import dynaxla
from dynaxla import errors
from support.paths import ROOT
from support.processes.scripts import run_script

README = ROOT / "README.md"
STUB = Path(dynaxla.__file__).with_suffix(".pyi")


def test_stub_lists_the_public_names() -> None:
    """`dynaxla` reads these lines. Each line must import one name, without renaming it."""
    imports = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    listed = {}
    for node in imports:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert (alias.asname, node.level) == (alias.name, 1)
        listed[alias.name] = f".{node.module or ''}"
    assert listed == dynaxla._PUBLIC
    assert list(listed) == dynaxla.__all__
    assert len(listed) < 16


@pytest.mark.parametrize("use", ["[getattr(dynaxla, name) for name in dynaxla.__all__]", "from dynaxla import *; compile_step, load"])
def test_public_names_can_be_imported(use: str) -> None:
    script = f"import dynaxla; assert {{*dynaxla.__all__}} <= {{*dir(dynaxla)}}; {use}; dynaxla.metrics.snapshot(); dynaxla.sharding.Mesh"
    run_script(script, own=True)


def test_other_names_do_not_exist() -> None:
    assert not {name for name in dir(dynaxla) if not name.startswith("__")} - set(dynaxla.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        dynaxla.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("old", dynaxla._RENAMED)
def test_old_name_warns_and_is_the_new_object(old: str) -> None:
    new = dynaxla._RENAMED[old]
    with pytest.warns(DeprecationWarning, match=rf"^dynaxla\.{old} is now dynaxla\.{re.escape(new)}; ") as raised:
        value = getattr(dynaxla, old)
    assert [warning.filename for warning in raised] == [__file__]
    module, _, name = f"dynaxla.{new}".rpartition(".")
    assert value is getattr(importlib.import_module(module), name)
    assert old not in dir(dynaxla)


def test_all_errors_have_an_old_name() -> None:
    names = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.DynaxlaError)}
    assert {new.removeprefix("errors.") for new in dynaxla._RENAMED.values() if new.startswith("errors.")} == names


def test_warning_names_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        exec(compile("\nfrom dynaxla import lazy\nwith lazy():\n    pass", "of_the_user.py", "exec"), {})
    assert {(warning.filename, warning.lineno) for warning in raised} == {("of_the_user.py", 2)}


def test_old_names_are_errors_in_tests() -> None:
    """So tests, and code that they call, can use only the new names."""
    with pytest.raises(DeprecationWarning, match="is now"):
        dynaxla.finish_checks()  # type: ignore[attr-defined]


def test_old_uses_of_conversions_warn() -> None:
    linear = torch.nn.Linear(2, 2)
    with pytest.warns(DeprecationWarning, match=r"to_jax\(module.forward\) is now .*method='forward'") as raised:
        old, params = dynaxla.to_jax(linear.forward)  # type: ignore[misc]
    new, _ = dynaxla.to_jax(linear, method="forward")
    assert (old(params, jax.numpy.ones(2)) == new(params, jax.numpy.ones(2))).all()
    with pytest.warns(DeprecationWarning, match=r'as_jax\(function\) is now dynaxla.to_jax\(function, device="jax"\)') as raised_by_as_jax:
        dynaxla.as_jax(torch.exp)  # type: ignore[arg-type]
    assert [warning.filename for warning in (*raised, *raised_by_as_jax)] == [__file__] * 2


# Patterns of the types that a type checker must see, by expression. README's blocks define model, x, step and jax_fn.
TYPES = {
    "dynaxla.__version__": "str",
    "dynaxla.as_jax(x)": r"jax\.\S*Array",
    "dynaxla.as_torch(jnp.ones(3))": r"torch\.\S*Tensor",
    "dynaxla.to_jax(model)": r"tuple\[dynaxla\.interop\.torch_in_jax\.JaxModule, dict\[str, jax\.\S*Array\]\]",
    "dynaxla.to_jax(torch.sin)": r"def \(\*Any, \*\*Any\) -> Any",
    'dynaxla.to_jax(torch.sin, device="jax")': r"def \(\*Any, \*\*Any\) -> Any",
    "dynaxla.to_torch(jnp.sin)": r"def \(\*Any, \*\*Any\) -> Any",
    "dynaxla.compile_step(typed)": r"dynaxla\.training\.step\.CompiledStep\[\[number: int\], torch\.\S*Tensor\]",
    "dynaxla.compile_step(fullgraph=True)(typed)(3)": r"torch\.\S*Tensor",
    "dynaxla.explain(model, x)": r"dynaxla\.explained\.explanation\.Explanation",
    "dynaxla.export(model, (x,))": r"dynaxla\.artifact\.model\.ExportedModel",
    'dynaxla.load("model")': r"dynaxla\.artifact\.model\.ExportedModel",
    'dynaxla.lowers("my::op")(typed)': r"def \(number: int\) -> torch\.\S*Tensor",
    "dynaxla.synchronize": r"def \(\)",
    "dynaxla.metrics.snapshot()": r"dict\[str, int\]",
    "dynaxla.device.enable": r"def \(\)",
    "dynaxla.device.lazy()": r"contextlib\._GeneratorContextManager\[None.*\]",
    'dynaxla.sharding.Mesh((2,), ("data",))': r"dynaxla\.sharding\.mesh\.Mesh",
    "dynaxla.sharding.report(model, x)": r"dynaxla\.sharding\.traffic\.Report",
    "dynaxla.errors.OptionError": r"def \(message: str.*\) -> dynaxla\.errors\.OptionError",
}


@pytest.mark.thorough
def test_mypy_sees_the_types_of_public_names(tmp_path: Path) -> None:
    """With default settings and the installed package, README's blocks have no errors, and no public name is Any."""
    assert STUB.with_name("py.typed").exists()
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    typed = "\n\ndef typed(number: int) -> torch.Tensor:\n    return torch.ones(number)\n\n"
    program = "\n".join([*blocks, typed, *(f"reveal_type({expression})" for expression in TYPES)])
    (tmp_path / "page.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--allow-redefinition", "--no-error-summary", "page.py"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    revealed = re.findall(r'^page\.py:\d+: note: Revealed type is "(.*)"$', process.stdout, re.MULTILINE)
    assert len(revealed) == len(TYPES), process.stdout + process.stderr
    wrong = {
        name: revealed_type
        for (name, pattern), revealed_type in zip(TYPES.items(), revealed, strict=True)
        if not re.fullmatch(pattern, revealed_type)
    }
    assert not wrong
    assert "error:" not in process.stdout
    assert all(any(name == part for use in TYPES for part in re.findall(r"^dynaxla\.(\w+)", use)) for name in dynaxla.__all__)
