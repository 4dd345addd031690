"""Assigns a board, and the network behind it, to each device of a simulated fleet.

`--boards a,b,c` assigns profiles to the devices in turn. `--boards mix.toml` sets their shares:

    [[board]]
    profile = "raspberry-pi-zero-2-w"
    share = 0.6                 # of the devices without a count; or count = 600
    network = { up_mbit_s = 2, down_mbit_s = 8, latency_ms = 60 }   # optional: the uplink behind the board

The uplink and the board's own link are in series: the slower rate counts, and the latencies are added. A bad network
also has `jitter_ms`, and stalls of `stall_s` seconds every `stall_every_s` seconds, as lost packets make them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from hushfleet.errors import BadInput, Malformed, format_value
from hushfleet.firmware_profiles import Board, Quantity, load_board
from hushfleet.schema import Checked, Share, from_plain, parse_toml

_STREAM = 0x424F4152


@dataclass(frozen=True)
class LinkFigures:
    """The link from a device to the broker.

    :param latency_ms: one way.
    :param jitter_ms: largest additional delay of a packet.
    :param stall_every_s: mean seconds between stalls; 0: none.
    :param stall_s: mean length of a stall.
    """

    down_mbit_s: float
    up_mbit_s: float
    latency_ms: float
    jitter_ms: float = 0.0
    stall_every_s: float = 0.0
    stall_s: float = 0.0

    def __str__(self) -> str:
        return ", ".join(
            [
                f"{self.down_mbit_s:g}/{self.up_mbit_s:g} Mbit/s, {self.latency_ms:g} ms",
                *([f"jitter {self.jitter_ms:g} ms"] if self.jitter_ms else []),
                *([f"stalls of {self.stall_s:g} s every {self.stall_every_s:g} s"] if self.stall_s else []),
            ]
        )


@dataclass(frozen=True)
class BoardKind:
    """One row of a mix: a board's profile, and the whole link between such a device and the broker."""

    profile: str
    link: LinkFigures

    @classmethod
    def of(cls, profile: str, network: dict[str, float] | None = None) -> BoardKind:
        """Returns the board with an uplink behind it. Raises `BadInput` for an unknown board.

        :param network: the uplink, with the keys of the file.
        """
        board, uplink = load_board(profile), network or {}
        return cls(
            profile,
            LinkFigures(
                down_mbit_s=min(float(board.network_down_mbit_s), uplink.get("down_mbit_s", math.inf)),
                up_mbit_s=min(float(board.network_up_mbit_s), uplink.get("up_mbit_s", math.inf)),
                latency_ms=float(board.network_latency_ms) + uplink.get("latency_ms", 0.0),
                **{name: uplink[name] for name in ("jitter_ms", "stall_every_s", "stall_s") if name in uplink},
            ),
        )

    @cached_property
    def board(self) -> Board:
        """The profile; if there is an uplink, with this kind's link instead of the board's own link."""
        board, changed = load_board(self.profile), {}
        for name in ("down_mbit_s", "up_mbit_s", "latency_ms"):
            value = getattr(self.link, name)
            if value != float(getattr(board, f"network_{name}")):
                basis = "the board's own link and the fleet's uplink behind it"
                changed[f"network_{name}"] = Quantity(value, estimated=True, basis=basis)
        return replace(board, **changed)  # type: ignore[arg-type]  # all of them are quantities


@dataclass(frozen=True)
class FleetMix:
    """The boards of a whole fleet.

    :param kinds: the rows of the mix.
    :param dealt: the index of each device's row, in the fleet's order.
    """

    kinds: tuple[BoardKind, ...]
    dealt: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.dealt)

    def __getitem__(self, device: int) -> BoardKind:
        return self.kinds[self.dealt[device]]

    @property
    def profiles(self) -> tuple[str, ...]:
        """The profile of each device."""
        return tuple(self.kinds[number].profile for number in self.dealt)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """A name for each row: its profile, and its link if another row has the same profile."""
        profiles = [kind.profile for kind in self.kinds]

        def label(profile: str, link: LinkFigures) -> str:
            return profile if profiles.count(profile) == 1 else f"{profile}, {link}"

        return tuple(label(kind.profile, kind.link) for kind in self.kinds)

    @classmethod
    def in_turn(cls, profiles: Sequence[str], devices: int) -> FleetMix:
        """Assigns profiles to the devices one after the other. Raises `BadInput` for an unknown board name."""
        names = tuple(profiles) or ("generic-x86",)
        kinds = {name: BoardKind.of(name) for name in names}
        numbers = {name: number for number, name in enumerate(kinds)}
        return cls(tuple(kinds.values()), tuple(numbers[names[device % len(names)]] for device in range(devices)))

    def to_plain(self) -> dict[str, Any]:
        """Returns plain values for the run folder."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> FleetMix:
        """The inverse of `to_plain`. Raises `BadInput`."""
        try:
            mix = from_plain(FleetMix, plain)
            if not mix.kinds or not all(0 <= number < len(mix.kinds) for number in mix.dealt):
                raise ValueError("a device has a board that is not in the list")
        except (ValueError, Malformed) as error:
            raise BadInput(f"the fleet's boards cannot be read from {str(plain)[:80]!r}: {error}") from error
        for kind in mix.kinds:
            load_board(kind.profile)
        return mix


_Rate = Annotated[float, Meta(gt=0, le=1e6)] | None
_Delay = Annotated[float, Meta(ge=0, le=1e6)]


@dataclass(frozen=True)
class _Network(Checked):
    down_mbit_s: _Rate = None
    up_mbit_s: _Rate = None
    latency_ms: _Delay = 0.0
    jitter_ms: _Delay = 0.0
    stall_every_s: _Delay = 0.0
    stall_s: _Delay = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.stall_every_s) != bool(self.stall_s):
            raise ValueError("give stall_every_s (mean seconds between stalls) and stall_s (how long), or neither")


@dataclass(frozen=True)
class _Row(Checked):
    profile: str
    share: Share | None = None
    count: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    network: _Network = _Network()

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            load_board(self.profile)
        except BadInput as error:
            raise ValueError(f"profile = {format_value(self.profile)}: {error}") from error
        if (self.share is None) == (self.count is None):
            raise ValueError("give share (a part of the devices) or count (how many), and not both")


@dataclass(frozen=True)
class _MixFile(Checked):
    board: Annotated[tuple[_Row, ...], Meta(min_length=1)]


def read_boards(text: str, *, devices: int | None = None, seed: int = 0) -> FleetMix:
    """Reads `--boards`: names, or the file of a mix (which ends in `.toml`). Raises `BadInput`.

    :param devices: number of devices; None: the sum of the file's counts.
    :param seed: shuffles the devices of a mix, so that no kind of board comes first.
    """
    if text.strip().endswith(".toml"):
        path = Path(text.strip())
        try:
            return parse_mix(path.read_text(encoding="utf-8"), devices=devices, seed=seed, where=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"--boards {text}: the file cannot be read: {error}") from error
    if devices is None:
        raise BadInput(f"--boards {text}: names are dealt in turn, so say how many devices there are")
    return FleetMix.in_turn([name.strip() for name in text.split(",") if name.strip()], devices)


def parse_mix(text: str, *, devices: int | None = None, seed: int = 0, where: str = "the fleet's mix") -> FleetMix:
    """Reads a mix from its TOML text; arguments as for `read_boards`.

    Counts are assigned first; shares divide the rest by the largest remainder, and a tie goes to the earlier row.
    """
    try:
        rows = from_plain(_MixFile, parse_toml(text), where="mix").board
    except ValueError as error:
        raise BadInput(f"{where} is not valid TOML: {error}") from error
    except Malformed as error:
        raise BadInput(f"{where}: {str(error).removeprefix('mix: ').removeprefix('mix.')}") from error
    uplinks = [{key: value for key, value in asdict(row.network).items() if value is not None} for row in rows]
    kinds = tuple(BoardKind.of(row.profile, uplink) for row, uplink in zip(rows, uplinks, strict=True))
    if len(set(kinds)) != len(kinds):
        raise BadInput(f"{where}: two rows are the same board on the same network; make them one")
    key = np.random.SeedSequence(seed, spawn_key=(_STREAM,))
    in_order = np.repeat(np.arange(len(kinds)), _counts(rows, devices, where))
    dealt = np.random.Generator(np.random.Philox(key)).permutation(in_order)
    return FleetMix(kinds, tuple(dealt.tolist()))


def _counts(rows: Sequence[_Row], devices: int | None, where: str) -> list[int]:
    counts, shares = [row.count or 0 for row in rows], [row.share or 0.0 for row in rows]
    counted = sum(counts)
    if not any(shares):
        if not counted or (devices is not None and devices != counted):
            wanted = "at least 1" if devices is None else f"the {devices} devices that there are"
            raise BadInput(f"{where}: the counts come to {counted}, not to {wanted}; or give some rows a share")
        return counts
    if abs(math.fsum(shares) - 1) > 1e-6:
        raise BadInput(f"{where}: the shares come to {math.fsum(shares):g}; they must come to 1")
    if devices is None:
        raise BadInput(f"{where}: shares need the number of devices: give it, or give every row a count")
    if counted > devices:
        raise BadInput(f"{where}: the counts come to {counted}, but there are {devices} devices")
    left = devices - counted
    # Rounded, so that shares such as 0.29 count as written, without the error of their binary form.
    quotas = [round(share * left, 6) for share in shares]
    dealt = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(rows)), key=lambda row: (dealt[row] - quotas[row], row))
    for row in by_remainder[: left - sum(dealt)]:
        dealt[row] += 1
    return [count + more for count, more in zip(counts, dealt, strict=True)]
