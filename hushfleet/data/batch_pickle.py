"""The pickles in which CIFAR is distributed, read without Python's unpickler.

Even a restricted unpickler lets some bytes take gigabytes or hours: an index of its memo makes it allocate up to that
index, a codec of Python applied again and again doubles a string each time, nested tuples as a key are hashed without
end. So the few opcodes that a batch has are carried out here: time and memory are linear in the file.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class Pickled:
    """What a call of a global made, and what its state was set to: an array, the type of one, or encoded text."""

    callee: str
    arguments: tuple[Any, ...]
    state: tuple[Any, ...] = field(default=())


@dataclass(frozen=True)
class Global:
    name: str


# The last part of a name says enough, since nothing is imported: NumPy moved the module of `_reconstruct`.
GLOBALS = ("ndarray", "dtype", "_reconstruct", "encode")
VALUES = ("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING",
          "SHORT_BINBYTES", "BINBYTES", "SHORT_BINUNICODE", "BINUNICODE")  # fmt: skip
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_batch(content: bytes) -> dict[str, Any]:
    """The dictionary of a batch, of protocol 2 to 4; its arrays are left to `bytes_of`.

    :raises Exception: of many kinds, for bytes that are something else.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def popped(count: int) -> list[Any]:
        if not 0 <= count <= len(stack):
            raise ValueError("it takes more from its stack than is there")
        taken = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return taken

    value: Any
    for opcode, value, _ in pickletools.genops(content):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                if type(stack[-1]) is not dict:
                    raise ValueError("it is no dictionary")
                return stack[-1]
            case name if name in VALUES:
                stack.append(value)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "TUPLE":
                stack.append(tuple(popped(len(stack) - marks.pop())))
            case name if name in TUPLES:
                stack.append(tuple(popped(TUPLES[name])))
            case "APPEND" | "APPENDS" as name:
                items = popped(1 if name == "APPEND" else len(stack) - marks.pop())
                _expect(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS" as name:
                items = popped(2 if name == "SETITEM" else len(stack) - marks.pop())
                keys = [_expect(str, key) for key in items[::2]]
                _expect(dict, stack[-1]).update(zip(keys, items[1::2], strict=True))
            case "GLOBAL":
                stack.append(_global(*value.split(" ")))
            case "STACK_GLOBAL":
                stack.append(_global(*popped(2)))
            case "REDUCE":
                callee, arguments = popped(2)
                stack.append(Pickled(_expect(Global, callee).name, _expect(tuple, arguments)))
            case "BUILD":
                (state,) = popped(1)
                _expect(Pickled, stack[-1]).state = _expect(tuple, state)
            case name:
                raise ValueError(f"it uses the opcode {name}, which an array does not need")
    raise ValueError("it has no end")


def bytes_of(array: Any) -> npt.NDArray[np.uint8]:
    """The array of bytes that a batch holds."""
    _version, shape, kind, by_columns, values = _called("_reconstruct", array).state
    if (name := _expect(str, _called("dtype", kind).arguments[0])) != "u1":
        raise ValueError(f"its array is of type {name}; bytes are expected")
    if isinstance(values, Pickled):  # how Python 3 writes bytes in protocol 2
        values = _called("encode", values).arguments[0]
    content = values.encode("latin1") if isinstance(values, str) else _expect(bytes, values)
    if min(_expect(int, size) for size in shape) < 0 or math.prod(shape) != len(content):
        raise ValueError(f"its array {list(shape)} has {len(content)} bytes")
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C").copy()


def labels_of(numbers: Any) -> npt.NDArray[np.int64]:
    """The list of small integers that a batch holds."""
    return np.array([_expect(int, number) for number in _expect(list, numbers)], dtype=np.int64)


def _called(name: str, made: Any) -> Pickled:
    called: Pickled = _expect(Pickled, made)
    if called.callee != name:
        raise ValueError(f"it calls {called.callee} where {name} is expected")
    return called


def _global(module: str, name: str) -> Global:
    if _expect(str, name) not in GLOBALS:
        raise ValueError(f"it asks for {_expect(str, module)}.{name}, which an array does not need")
    return Global(name)


def _expect(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has a {type(value).__name__} where a {kind.__name__} is expected")
    return value
