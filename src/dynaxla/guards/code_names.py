"""The names that code uses: globals, attributes, imports; and detection of reflection, which reads attributes without naming them."""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .trusted_code import is_trusted_namespace

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL", "DELETE_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
# Functions and attributes with which code reads attributes, or globals, that it does not name.
_REFLECTION = frozenset(
    (
        "vars",
        "format",
        "format_map",
        "dir",
        "locals",
        "globals",
        "eval",
        "exec",
        "__dict__",
        "__getattribute__",
        "__getstate__",
        "__reduce__",
        "__reduce_ex__",
        "__globals__",
        "__closure__",
        "__code__",
        "inspect",
        "attrgetter",
        "methodcaller",
        "import_module",
        "__import__",
        "get_objects",
        "get_referents",
        "_getframe",
    )
)
_WORDS = re.compile(r"[^\W\d]\w*")
_NAMED = frozenset(("getattr", "hasattr", "setattr", "delattr"))
# Modules whose functions read all attributes of an object.
_LOOKING_MODULES = frozenset(("copy", "copyreg", "pickle", "inspect", "pprint", "reprlib", "json.encoder", "dataclasses"))


@dataclass(frozen=True)
class Names:
    """The names in a code object and in those of the functions inside it.

    Attributes:
        all: globals, attributes, cells, and string constants that could be attributes.
        read: the globals among them.
        imports: names of imported modules.
        reflects: True if the code can read attributes or globals that it does not name.
    """

    all: frozenset[str]
    read: tuple[str, ...]
    imports: tuple[str, ...]
    reflects: bool


@functools.lru_cache(8192)
def _names_by_identity(code: _Code) -> Names:
    parts, matches = list(codes(code.code)), False
    found: set[str] = set()
    read: dict[str, None] = {}
    imports: dict[str, None] = {}
    for part in parts:
        found.update(part.co_names, part.co_freevars, part.co_cellvars, _strings(part.co_consts))
        for instruction in dis.get_instructions(part):
            if instruction.opname in _GLOBAL:
                read[instruction.argval] = None
            elif instruction.opname == "IMPORT_NAME":
                imports[instruction.argval] = None
            matches = matches or instruction.opname == "MATCH_CLASS"  # reads the attributes in the class's __match_args__
    reflects = matches or not _REFLECTION.isdisjoint(name for part in parts for name in part.co_names) or any(map(_asks_by_variable, parts))
    return Names(frozenset(found), tuple(read), tuple(imports), reflects)


@dataclass(frozen=True)
class _Code:
    """A code object, compared by identity: equal code objects can differ in positions, and hashing one is slow."""

    code: types.CodeType

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self.code is other.code

    def __hash__(self) -> int:
        return id(self.code)


def names_of(code: types.CodeType) -> Names:
    """Returns the names that a function's code uses; computed once for each code object."""
    return _names_by_identity(_Code(code))


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def _strings(constants: Sequence[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str) and "{" in constant:  # a format string can name attributes
            yield from _WORDS.findall(constant)
        elif isinstance(constant, str):
            yield from constant.split(".") if constant.replace(".", "").isidentifier() else ()
        elif isinstance(constant, (tuple, frozenset)):
            yield from _strings(tuple(constant))


def _asks_by_variable(code: types.CodeType) -> bool:
    """True if code calls `getattr` and the like with a name that is not a constant, or uses these functions as values."""
    if _NAMED.isdisjoint(code.co_names):
        return False
    instructions = list(dis.get_instructions(code))
    for start, instruction in enumerate(instructions):
        if instruction.argval in _NAMED and instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            if not _second_is_constant(instructions[start + 1 :]):
                return True
        elif instruction.argval in _NAMED and "ATTR" in instruction.opname:
            return True
    return False


def _second_is_constant(instructions: Sequence[dis.Instruction]) -> bool:
    """True if the second argument of the call that begins here is a constant string, which reaches the call unchanged.

    `depth` is the number of the call's arguments on the stack. The constant is pushed on top of the first one, and stays until the call.
    """
    depth, constant = 0, False
    for instruction in instructions:
        name = instruction.opname
        if name in ("PRECALL", "CALL", "CALL_FUNCTION") and depth in (2, 3) and instruction.arg == depth:
            return constant
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return False
        effect = dis.stack_effect(instruction.opcode, instruction.arg)
        if constant and depth + effect <= 2:
            return False
        if depth == 1 and effect == 1:
            constant = name == "LOAD_CONST" and isinstance(instruction.argval, str)
        depth += effect
    return False


@dataclass(frozen=True)
class ExecutedCode:
    """The code that a run of a step has executed, and the names that this code uses.

    Attributes:
        codes: the code objects.
        trusted: those of trusted modules.
        names: all names; None if any attribute may have been read, because code uses reflection.
        namespaces: the globals that the code ran in; for each, the globals that the code reads there, and all names that it uses.
        imports: names of modules that untrusted code imports.
    """

    codes: frozenset[types.CodeType]
    trusted: frozenset[types.CodeType] = field(repr=False)
    names: frozenset[str] | None
    namespaces: Sequence[tuple[dict[str, Any], frozenset[str], frozenset[str]]] = field(repr=False)
    imports: frozenset[str] = frozenset()

    @classmethod
    def of(cls, executed: Mapping[types.CodeType, Sequence[dict[str, Any]]]) -> ExecutedCode:
        """Returns the `ExecutedCode` of a run. `executed` has the globals that each code object ran in."""
        everything: set[str] = set()
        imports: set[str] = set()
        trusted: set[types.CodeType] = set()
        reflects = False
        spaces: dict[int, tuple[dict[str, Any], set[str], set[str]]] = {}
        for code, places in executed.items():
            names = names_of(code)
            everything |= names.all
            for place in places:
                if is_trusted_namespace(place):
                    trusted.add(code)
                    reflects = reflects or place.get("__name__") in _LOOKING_MODULES
                else:
                    reflects = reflects or names.reflects
                    imports.update(names.imports)
                _, read, others = spaces.setdefault(id(place), (place, set(), set()))
                read.update(names.read)
                others.update(names.all)
        namespaces = [(place, frozenset(read), frozenset(others)) for place, read, others in spaces.values()]
        return cls(frozenset(executed), frozenset(trusted), None if reflects else frozenset(everything), namespaces, frozenset(imports))

    def reads(self, name: Any) -> bool:
        """True if an attribute of this name may have been read."""
        return self.names is None or name in self.names or not isinstance(name, str) or _is_special(name)


# Methods of a `torch.autograd.Function` that torch calls from C++.
_BY_AUTOGRAD = frozenset(("forward", "backward", "setup_context", "vmap", "jvp"))


def _is_special(name: str) -> bool:
    """True for names of attributes that Python or autograd reads by itself."""
    return (name.startswith("__") and name.endswith("__")) or name in _BY_AUTOGRAD
