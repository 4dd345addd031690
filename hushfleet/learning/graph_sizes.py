"""Represents tensor sizes for an open batch size: numbers, or polynomials of the batch size.

No coefficient is negative, so every size, and every sum and product of sizes, is largest at the largest batch. So one
check of the largest batch bounds all batches, and does not reveal how many samples a device has.

This interpreter can be removed when the board trains in a separate process with a memory and time limit.
"""

from __future__ import annotations

from itertools import zip_longest

from hushfleet.errors import GraphRefused

MAX_DEGREE = 4
MAX_COEFFICIENT = 1 << 256  # limit of the calculation; it is far above all caps that refuse a graph


class Open:
    """c0 + c1 B + c2 B^2 + ... with the batch size B; never a plain number."""

    __slots__ = ("terms",)

    def __init__(self, *terms: int) -> None:
        self.terms = terms

    def at(self, batch: int) -> int:
        """Computes the size for a batch of `batch` samples."""
        return sum(term * batch**power for power, term in enumerate(self.terms))

    def __add__(self, other: Size) -> Size:
        return _size([a + b for a, b in zip_longest(self.terms, _terms(other), fillvalue=0)])

    def __mul__(self, other: Size) -> Size:
        others = _terms(other)
        product = [0] * (len(self.terms) + len(others) - 1)
        for i, a in enumerate(self.terms):
            for j, b in enumerate(others):
                product[i + j] += a * b
        return _size(product)

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Open) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(self.terms)

    def __gt__(self, other: int) -> bool:
        return self.at(1) > other

    def __ge__(self, other: int) -> bool:
        return self.at(1) >= other

    def __repr__(self) -> str:
        powers = ("", "batch", *(f"batch^{power}" for power in range(2, len(self.terms))))
        parts = [(term, name) for term, name in zip(self.terms, powers, strict=True) if term]
        return " + ".join(name if name and term == 1 else f"{term} {name}".rstrip() for term, name in parts)


Size = int | Open
BATCH = Open(0, 1)


def at(size: Size, batch: int) -> int:
    """Evaluates a size at a batch size."""
    return size.at(batch) if isinstance(size, Open) else size


def fixed(size: Size) -> int:
    """Returns the size as a number. Raises `GraphRefused` if it depends on the batch."""
    if isinstance(size, Open):
        raise GraphRefused(f"a size of {size!r} stands where one is needed that does not depend on the batch")
    return size


def divide(size: Size, by: Size) -> Size | None:
    """Returns `size / by` if that is a size for every batch, else None; `by` is not 0."""
    *below, factor = _terms(by)
    terms, power = _terms(size), len(below)
    if any(below) or any(terms[:power]) or any(term % factor for term in terms):
        return None
    return _size([term // factor for term in terms[power:]] or [0])


def _terms(size: Size) -> tuple[int, ...]:
    return size.terms if isinstance(size, Open) else (size,)


def _size(terms: list[int]) -> Size:
    while len(terms) > 1 and not terms[-1]:
        terms.pop()
    if len(terms) == 1:
        return terms[0]
    if min(terms) < 0 or len(terms) > MAX_DEGREE + 1 or max(terms) > MAX_COEFFICIENT:
        raise GraphRefused("a size depends on the batch in a way that is not allowed")
    return Open(*terms)
