"""Fleet mixes: who gets which board, and what the person is told who wrote the file wrongly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hushfleet.errors import BadInput, HushfleetError
from hushfleet.firmware_profiles import board_names, load_board
from hushfleet.simulator.boards import BoardKind, FleetMix, LinkFigures, _MixFile, parse_mix, read_boards
from hushfleet.toml_text import toml_value
from support.written_keys import Key, changed, changes, check_text, keys_of

ZERO, ORIN, PI5 = "raspberry-pi-zero-2-w", "jetson-orin-nano", "raspberry-pi-5-8gb"


def mix_text(*rows: str) -> str:
    return "\n".join(f"[[board]]\n{row}" for row in rows)


def test_shares_go_by_the_largest_remainder() -> None:
    text = mix_text(
        f'profile = "{ZERO}"\nshare = 0.5', f'profile = "{ORIN}"\nshare = 0.3', f'profile = "{PI5}"\nshare = 0.2'
    )
    # quotas of 7: 3.5, 2.1, 1.4: floors 3 + 2 + 1, and the one that is left goes to the .5
    assert Counter(parse_mix(text, devices=7).profiles) == {ZERO: 4, ORIN: 2, PI5: 1}
    # quotas of 4: 2.0, 1.2, 0.8: the one that is left goes to the last
    assert Counter(parse_mix(text, devices=4).profiles) == {ZERO: 2, ORIN: 1, PI5: 1}
    # quotas of 5: 2.5, 1.5, 1.0: of equal remainders the row that comes first
    assert Counter(parse_mix(text, devices=5).profiles) == {ZERO: 3, ORIN: 1, PI5: 1}


def test_a_share_that_has_no_binary_form_gives_what_it_says() -> None:
    rows = (f'profile = "{ZERO}"\nshare = 0.29', f'profile = "{ORIN}"\nshare = 0.71')
    assert Counter(parse_mix(mix_text(*rows), devices=100).profiles) == {ZERO: 29, ORIN: 71}  # 100 * 0.29 < 29


def test_counts_are_taken_first_and_shares_divide_the_rest() -> None:
    text = mix_text(
        f'profile = "{ZERO}"\ncount = 3', f'profile = "{ORIN}"\nshare = 0.5', f'profile = "{PI5}"\nshare = 0.5'
    )
    assert Counter(parse_mix(text, devices=9).profiles) == {ZERO: 3, ORIN: 3, PI5: 3}


def test_counts_alone_say_how_many_devices_there_are() -> None:
    text = mix_text(f'profile = "{ZERO}"\ncount = 3', f'profile = "{ORIN}"\ncount = 2')
    assert len(parse_mix(text)) == 5
    with pytest.raises(BadInput, match="the counts come to 5, not to the 6 devices"):
        parse_mix(text, devices=6)


@given(
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    devices=st.integers(1, 500),
    seed=st.integers(0, 2**32),
)
def test_every_device_is_dealt_and_no_kind_is_more_than_one_off(weights: list[int], devices: int, seed: int) -> None:
    names = board_names()[: len(weights)]
    shares = [weight / sum(weights) for weight in weights]
    rows = [f'profile = "{name}"\nshare = {share!r}' for name, share in zip(names, shares, strict=True)]
    mix = parse_mix(mix_text(*rows), devices=devices, seed=seed)
    counts = Counter(mix.profiles)
    assert len(mix) == devices
    for name, share in zip(names, shares, strict=True):
        assert abs(counts[name] - share * devices) < 1 + 1e-5


def test_kinds_are_mixed_by_the_seed() -> None:
    text = mix_text(f'profile = "{ZERO}"\nshare = 0.5', f'profile = "{ORIN}"\nshare = 0.5')
    one, again, other = (parse_mix(text, devices=40, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one.dealt != other.dealt
    assert one.dealt != tuple(sorted(one.dealt)), "one kind after the other"
    assert Counter(one.dealt) == Counter(other.dealt)


def test_the_slower_rate_counts_and_latencies_add_up() -> None:
    board = load_board(ZERO)
    assert (float(board.network_down_mbit_s), float(board.network_latency_ms)) == (35, 5)
    kind = BoardKind.of(ZERO, {"up_mbit_s": 2, "down_mbit_s": 100, "latency_ms": 60})
    assert kind.link == LinkFigures(down_mbit_s=35.0, up_mbit_s=2.0, latency_ms=65.0)
    whole = kind.board
    assert [float(whole.network_down_mbit_s), float(whole.network_up_mbit_s)] == [35, 2]
    assert float(whole.network_latency_ms) == 65
    assert whole.network_up_mbit_s.estimated
    assert whole.network_down_mbit_s == board.network_down_mbit_s, "the board's own figure keeps its source"
    assert whole.power_idle_w == board.power_idle_w


def test_names_are_dealt_in_turn() -> None:
    mix = read_boards(f"{ZERO}, {ORIN},{ZERO}", devices=5)
    assert mix.profiles == (ZERO, ORIN, ZERO, ZERO, ORIN)
    assert mix[1].link == BoardKind.of(ORIN).link
    assert read_boards("", devices=2).profiles == ("generic-x86",) * 2


def test_rows_of_one_profile_are_told_apart_by_their_links() -> None:
    text = mix_text(
        f'profile = "{ZERO}"\nshare = 0.5\nnetwork = {{ up_mbit_s = 2 }}',
        f'profile = "{ZERO}"\nshare = 0.25\nnetwork = {{ jitter_ms = 9, stall_every_s = 60, stall_s = 2 }}',
        f'profile = "{ORIN}"\nshare = 0.25',
    )
    mix = parse_mix(text, devices=4)
    rough = f"{ZERO}, 35/35 Mbit/s, 5 ms, jitter 9 ms, stalls of 2 s every 60 s"
    assert mix.labels == (f"{ZERO}, 35/2 Mbit/s, 5 ms", rough, ORIN)


def test_a_mix_survives_its_run_folder(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(
        mix_text(f'profile = "{ZERO}"\nshare = 0.6\nnetwork = {{ latency_ms = 60 }}', f'profile = "{PI5}"\nshare = 0.4')
    )
    mix = read_boards(str(path), devices=10, seed=3)
    assert FleetMix.from_plain(json.loads(json.dumps(mix.to_plain()))) == mix


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "missing field `board`; unknown field 'x'"),
        ("board = 3", "board = 3: expected a list"),
        ("[[board]", "not valid TOML"),
        (mix_text('profile = "pi-5"\nshare = 1'), r"board\[0\].*profile = 'pi-5'.*raspberry-pi-5"),
        (mix_text("share = 1"), r"board\[0\]: missing field `profile`"),
        (mix_text(f'profile = "{ZERO}"'), r"board\[0\]: give share .* or count"),
        (mix_text(f'profile = "{ZERO}"\nshare = 1\ncount = 1'), r"board\[0\]: give share .* not both"),
        (mix_text(f'profile = "{ZERO}"\nshare = 1.5'), r"board\[0\]\.share = 1\.5: must be in"),
        (mix_text(f'profile = "{ZERO}"\nshare = true'), r"board\[0\]\.share = True"),
        (mix_text(f'profile = "{ZERO}"\nshare = 0.6'), r"the shares come to 0\.6; they must come to 1"),
        (mix_text(f'profile = "{ZERO}"\ncount = -1'), r"board\[0\]\.count = -1: must be in .0, "),
        (mix_text(f'profile = "{ZERO}"\ncount = 2.0'), r"board\[0\]\.count = 2\.0"),
        (mix_text(f'profile = "{ZERO}"\ncount = 11', f'profile = "{ORIN}"\nshare = 1'), "come to 11, but there are 10"),
        (mix_text(f'profile = "{ZERO}"\nshare = 1\nspeed = 2'), r"board\[0\]: unknown field 'speed'"),
        (
            mix_text(f'profile = "{ZERO}"\nshare = 1\nnetwork = {{ rate = 2 }}'),
            r"board\[0\]\.network: unknown field 'rate'",
        ),
        (
            mix_text(f'profile = "{ZERO}"\nshare = 1\nnetwork = {{ up_mbit_s = 0 }}'),
            r"board\[0\]\.network\.up_mbit_s = 0: must be in .0, ",
        ),
        (mix_text(f'profile = "{ZERO}"\nshare = 1\nnetwork = {{ latency_ms = -1 }}'), r"latency_ms = -1"),
        (mix_text(f'profile = "{ZERO}"\nshare = 1\nnetwork = {{ latency_ms = nan }}'), r"latency_ms = nan"),
        (mix_text(f'profile = "{ZERO}"\nshare = 1\nnetwork = {{ jitter_ms = -1 }}'), r"jitter_ms = -1"),
        (mix_text(f'profile = "{ZERO}"\nshare = 1\nnetwork = {{ stall_s = 1 }}'), "stall_every_s .* and stall_s"),
        (mix_text(*[f'profile = "{ZERO}"\nshare = 0.5'] * 2), "the same board on the same network"),
    ],
)
def test_mistakes_are_named_with_key_and_value(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_mix(text, devices=10)


def test_shares_and_names_need_a_number_of_devices() -> None:
    with pytest.raises(BadInput, match="shares need the number"):
        parse_mix(mix_text(f'profile = "{ZERO}"\nshare = 1'))
    with pytest.raises(BadInput, match="dealt in turn, so say how many"):
        read_boards(ZERO)
    with pytest.raises(BadInput, match="cannot be read"):
        read_boards("there-is-none.toml", devices=3)


@pytest.mark.parametrize(
    "plain", [[], {}, {"kinds": [], "dealt": []}, {"kinds": [{"profile": ZERO, "link": {}}], "dealt": [0]}, ["pi"]]
)
def test_a_run_folder_that_holds_something_else_is_refused(plain: object) -> None:
    with pytest.raises(BadInput, match="boards cannot be read"):
        FleetMix.from_plain(plain)
    good = FleetMix.in_turn([ZERO], 2).to_plain()
    with pytest.raises(BadInput, match="not in the list"):
        FleetMix.from_plain(good | {"dealt": [0, 1]})


KEYS = list(keys_of(_MixFile))


@settings(max_examples=150, derandomize=True)
@given(changes(KEYS))
def test_any_value_of_any_key_gives_a_mix_or_the_key_is_named(drawn: list[tuple[Key, Any]]) -> None:
    plain = changed({"board": [{"profile": PI5, "share": 1.0}]}, drawn)
    try:
        text = f"board = {toml_value(plain['board'])}"
    except TypeError:
        assume(False)  # not written in this test: dates
    try:
        assert len(parse_mix(text, devices=7)) == 7
    except HushfleetError as error:
        check_text(str(error), drawn, KEYS, "the shares", "the counts", "not valid TOML")
