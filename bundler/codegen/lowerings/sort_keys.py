# SPDX-License-Identifier: Apache-2.0
"""`SortKeys`: integers that stand for the elements of a row while it is sorted, made of terms.

A key has, from its highest bit on, the element's rank among the values of its dtype, its place, and
for floats whether it is -0.0. So keys are sorted upwards whatever the order is, all of them differ,
equal elements keep the order of their places, and a sorted key tells value and place again.  NaN is
the largest number, and all NaN are equal; so are zeros of both signs.
"""

from __future__ import annotations

from bundler.codegen.loops.data_types import data_type, identity_of
from bundler.codegen.loops.loop_terms import Term, TermPool

# Bits of a key, less its sign: the greatest number stays free for what comes behind every element.
_NARROW, _WIDE = 31, 63
# How many of the highest bits of float32 tell the numbers of a dtype apart.
_TOLD_APART = {"float32": 32, "float16": 19, "bfloat16": 16}
_INFINITY = {32: 0x7F800000, 64: 0x7FF0000000000000}


class SortKeys:
    """The keys of rows of one length.

    Args:
        pool: of the program.
        dtype: of the elements; bools are sorted as int8.
        length: of a row.
        descending: whether the largest elements come first.
    """

    def __init__(self, pool: TermPool, dtype: str, length: int, *, descending: bool) -> None:
        row = data_type(dtype)
        self._pool, self._dtype, self._descending = pool, dtype, descending
        self._sign = int(row.is_float)
        self._shift = self._sign + max(length - 1, 1).bit_length()
        # An unsigned number needs a bit for the sign that it does not have.
        width = _TOLD_APART.get(dtype, row.bits + dtype.startswith("u")) + self._shift
        self.fit = width <= _WIDE
        self.dtype = "int32" if width <= _NARROW else "int64"
        self.last = int(identity_of("min", self.dtype))

    def key(self, element: Term, place: Term) -> Term:
        """Return the key of an element of a row."""
        pool = self._pool
        rank = self._rank(element)
        parts = [self._shifted(rank, self._shift), self._shifted(place, self._sign)]
        if self._sign:
            bits = self._float_bits(element)
            least = pool.constant(-(2**31), "int32")
            parts.append(pool.cast(pool.operate("eq", bits, least, dtype="bool"), self.dtype))
        whole, *others = parts
        for other in others:
            whole = self._combined("or", whole, other)
        return whole

    def place(self, key: Term) -> Term:
        """Return the place that an element had before."""
        mask = self._pool.constant((1 << (self._shift - self._sign)) - 1, self.dtype)
        place = self._combined("and", self._right(key, self._sign), mask)
        return self._pool.cast(place, "int32")

    def element(self, key: Term) -> Term:
        """Return an element, bit for bit but for NaN."""
        pool = self._pool
        rank = self._right(key, self._shift)
        if self._descending:
            rank = pool.operate("bitwise_not", rank, dtype=rank.dtype)
        if not self._sign:
            return pool.cast(rank, self._dtype)
        left_out = 32 - _TOLD_APART[self._dtype]
        rank = pool.cast(rank, "int32")
        bits = _turned(pool, _by(pool, "lshift", rank, left_out))
        if left_out:
            # The bits of a negative number were turned with what was left out.
            bits = _with(pool, "and", bits, -(1 << left_out))
        one = self._combined("and", key, pool.constant(1, self.dtype))
        sign = _by(pool, "lshift", pool.cast(one, "int32"), 31)
        bits = pool.operate("bitwise_or", bits, sign, dtype="int32")
        number = pool.operate("to_dtype_bitcast", bits, dtype="float32")
        return pool.cast(number, self._dtype)

    def _rank(self, element: Term) -> Term:
        """Return an integer that is less where an element comes before another."""
        pool = self._pool
        if self._sign:
            rank = rank_of_float(pool, self._float_bits(element))
            rank = _by(pool, "rshift", rank, 32 - _TOLD_APART[self._dtype])
        else:
            rank = pool.cast(element, self.dtype)
        return pool.operate("bitwise_not", rank, dtype=rank.dtype) if self._descending else rank

    def _float_bits(self, element: Term) -> Term:
        wide = self._pool.cast(element, "float32")
        return self._pool.operate("to_dtype_bitcast", wide, dtype="int32")

    def _shifted(self, part: Term, bits: int) -> Term:
        return _by(self._pool, "lshift", self._pool.cast(part, self.dtype), bits)

    def _right(self, key: Term, bits: int) -> Term:
        return _by(self._pool, "rshift", key, bits)

    def _combined(self, sign: str, one: Term, other: Term) -> Term:
        return self._pool.operate(f"bitwise_{sign}", one, other, dtype=self.dtype)


def rank_of_float(pool: TermPool, bits: Term) -> Term:
    """Return of the bits of a float, as an integer, one that is less where the float is; NaN has
    the greatest, zeros have 0.
    """
    dtype = bits.dtype
    magnitude = _with(pool, "and", bits, int(identity_of("min", dtype)))
    infinity = pool.constant(_INFINITY[data_type(dtype).bits], dtype)
    nan = pool.operate("gt", magnitude, infinity, dtype="bool")
    zero = pool.operate("eq", magnitude, pool.constant(0, dtype), dtype="bool")
    rank = pool.operate("where", zero, magnitude, _turned(pool, bits), dtype=dtype)
    most = pool.constant(int(identity_of("min", dtype)), dtype)
    return pool.operate("where", nan, most, rank, dtype=dtype)


def _turned(pool: TermPool, bits: Term) -> Term:
    """Return bits of a float whose magnitude is turned over where it is negative, so that they are
    in the order of integers; the same again gives the bits back.
    """
    width = data_type(bits.dtype).bits
    signs = _by(pool, "rshift", bits, width - 1)
    turned = _with(pool, "and", signs, int(identity_of("min", bits.dtype)))
    return pool.operate("bitwise_xor", bits, turned, dtype=bits.dtype)


def _with(pool: TermPool, sign: str, term: Term, number: int) -> Term:
    other = pool.constant(number, term.dtype)
    return pool.operate(f"bitwise_{sign}", term, other, dtype=term.dtype)


def _by(pool: TermPool, operator: str, term: Term, bits: int) -> Term:
    """Return a term shifted by so many bits."""
    if bits == 0:
        return term
    return pool.operate(operator, term, pool.constant(bits, term.dtype), dtype=term.dtype)
