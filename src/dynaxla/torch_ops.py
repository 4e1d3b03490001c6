"""The ops of ATen and prims by name, including ops that the installed torch does not have.

    from ..torch_ops import aten

    aten.cumsum.default  # torch's OpOverload, or a MissingOp

torch sometimes removes an op (`aten.cholesky` in 2.14), and older releases lack newer ops. A lowering, a decomposition or a pass may name a
missing op without an error: a `MissingOp` is never the target of a node, and the registry of lowerings leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .errors import UnsupportedVersion


class MissingOp:
    """An op that the installed torch does not have, such as "aten.cholesky.default". Calling it raises UnsupportedVersion."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        message = f"torch {torch.__version__} has no {self.name}"
        raise UnsupportedVersion(message, hint="`dynaxla doctor` names the versions that are tested")

    def __repr__(self) -> str:
        return f"MissingOp({self.name})"


class _Overloads:
    """The overloads of one op, as attributes."""

    def __init__(self, namespace: str, name: str) -> None:
        self._namespace, self._name = namespace, name

    def __getattr__(self, overload: str) -> Any:
        if overload.startswith("__"):
            raise AttributeError(overload)
        try:
            found = getattr(getattr(getattr(torch.ops, self._namespace), self._name), overload)
        except AttributeError:
            found = MissingOp(f"{self._namespace}.{self._name}.{overload}")
        setattr(self, overload, found)  # later accesses do not call __getattr__
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the op. torch chooses the overload by the arguments."""
        return getattr(getattr(torch.ops, self._namespace), self._name)(*args, **kwargs)


class _Namespace:
    """The ops of one namespace, as attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, op: str) -> _Overloads:
        if op.startswith("__") and op.endswith("__") and not hasattr(getattr(torch.ops, self._name), op):
            raise AttributeError(op)
        found = _Overloads(self._name, op)
        setattr(self, op, found)
        return found


def passed_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a call of an overload passes, by name."""
    return {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | dict(kwargs)


def without_missing_ops(table: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns a copy of a table keyed by op, without the ops that the installed torch does not have."""
    return {op: value for op, value in table.items() if not isinstance(op, MissingOp)}


aten: Any = _Namespace("aten")
prims: Any = _Namespace("prims")
