"""Typed values from plain data: what each type accepts, and that nothing else gets through."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from hushfleet.errors import Malformed
from hushfleet.params import ParamLayout
from hushfleet.schema import Checked, Finite, Share, from_plain, later, pack, require, to_plain, unpack
from hushfleet.wire.format.spec import TaskSpec


@dataclass(frozen=True)
class Inner:
    count: int
    label: str = "none"

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count = {self.count}: must not be negative")


class Named(NamedTuple):
    label: str
    count: int


@dataclass(frozen=True)
class Everything:
    whole: int
    real: float
    text: str
    raw: bytes
    flag: bool
    choice: Literal["left", "right"]
    maybe: int | None
    pair: tuple[int, str]
    many: tuple[float, ...]
    table: dict[str, int]
    inner: Inner
    inners: tuple[Inner, ...]
    named: tuple[Named, ...]
    layout: ParamLayout
    anything: Any = None
    listed: dict[str, Any] = field(default_factory=dict)


def plain(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "whole": 3,
        "real": 0.5,
        "text": "a",
        "raw": b"\x00",
        "flag": True,
        "choice": "left",
        "maybe": None,
        "pair": [1, "x"],
        "many": [1.0, 2.5],
        "table": {"k": 7},
        "inner": {"count": 1},
        "inners": [{"count": 2, "label": "two"}],
        "named": [["first", 1], ["second", 2]],
        "layout": [["fc.weight", [2, 3]]],
    }
    return {**values, **changes}


def test_every_type_is_read() -> None:
    value = from_plain(Everything, plain())
    assert value == Everything(
        whole=3,
        real=0.5,
        text="a",
        raw=b"\x00",
        flag=True,
        choice="left",
        maybe=None,
        pair=(1, "x"),
        many=(1.0, 2.5),
        table={"k": 7},
        inner=Inner(1),
        inners=(Inner(2, "two"),),
        named=(Named("first", 1), Named("second", 2)),
        layout=ParamLayout(("fc.weight",), ((2, 3),)),
    )
    assert from_plain(Everything, msgpack.unpackb(msgpack.packb(to_plain(value)))) == value


def test_an_integer_serves_as_a_float_and_nothing_else_is_converted() -> None:
    real = from_plain(Everything, plain(real=2)).real
    assert type(real) is float
    assert real == 2.0
    assert from_plain(Everything, plain(real=math.inf)).real == math.inf
    assert from_plain(Everything, plain(maybe=4)).maybe == 4


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("whole", [1.0, True, "1", None, b"1", [1], math.nan]),
        ("real", [math.nan, True, "1", None, b"1", [1.0], 10**400]),
        ("text", [1, None, b"a", ["a"], True]),
        ("raw", ["a", 1, None, [0], True]),
        ("flag", [0, 1, "true", None, 1.0]),
        ("choice", ["up", "", None, 0, ["left"], b"left", {"left": 1}]),
        ("maybe", ["1", 1.0, False, [None]]),
        ("named", [["first", 1], [["first"]], [["first", 1, 2]], [[1, "first"]], [{"label": "first", "count": 1}]]),
        ("pair", [[1], [1, "x", 2], ["x", 1], "1x", None, {"0": 1}]),
        ("many", [1.0, [1.0, "x"], [math.nan], [[1.0]], None, "12", b"12"]),
        ("table", [{"k": "v"}, {1: 1}, [["k", 1]], None, {"k": None}]),
        ("inner", [None, 1, {}, {"count": "1"}, {"count": -1}, {"count": 1, "size": 1}, [1]]),
        ("inners", [{"count": 1}, [1], [{"count": 1}, None], [[{"count": 1}]]]),
        ("layout", [None, {}, [], [["fc.weight", [0]]], "fc"]),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(Malformed) as refused:
            from_plain(Everything, plain(**{name: value}))
        # The layout says that it is the layout; everything else names the field with its path.
        assert f"Everything.{name}" in str(refused.value) or name == "layout", value
        assert len(str(refused.value)) < 300


def test_the_error_shows_path_value_and_what_is_accepted() -> None:
    with pytest.raises(Malformed) as refused:
        from_plain(Everything, plain(inners=[{"count": 1}, {"count": 1.5}]), where="message")
    assert str(refused.value) == "message.inners[1].count = 1.5: expected an integer, got a number"
    with pytest.raises(Malformed) as refused:
        from_plain(Everything, plain(inner={"count": -4}), where="message")
    assert str(refused.value) == "message.inner.count = -4: must not be negative"
    with pytest.raises(Malformed) as refused:
        from_plain(Everything, plain(choice="up"), where="message")
    assert str(refused.value) == "message.choice = 'up': must be one of 'left', 'right'"


def test_unknown_and_missing_fields_are_refused_by_name() -> None:
    with pytest.raises(Malformed, match=r"unknown field 'wohle' .did you mean 'whole'.*; known are whole, real"):
        from_plain(Everything, plain(wohle=1))
    with pytest.raises(Malformed, match="Everything: expected a text"):
        from_plain(Everything, {**plain(), 3: 1, b"x": 2})
    for name in plain():
        rest = {key: value for key, value in plain().items() if key != name}
        with pytest.raises(Malformed, match=f"missing field `{name}`"):
            from_plain(Everything, rest)


@pytest.mark.parametrize("value", [None, 1, "text", b"", [], [["whole", 1]]])
def test_only_a_table_makes_a_dataclass(value: object) -> None:
    with pytest.raises(Malformed, match=r"Everything = .*: expected a table"):
        from_plain(Everything, value)


@dataclass(frozen=True)
class Ruled(Checked):
    """Has a rule of each kind."""

    share: Share = 0.5
    sizes: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=2)] = ()
    names: dict[Annotated[str, Meta(pattern=r"^[a-z]+\Z", description="small letters")], Finite] = field(
        default_factory=dict
    )
    since: int = later(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.names) < 2, "names", len(self.names), "at most one")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"share": 0}, "share = 0: must be in (0, 1]"),
        ({"share": math.nan}, "share = nan: must be in (0, 1]"),
        ({"share": "1"}, "share = '1': expected a number, got a text"),
        ({"sizes": [1, 0]}, "sizes[1] = 0: expected an integer >= 1"),
        ({"sizes": [1, 2, 3]}, "sizes = [1, 2, 3]: expected a list of length <= 2"),
        ({"names": {"A": 1.0}}, "names: must be small letters"),
        ({"names": {"a": math.inf}}, "names: must be a finite number"),
        ({"names": {"a": 1.0, "b": 2.0}}, "names = 2: must be at most one"),
        ({"since": 1.5}, "since = 1.5: expected an integer, got a number"),
    ],
)
def test_the_rules_hold_however_a_value_is_made(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        Ruled(**changes)
    with pytest.raises(Malformed, match=re.escape(said)):
        from_plain(Ruled, changes)
    with pytest.raises(Malformed, match=re.escape(said)):
        unpack(Ruled, msgpack.packb({**to_plain(Ruled()), **changes}), what="it")


def test_our_own_values_get_the_types_of_their_fields() -> None:
    made = Ruled(1, [3])  # type: ignore[arg-type]
    assert (type(made.share), made.sizes) == (float, (3,))
    assert made == from_plain(Ruled, {"share": 1, "sizes": [3]})


def test_what_is_packed_has_one_form() -> None:
    data = pack(Ruled())
    assert data == msgpack.packb({"share": 0.5, "sizes": [], "names": {}})  # `since` came later
    assert unpack(Ruled, data, what="it") == Ruled()
    assert unpack(Ruled, pack(Ruled(since=4)), what="it").since == 4
    plain_ruled = {"share": 0.5, "sizes": [], "names": {}}
    for other in (
        {"sizes": [], "share": 0.5, "names": {}},
        {**plain_ruled, "share": 1},
        {**plain_ruled, "since": 0},
        {"share": 0.5, "sizes": []},
    ):
        with pytest.raises(Malformed, match="it is not written in the canonical form"):
            unpack(Ruled, msgpack.packb(other), what="it")
    with pytest.raises(Malformed, match="Ruled: unknown field 'more'"):
        unpack(Ruled, msgpack.packb({**plain_ruled, "more": 1}), what="it")
    for wrong in (data[:-1], data + b"\0", b"", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\xd4\x05\x00"):
        with pytest.raises(Malformed):
            unpack(Ruled, wrong, what="it")


KEYS = st.sampled_from(
    ["task", "rounds", "method", "method_config", "privacy", "wire", "model", "memory_mib", "version", "name", "mean"]
) | st.text(max_size=3)
MSGPACK_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=11),
    max_leaves=30,
)


@given(MSGPACK_VALUES)
@settings(max_examples=300)
def test_random_values_are_only_ever_malformed(value: object) -> None:
    with pytest.raises(Malformed):
        from_plain(TaskSpec, value)


CTRL_C = """
import gc
import signal
from dataclasses import dataclass

from hushfleet.schema import Checked, Share


@dataclass(frozen=True)
class Ruled(Checked):
    share: Share
    sizes: tuple[int, ...] = ()


came = []


def interrupt(number, frame):
    came.append(number)
    raise KeyboardInterrupt


def check_until_it_comes():  # a function: what a loop's own jump raises is outside of its `try` in Python 3.13
    signal.setitimer(signal.ITIMER_REAL, 0.0003)
    while not came:
        Ruled(share=0.5)


Ruled(share=0.5)  # the first look at a type is C code that hashes annotations: one in a thousand may be lost there
signal.signal(signal.SIGALRM, interrupt)
gc.disable()  # in a callback of the collector it would be lost by Python itself
lost = 0
for _ in range(200):
    came.clear()
    try:
        check_until_it_comes()
    except KeyboardInterrupt:
        continue
    lost += 1
print(lost)
"""


def test_no_ctrl_c_is_lost_while_a_value_is_checked() -> None:
    """C code may drop an exception of the Python code that it calls: with types as `tuple[...]` half of these went.

    In a process of its own: a KeyboardInterrupt that went astray here would end the process that runs the tests.
    """
    done = subprocess.run([sys.executable, "-c", CTRL_C], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("0\n", "")


LOOK_AT_ONCE = """
import dataclasses, sys, threading
from hushfleet.schema import Checked, from_plain, pack, unpack

def look():
    gate.wait()
    value = from_plain(kind, plain)
    seen.append(unpack(kind, pack(value), what="it") == value)

sys.setswitchinterval(1e-6)
for _ in range(30):
    kind, plain = int, 1
    for name in ("Inner", "Middle", "Outer"):
        fields = ("f0", "f1", "f2")
        kind = dataclasses.make_dataclass(name, [(field, kind) for field in fields], bases=(Checked,), frozen=True)
        plain = dict.fromkeys(fields, plain)
    gate, seen = threading.Barrier(8), []
    threads = [threading.Thread(target=look) for _ in range(8)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert seen == [True] * 8
"""


def test_threads_may_read_a_type_for_the_first_time_at_once() -> None:
    """In a process of its own: where they may not, msgspec ends it with a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", LOOK_AT_ONCE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
