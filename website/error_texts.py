"""The texts of all errors of dynaxla, for the page on troubleshooting. The sources are parsed, not imported.

The text of an error is a string with values, where the error is raised. Here, `…` stands for a value. A text with alternatives is listed
once for each alternative.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "dynaxla"
VALUE = "…"
# A part with more alternatives than _MOST counts as a value. A message with fewer letters than _LEAST is ignored: it has only values.
_MOST, _LEAST = 6, 8


@dataclass(frozen=True, order=True)
class ErrorText:
    """A class of errors, with a message and its hint ("" for none), in which `…` stands for values."""

    error: str
    message: str
    hint: str

    def says(self, text: str) -> bool:
        """True if a text is this message with values."""
        return re.fullmatch(".+".join(map(re.escape, self.message.split(VALUE))), text, re.DOTALL) is not None


def error_classes() -> dict[str, str]:
    """Returns the docstrings of the classes of errors.py, in the file's order, by name. The base class is first."""
    classes = [node for node in ast.parse((SOURCE / "errors.py").read_text()).body if isinstance(node, ast.ClassDef)]
    return {node.name: ast.get_docstring(node) or "" for node in classes}


@functools.cache
def error_texts() -> tuple[ErrorText, ...]:
    """Returns all messages in the sources, sorted by class and text."""
    texts = {text for path in sorted(SOURCE.rglob("*.py")) for text in _texts_of(path.read_text())}
    return tuple(sorted(texts))


def _texts_of(source: str) -> Iterator[ErrorText]:
    known = error_classes()
    if not any(name in source for name in known):
        return
    for scope, call in _calls(ast.parse(source)):
        name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name in known and call.args:
            hints = [keyword.value for keyword in call.keywords if keyword.arg == "hint"]
            for message, hint in itertools.product(_wordings(call.args[0], scope), _wordings(hints[0], scope) if hints else [""]):
                if len(re.findall(r"[a-z]", message)) >= _LEAST:
                    yield ErrorText(name, _tidy(message), _tidy(hint) if re.search(r"\w", hint) else "")


Scope = dict[str, list[ast.expr]]


def _calls(tree: ast.AST, scope: Scope | None = None) -> Iterator[tuple[Scope, ast.Call]]:
    """Yields all calls, with the expressions that the module and the functions around a call assign to names."""
    scope = {**(scope or {}), **_assigned(tree)}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _calls(node, scope)
        else:
            if isinstance(node, ast.Call):
                yield scope, node
            yield from _calls(node, scope) if isinstance(node, ast.ClassDef) else _inner(node, scope)


def _inner(node: ast.AST, scope: Scope) -> Iterator[tuple[Scope, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _calls(child, scope)
            continue
        if isinstance(child, ast.Call):
            yield scope, child
        yield from _inner(child, scope)


def _assigned(scope: ast.AST) -> Scope:
    """Returns the expressions that a scope assigns to names, without those of functions in it."""
    expressions: Scope = {}
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            expressions.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            for target, value in zip(node.targets[0].elts, node.value.elts, strict=False):
                if isinstance(target, ast.Name):
                    expressions.setdefault(target.id, []).append(value)
        waiting += ast.iter_child_nodes(node)
    return expressions


def _wordings(node: ast.expr, scope: Scope, depth: int = 0) -> list[str]:
    """Returns the possible texts of an expression."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = [_wordings(part, scope, depth) for part in node.values]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_wordings(node.left, scope, depth), _wordings(node.right, scope, depth)]
    elif isinstance(node, ast.FormattedValue):
        return _wordings(node.value, scope, depth) if isinstance(node.value, (ast.Name, ast.IfExp)) and node.conversion == -1 else [VALUE]
    elif isinstance(node, ast.IfExp):
        alternatives = [*_wordings(node.body, scope, depth), *_wordings(node.orelse, scope, depth)]
        return alternatives if len(alternatives) <= _MOST else [VALUE]
    elif isinstance(node, ast.Name) and node.id in scope and depth < 3:
        alternatives = [text for value in scope[node.id] for text in _wordings(value, scope, depth + 1)]
        return alternatives if len(alternatives) <= _MOST else [VALUE]
    else:
        return [VALUE]
    texts = ["".join(chosen) for chosen in itertools.product(*parts)]
    return texts if len(texts) <= _MOST else ["".join(VALUE if len(part) > 1 else part[0] for part in parts)]


def _tidy(text: str) -> str:
    """Joins adjacent values, and joins the lines without their indentation."""
    return re.sub(rf"{VALUE}(\s*{VALUE})+", VALUE, re.sub(r"\s+", " ", text)).strip()


def listing() -> str:
    """Returns Markdown: for each class, its meaning, and its messages with hints."""
    texts, parts = error_texts(), []
    for error, meaning in error_classes().items():
        own = [text for text in texts if text.error == error]
        parts.append(f"### {error}\n\n{meaning.partition('Attributes:')[0].strip()}")
        if own:
            rows = [f"| {_cell(text.message)} | {_cell(text.hint)} |" for text in own]
            parts.append("\n".join(["| message | what to do |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    """Returns a text escaped for a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)
