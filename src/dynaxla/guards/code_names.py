"""Finds the names that code uses (globals, attributes, imports), and reflection: code that reads attributes without naming them."""

from __future__ import annotations

import builtins
import dis
import functools
import operator
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .trusted_code import is_trusted_namespace

_GLOBAL_OPCODES = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL", "DELETE_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
# Functions and attributes with which code reads attributes or globals without naming them.
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
# Functions that read or write the attribute whose name is their second argument.
_BY_NAME = frozenset(("getattr", "hasattr", "setattr", "delattr"))
_REFLECTING_BUILTINS = tuple(vars(builtins)[name] for name in (*sorted(_BY_NAME), "vars", "dir", "locals", "globals", "eval", "exec"))
# Modules whose functions read all attributes of an object.
_REFLECTING_MODULES = frozenset(("copy", "copyreg", "pickle", "inspect", "pprint", "reprlib", "json.encoder", "dataclasses", "argparse"))


@dataclass(frozen=True)
class Names:
    """The names in a code object and in the code of the functions inside it.

    Attributes:
        all: globals, attributes, cells, and string constants that could be attributes.
        globals: the names of the global variables that the code reads, sets or deletes.
        imports: names of imported modules.
        reflects: True if the code uses reflection, and so can read attributes or globals without naming them.
    """

    all: frozenset[str]
    globals: tuple[str, ...]
    imports: tuple[str, ...]
    reflects: bool


@functools.lru_cache(8192)
def _names_by_identity(code: _Code) -> Names:
    parts, matches_classes = list(codes(code.code)), False
    found: set[str] = set()
    global_names: dict[str, None] = {}
    imports: dict[str, None] = {}
    for part in parts:
        found.update(part.co_names, part.co_freevars, part.co_cellvars, _strings(part.co_consts))
        for instruction in dis.get_instructions(part):
            if instruction.opname in _GLOBAL_OPCODES:
                global_names[instruction.argval] = None
            elif instruction.opname == "IMPORT_NAME":
                imports[instruction.argval] = None
            # A class pattern reads the attributes in the class's __match_args__.
            matches_classes = matches_classes or instruction.opname == "MATCH_CLASS"
    reflects = (
        matches_classes
        or not _REFLECTION.isdisjoint(name for part in parts for name in part.co_names)
        or any(map(_uses_variable_names, parts))
    )
    return Names(frozenset(found), tuple(global_names), tuple(imports), reflects)


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


def reads_by_name(value: Any, path: str) -> bool:
    """True if calls of an object at this path read attributes that no code names.

    The names in the code show calls of a builtin function under its own name, so the result is False for such a path.
    """
    if isinstance(value, types.BuiltinFunctionType):
        return value in _REFLECTING_BUILTINS and path.rpartition(".")[2] != value.__name__
    return isinstance(value, (operator.attrgetter, operator.methodcaller))


def could_check_classes(executed: Mapping[types.CodeType, Sequence[dict[str, Any]]]) -> bool:
    """True if executed untrusted code could check classes, and so distinguish a traced number (training/traced_numbers.py) from a float."""
    return any(
        not all(map(is_trusted_namespace, namespaces)) and ("type" in names_of(code).globals or "__class__" in names_of(code).all)
        for code, namespaces in executed.items()
    )


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object, and the code objects of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def _strings(constants: Sequence[Any]) -> Iterator[str]:
    """Yields the names in string constants that could be names of attributes."""
    for constant in constants:
        if isinstance(constant, str) and "{" in constant:  # a format string can name attributes
            yield from _WORDS.findall(constant)
        elif isinstance(constant, str):
            yield from constant.split(".") if constant.replace(".", "").isidentifier() else ()
        elif isinstance(constant, (tuple, frozenset)):
            yield from _strings(tuple(constant))


def _uses_variable_names(code: types.CodeType) -> bool:
    """True if code calls a function of `_BY_NAME` with a name that is not a constant, or uses such a function as a value."""
    if _BY_NAME.isdisjoint(code.co_names):
        return False
    instructions = list(dis.get_instructions(code))
    for start, instruction in enumerate(instructions):
        if instruction.argval in _BY_NAME and instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            if not _second_is_constant(instructions[start + 1 :]):
                return True
        elif instruction.argval in _BY_NAME and "ATTR" in instruction.opname:
            return True
    return False


def _second_is_constant(instructions: Sequence[dis.Instruction]) -> bool:
    """True if the second argument of a call is a constant string.

    `depth` counts the call's arguments on the stack. An instruction after the constant that leaves two or fewer has consumed the constant.

    Args:
        instructions: the instructions after the load of the called function.
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
    """The code that earlier calls of a function have executed, and the names that this code uses.

    Attributes:
        codes: the code objects.
        trusted: the code objects that have run with the globals of a trusted module.
        names: all names that the code uses; None if the code uses reflection, and so may have read any attribute.
        namespaces: for each module whose code ran: the module's globals, the names of the globals that the code uses, and all names that
            the code uses.
        imports: names of modules that untrusted code imports.
    """

    codes: frozenset[types.CodeType]
    trusted: frozenset[types.CodeType] = field(repr=False)
    names: frozenset[str] | None
    namespaces: Sequence[tuple[dict[str, Any], frozenset[str], frozenset[str]]] = field(repr=False)
    imports: frozenset[str] = frozenset()

    @classmethod
    def of(cls, executed: Mapping[types.CodeType, Sequence[dict[str, Any]]]) -> ExecutedCode:
        """Returns the `ExecutedCode` of code objects, each with the globals that the code ran in."""
        everything: set[str] = set()
        imports: set[str] = set()
        trusted: set[types.CodeType] = set()
        reflects = False
        spaces: dict[int, tuple[dict[str, Any], set[str], set[str]]] = {}
        for code, code_namespaces in executed.items():
            names = names_of(code)
            everything |= names.all
            for values in code_namespaces:
                if is_trusted_namespace(values):
                    trusted.add(code)
                    reflects = reflects or values.get("__name__") in _REFLECTING_MODULES
                else:
                    reflects = reflects or names.reflects
                    imports.update(names.imports)
                _, global_names, all_names = spaces.setdefault(id(values), (values, set(), set()))
                global_names.update(names.globals)
                all_names.update(names.all)
        namespaces = [(values, frozenset(global_names), frozenset(all_names)) for values, global_names, all_names in spaces.values()]
        return cls(frozenset(executed), frozenset(trusted), None if reflects else frozenset(everything), namespaces, frozenset(imports))

    def reads(self, name: Any) -> bool:
        """True if an attribute of this name may have been read."""
        return self.names is None or name in self.names or not isinstance(name, str) or _is_special(name)

    @functools.cached_property
    def reads_offsets(self) -> bool:
        """True if the code names a function whose result depends on the distance of a tensor from the start of its storage."""
        return not all(names.isdisjoint(_OFFSET_FUNCTIONS) for _, _, names in self.namespaces)


_OFFSET_FUNCTIONS = frozenset(("storage_offset", "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"))
# Methods of a `torch.autograd.Function` that torch calls from C++.
_CALLED_BY_AUTOGRAD = frozenset(("forward", "backward", "setup_context", "vmap", "jvp"))


def _is_special(name: str) -> bool:
    """True for the name of an attribute that Python or autograd reads without code that names it."""
    return (name.startswith("__") and name.endswith("__")) or name in _CALLED_BY_AUTOGRAD
