"""The figures of a program for TPUs, from its text and XLA's analyses."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from commands.compiled_programs.hlo import NO_WORK, Instruction, Module

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CONSTANT = re.compile(r"^[su]\d+\[\]\S* constant\((\d+)\)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_BODY = re.compile(r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OPERANDS = re.compile(r"%([\w.\-]+)")
_MIB = 1 << 20


def figures(text: str, memory: Any, costs: Any) -> dict[str, Any]:
    """Returns the figures of a program.

    Args:
        text: The optimized HLO.
        memory: XLA's memory statistics.
        costs: XLA's cost analysis.

    Returns:
        cycles: the compiler's estimate. The body of a loop is counted n times, where n is the largest constant of the loop's condition;
            kernels written in Pallas do not count.
        instructions: those of the entry computation, without those that do no work.
        copies: the copies among them, asynchronous ones included.
        float32_products: the products and convolutions of two float32 operands.
        memory_mib, argument_mib: the temporary memory, and that of the arguments.
        gigabytes: the bytes that are read and written, in units of 10^9.
        calls: the numbers of custom calls by name, and of host callbacks.
    """
    module = Module.parse(text)
    work = [item for item in module.entry if item.opcode not in NO_WORK and not item.opcode.endswith("-done")]
    calls = Counter(item.target for items in module.computations.values() for item in items if item.opcode == "custom-call")
    return {
        "cycles": _cycles(module, module.entry),
        "instructions": len(work),
        "copies": sum(item.opcode in ("copy", "copy-start") and "S(" not in item.line.partition(" copy")[0] for item in work),
        "float32_products": sum(_float32_products(items) for items in module.computations.values()),
        "memory_mib": round(memory.temp_size_in_bytes / _MIB, 1),
        "argument_mib": round(memory.argument_size_in_bytes / _MIB, 1),
        "gigabytes": round(float((costs or {}).get("bytes accessed", 0)) / 1e9, 3),
        "calls": {name: count for name, count in sorted(calls.items()) if name in _REPORTED or "callback" in name},
    }


# The custom calls that a report names: kernels written in Pallas, and ops that are not HLO. The others are annotations of XLA:TPU.
_REPORTED = frozenset(["tpu_custom_call", "Eigh", "LuDecomposition", "Qr", "ProductOfElementaryHouseholderReflectors", "TopK"])


def _cycles(module: Module, computation: list[Instruction]) -> int:
    total = 0
    for item in computation:
        if match := _CYCLES.search(item.line):
            total += int(match[1])
        elif item.opcode in ("while", "call", "conditional"):
            names = _BODY.findall(item.line)
            if branches := _BRANCHES.search(item.line):
                names += _OPERANDS.findall(branches[1])
            total += _trips(module, item) * sum(_cycles(module, module.computations[name]) for name in names)
    return total


def _trips(module: Module, instruction: Instruction) -> int:
    """Returns the number of iterations of a loop over a counter; 1 for other instructions."""
    condition = _CONDITION.search(instruction.line)
    items = module.computations[condition[1]] if condition else []
    return max([1, *(int(match[1]) for item in items if (match := _CONSTANT.match(item.line)))])


def _float32_products(computation: list[Instruction]) -> int:
    dtypes = {item.name: item.line.partition("[")[0] for item in computation}
    count = 0
    for item in computation:
        if item.opcode in ("convolution", "dot"):
            operands = _OPERANDS.findall(item.line.partition(f" {item.opcode}(")[2].partition(")")[0])
            count += [dtypes.get(name) for name in operands[:2]] == ["f32", "f32"]
    return count
