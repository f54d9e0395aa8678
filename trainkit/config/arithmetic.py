"""Arithmetic in the text of a config, such as ``[int(x * 64) for x in range(5)]``, evaluated without running code."""

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
_MAX_BITS = 300  # size of an int: about 90 digits
_MAX_ITEMS = 100  # length of a result, with inner items


def _round(number: Any) -> int:
    return round(number)  # only one argument: round(1, -(10**80)) would take for ever


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "float": float,
    "int": int,
    "list": list,
    "range": range,
    "round": _round,
    "tuple": tuple,
}


def evaluate_arithmetic(text: str) -> Any:
    """The number, tuple or list given by ``text``, such as ``2 ** 0.5`` or ``(4000, 2 * 4000)``.

    The text may have operators, one loop ``[... for name in ...]``, and calls of ``_FUNCTIONS``.

    Raises:
        ValueError: the text has something else, or is too large.
    """
    try:
        if len(text) > _MAX_TEXT:
            raise _Refused(f"it has more than {_MAX_TEXT} characters")
        return _value_of(ast.parse(text.strip(), mode="eval").body, {})
    except (_Refused, SyntaxError, ArithmeticError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"eval takes arithmetic of numbers only, got {text!r:.80} ({error}); write the values instead"
        ) from error


class _Refused(Exception):
    pass


def _value_of(node: ast.expr, variable: dict[str, Any]) -> Any:
    def value_of(node: ast.expr) -> Any:
        return _value_of(node, variable)

    match node:
        case ast.Name(id=name) if name in variable:
            return variable[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            value = _FUNCTIONS[name](*map(value_of, arguments))
            if isinstance(value, range) and len(value) > _MAX_ITEMS:
                raise _Refused(f"it has more than {_MAX_ITEMS} items")
            return _checked([*value] if isinstance(value, range) else value)
        case ast.ListComp(elt=item, generators=[ast.comprehension(target=ast.Name(id=name), iter=items, ifs=[])]) if (
            not variable
        ):  # a nested loop could take for ever
            return _checked([_value_of(item, {name: value}) for value in value_of(items)])
        case ast.Constant(value=bool() | int() | float() as value):
            return _checked(value)
        case ast.Tuple(elts=items):
            return _checked(tuple(map(value_of, items)))
        case ast.List(elts=items):
            return _checked([*map(value_of, items)])
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as op, operand=operand):
            value = value_of(operand)
            return -value if isinstance(op, ast.USub) else +value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _combine(type(op), value_of(left), value_of(right))
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
