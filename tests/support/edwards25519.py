"""The curve of Ed25519 by the formulas of RFC 8032, slow and plain: an oracle for the rule of public keys."""

from __future__ import annotations

from functools import cache

P = (1 << 255) - 19
D = -121665 * pow(121666, -1, P) % P
L = (1 << 252) + 27742317777372353535851937790883648493
"""The order of the base point."""

Point = tuple[int, int]
ZERO: Point = (0, 1)


def square_root(a: int) -> int:
    """A root of `a`, or of another number if `a` has none."""
    root = pow(a, (P + 3) // 8, P)
    return root if root * root % P == a % P else root * pow(2, (P - 1) // 4, P) % P


def decode(key: bytes) -> Point | None:
    """The point of 32 bytes; None: they encode none, or not in the one form that `encode` gives."""
    y, sign = int.from_bytes(key, "little") & ((1 << 255) - 1), key[31] >> 7
    squared = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = square_root(squared)
    if x * x % P != squared:
        return None
    point = (x if x % 2 == sign else -x % P, y % P)
    return point if encode(point) == key else None


def encode(point: Point) -> bytes:
    x, y = point
    return (y | (x & 1) << 255).to_bytes(32, "little")


def add(one: Point, other: Point) -> Point:
    (x1, y1), (x2, y2) = one, other
    both = D * x1 * x2 * y1 * y2 % P
    return (x1 * y2 + x2 * y1) * pow(1 + both, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - both, -1, P) % P


def times(number: int, point: Point) -> Point:
    total = ZERO
    while number:
        total = add(total, point) if number & 1 else total
        point, number = add(point, point), number >> 1
    return total


_OF_ORDER_8 = bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a")


@cache
def torsion() -> list[Point]:
    """The eight points of small order."""
    point = decode(_OF_ORDER_8)
    assert point is not None
    found = {times(number, point) for number in range(8)}
    assert len(found) == 8
    assert times(8, point) == ZERO
    return sorted(found)


def torsion_keys() -> list[bytes]:
    """All that decodes to them: with either sign of x, also of x = 0, and with y above the prime."""
    ys = {y + extra for _, y in torsion() for extra in (0, P) if y + extra < 1 << 255}
    return [(y | sign << 255).to_bytes(32, "little") for y in sorted(ys) for sign in (0, 1)]


OFF_CURVE = bytes.fromhex("ab" * 32)
assert decode(OFF_CURVE) is None
