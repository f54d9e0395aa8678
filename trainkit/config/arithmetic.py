"""Arithmetic that a config may hold as text: of numbers, tuples and lists, and of nothing that has a name."""

import ast
import operator
from collections.abc import Callable
from typing import Any

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_MAX_TEXT = 500
_MAX_BITS = 300  # of an int: some 90 digits
_MAX_ITEMS = 100  # of a result, inner ones counted


def evaluate_arithmetic(text: str) -> Any:
    """The number, tuple or list that ``text`` stands for, such as ``2 ** 0.5`` or ``(4000, 2 * 4000)``.

    Raises:
        ValueError: it is something else, or too large.
    """
    try:
        if len(text) > _MAX_TEXT:
            raise _Refused(f"it has more than {_MAX_TEXT} characters")
        return _value_of(ast.parse(text.strip(), mode="eval").body)
    except (_Refused, SyntaxError, ArithmeticError, MemoryError, RecursionError, TypeError) as error:
        raise ValueError(
            f"eval takes arithmetic of numbers only, got {text!r:.80} ({error}); write the values instead"
        ) from error


class _Refused(Exception):
    pass


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return _checked(value)
        case ast.Tuple(elts=items):
            return _checked(tuple(map(_value_of, items)))
        case ast.List(elts=items):
            return _checked([*map(_value_of, items)])
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as op, operand=operand):
            value = _value_of(operand)
            return -value if isinstance(op, ast.USub) else +value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _combine(type(op), _value_of(left), _value_of(right))
    raise _Refused(f"{ast.unparse(node):.80} is no number")


def _combine(op: type[ast.operator], left: Any, right: Any) -> Any:
    if op is ast.Pow and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
        raise _Refused("the power is too large")
    if op is ast.Mult:
        for items, times in ((left, right), (right, left)):
            if isinstance(items, list | tuple) and _size(items) * times > _MAX_ITEMS:
                raise _Refused(f"it has more than {_MAX_ITEMS} items")
    return _checked(_OPERATORS[op](left, right))


def _checked(value: Any) -> Any:
    if isinstance(value, complex):
        raise _Refused("it is a complex number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise _Refused("an int is too large")
    if _size(value) > _MAX_ITEMS:
        raise _Refused(f"it has more than {_MAX_ITEMS} items")
    return value


def _size(value: Any) -> int:
    return 1 + sum(map(_size, value)) if isinstance(value, list | tuple) else 1
