# SPDX-License-Identifier: Apache-2.0
"""`grid_function`: a grid as the text of a C++ function, which is C as well; `identifier` makes
names that both languages take.

`kernel_export` writes the functions into the header of an exported kernel, behind `HELPERS`.  Sizes
are 64-bit numbers, and whatever has no such value is an error: a number that does not fit, a
division by zero, a size below zero.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping

from bundler.errors import ConfigError
from bundler.runtime.grids import LIMITS
from bundler.runtime.heuristics.grid_expressions import GridExpressions
from bundler.runtime.heuristics.launch_expressions import parsed

# Words of C and C++, and macros that compilers define without being asked: none of them can be the
# name of a size.
_RESERVED = frozenset(
    re.findall(
        r"\w+",
        """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
    concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do
    double dynamic_cast else enum explicit export extern false float for friend goto i386 if inline int linux long mutable
    namespace new noexcept not not_eq NULL nullptr operator or or_eq private protected public register reinterpret_cast
    requires restrict return short signed sizeof static static_assert static_cast struct switch template this thread_local
    throw true try typedef typeid typename typeof union unix unsigned using virtual void volatile wchar_t while xor xor_eq
    """,
    )
)
_OWN = re.compile(r"bundler_|BUNDLER_|__|_[A-Z]|u?int\d+_t$|INT\d+_|UINT\d+_")
_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
}
_MOST = 2**63 - 1

HELPERS = r"""
/* What a grid function returns: the grid is good (it may have a zero, and is not to be launched then), or why there is none. */
enum { BUNDLER_GRID_OK = 0, BUNDLER_GRID_BAD_SIZE = 1, BUNDLER_GRID_TOO_LARGE = 2 };

/* Arithmetic as Python has it, on 64 bits; what has no such result sets *bad. */
static inline int64_t bundler_add(int64_t a, int64_t b, int *bad) {
  if (b > 0 ? a > INT64_MAX - b : a < INT64_MIN - b) { *bad = 1; return 0; }
  return a + b;
}
static inline int64_t bundler_sub(int64_t a, int64_t b, int *bad) {
  if (b < 0 ? a > INT64_MAX + b : a < INT64_MIN + b) { *bad = 1; return 0; }
  return a - b;
}
static inline int64_t bundler_mul(int64_t a, int64_t b, int *bad) {
  if (a == 0 || b == 0) return 0;
  if (a > 0 ? (b > 0 ? a > INT64_MAX / b : b < INT64_MIN / a) : (b > 0 ? a < INT64_MIN / b : b < INT64_MAX / a)) { *bad = 1; return 0; }
  return a * b;
}
static inline int64_t bundler_floordiv(int64_t a, int64_t b, int *bad) {
  if (b == 0 || (b == -1 && a == INT64_MIN)) { *bad = 1; return 0; }
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
static inline int64_t bundler_ceildiv(int64_t a, int64_t b, int *bad) {
  if (b == 0 || (b == -1 && a == INT64_MIN)) { *bad = 1; return 0; }
  return a / b + (a % b != 0 && (a < 0) == (b < 0));
}
static inline int64_t bundler_mod(int64_t a, int64_t b, int *bad) {
  int64_t rest;
  if (b == 0) { *bad = 1; return 0; }
  if (b == -1) return 0;
  rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
static inline int64_t bundler_neg(int64_t a, int *bad) { return bundler_sub(0, a, bad); }
static inline int64_t bundler_abs(int64_t a, int *bad) { return a < 0 ? bundler_neg(a, bad) : a; }
static inline int64_t bundler_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t bundler_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int bundler_grid_of(int64_t x, int64_t y, int64_t z, int64_t most_x, int64_t most_y, int64_t most_z, int bad,
                                  uint32_t grid[3]) {
  if (bad) return BUNDLER_GRID_BAD_SIZE;
  if (x < 0 || y < 0 || z < 0 || x > most_x || y > most_y || z > most_z) return BUNDLER_GRID_TOO_LARGE;
  grid[0] = (uint32_t)x; grid[1] = (uint32_t)y; grid[2] = (uint32_t)z;
  return BUNDLER_GRID_OK;
}
"""


def identifier(name: str, taken: Iterable[str] = ()) -> str:
    """Return a name of C and C++ for a name of Python: the same where that can be, and none of
    those that are taken.
    """
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    if not plain or plain[0].isdigit() or _OWN.match(plain):
        plain = f"k{plain}"
    known = {*taken, *_RESERVED}
    while plain in known:
        plain += "_"
    return plain


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """Return a name of C for each of several names, no two of them the same."""
    found: dict[str, str] = {}
    for name in names:
        found[name] = identifier(name, found.values())
    return found


def expression_text(expression: str, names: Mapping[str, str]) -> str:
    """Return an expression over sizes as an expression of C++, of the type int64_t; it uses
    `HELPERS`.

    Args:
        expression: as `launch_expressions.evaluate` takes it.
        names: of the sizes, in C++.

    Raises:
        ConfigError: it is no expression, or a number in it does not fit 64 bits.
    """
    return _text(parsed(expression), names)


def grid_function(name: str, grid: GridExpressions, backend: str, cluster: int = 1) -> str:
    """Return a C++ function that works a grid out: `int NAME(int64_t size, ..., uint32_t grid[3])`;
    it uses `HELPERS`.

    It returns `BUNDLER_GRID_OK`, or why the sizes have no grid.

    Args:
        name: the function's.
        grid: its parameters are the sizes in it, in their order.
        backend: whose limits hold.
        cluster: blocks for each program.

    Raises:
        ConfigError: the grid cannot be written so.
    """
    names = identifiers(("grid", *grid.sizes))
    parameters = [f"int64_t {names[size]}, " for size in grid.sizes]
    lines = [
        f"static inline int {name}({''.join(parameters)}uint32_t grid[3]) {{",
        "  int bundler_bad = 0;",
    ]
    lines += [
        f"  const int64_t bundler_{axis} = {expression_text(text, names)};"
        for axis, text in zip("xyz", grid.axes, strict=True)
    ]
    if grid.positive:
        lines += [f"  if ({names[size]} < 0) bundler_bad = 1;" for size in grid.sizes]
    x, y, z = LIMITS[backend]
    lines += [
        (
            f"  return bundler_grid_of(bundler_x, bundler_y, bundler_z, {x // cluster}, {y}, {z},"
            " bundler_bad, grid);"
        ),
        "}",
    ]
    return "\n".join(lines)


def _text(node: ast.expr, names: Mapping[str, str]) -> str:
    match node:
        case ast.Constant(value=int() as number) if number > _MOST:
            raise ConfigError(f"grid: {number} does not fit 64 bits", got=number)
        case ast.Constant(value=int() as number):
            return f"INT64_C({number})"
        case ast.Name(id=name):
            return names[name]
        # How a division is rounded up where division rounds down; as one step it is easier to read,
        # and cannot overflow.
        case ast.UnaryOp(
            op=ast.USub(),
            operand=ast.BinOp(
                left=ast.UnaryOp(op=ast.USub(), operand=a), op=ast.FloorDiv(), right=b
            ),
        ):
            return _call("ceildiv", (a, b), names)
        case ast.BinOp(left=left, op=op, right=right):
            return _call(_BINARY[type(op)], (left, right), names)
        case ast.UnaryOp(op=sign, operand=operand):
            return (
                _call("neg", (operand,), names)
                if isinstance(sign, ast.USub)
                else _text(operand, names)
            )
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    if node.func.id == "abs":
        return _call("abs", node.args, names)
    text, *others = (_text(argument, names) for argument in node.args)
    for other in others:
        text = f"bundler_{node.func.id}({text}, {other})"
    return text


def _call(helper: str, operands: Iterable[ast.expr], names: Mapping[str, str]) -> str:
    words = [*(_text(operand, names) for operand in operands), "&bundler_bad"]
    return f"bundler_{helper}({', '.join(words)})"
