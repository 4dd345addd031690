"""Windows of data on a board: each sample lies in one of them for ever, and what is sent follows from one alone."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hushfleet.data.held_out import chosen_by_content
from hushfleet.data.samples import Samples
from hushfleet.data.targets import Targets
from hushfleet.durations import Period
from hushfleet.edge_client.board.config import DeviceConfig, OwnDataSection
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.board.notes import notes_in, read_data_use
from hushfleet.edge_client.storage.arrivals import sample_key
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.learning.anomaly import divided
from hushfleet.methods import method_of
from hushfleet.params import ParamLayout
from hushfleet.wire.format.question import QuestionSpec
from hushfleet.wire.format.spec import BlobRef, EarlierTask, ModelSpec, PrivacySpec
from support.device import config, linear, make_bench, package  # noqa: F401
from support.edge import DEVICE, Bench, Package

DAY = 86400
FIRST, SECOND = Period(10 * DAY, 20 * DAY), Period(20 * DAY, 30 * DAY)
GRAPH = BlobRef(bytes(32), 1)
MODEL = ModelSpec(
    "own", ParamLayout(("w",), ((2,),)), (1, 4, 4), ("cat", "dog"), (0.5,), (0.25,), (), GRAPH, GRAPH
)  # fmt: skip


class Board:
    """A board's data, with a clock that a test sets."""

    def __init__(
        self, folder: Path, store: DeviceStore, section: OwnDataSection, model: ModelSpec = MODEL, held_out: float = 0
    ) -> None:
        self.now = FIRST.start
        self.path, (note, _) = Path(section.path), notes_in(folder)
        self.data = LocalData(
            section, model, may_be_empty=True, note=note, held_out=held_out, by_content=True,
            arrivals=lambda keys: store.arrivals.of(keys, now=self.now),
        )  # fmt: skip

    def photograph(self, name: str, grey: int) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), grey, np.uint8)).save(self.path / name)

    def seen(self, window: Period | None = None) -> list[int]:
        return sorted(self.data.samples(window).images.reshape(-1, 16)[:, 0].tolist())


@pytest.fixture
def store(tmp_path: Path):
    with DeviceStore(tmp_path / "state" / "store.sqlite", device="board-7", durable=False) as opened:
        yield opened


@pytest.fixture
def board(tmp_path: Path, store: DeviceStore) -> Board:
    return Board(tmp_path, store, OwnDataSection("folder", str(tmp_path / "photos")))


def test_a_photograph_is_in_the_window_in_which_it_came(board: Board, tmp_path: Path) -> None:
    board.photograph("cat/1.png", 10)
    assert board.seen(FIRST) == [10]
    board.now = SECOND.start
    board.photograph("dog/2.png", 20)
    assert board.seen(SECOND) == [20]
    assert board.seen(FIRST) == [10]
    assert board.seen() == [10, 20]
    board.seen(SECOND)
    board.seen()  # as for the personalized head, which is made of all samples
    use = read_data_use(tmp_path)
    assert use is not None
    assert (use.used, use.other_windows) == (1, 1)


def test_a_name_a_folder_a_date_or_a_clock_moves_it_into_no_other(board: Board) -> None:
    board.photograph("cat/1.png", 10)
    board.seen(FIRST)
    for now in (SECOND.start, 0, 900 * DAY):
        board.now = now
        assert board.seen(Period.of(now, 10 * DAY)) == []
        assert board.seen(FIRST) == [10]
    os.rename(board.path / "cat/1.png", board.path / "cat/other.png")
    assert (board.seen(SECOND), board.seen(FIRST)) == ([], [10])
    board.photograph("dog/copy.png", 10)
    os.utime(board.path / "dog/copy.png", (1, 1))
    assert (board.seen(SECOND), board.seen(FIRST)) == ([], [10, 10])


def test_a_deleted_photograph_is_gone_and_comes_back_to_its_own_window(board: Board) -> None:
    board.photograph("cat/1.png", 10)
    board.photograph("cat/2.png", 20)
    assert board.seen(FIRST) == [10, 20]
    (board.path / "cat/1.png").unlink()
    assert board.seen(FIRST) == [20]
    board.now = SECOND.start
    board.photograph("cat/1.png", 10)
    assert (board.seen(SECOND), board.seen(FIRST)) == ([], [10, 20])


def test_a_photograph_that_changes_while_the_others_are_looked_at_waits(board: Board) -> None:
    """Thousands of files are looked at for minutes, and a camera may write over its last picture meanwhile."""
    board.photograph("cat/latest.png", 10)
    os.utime(board.path / "cat/latest.png", (1, 1))
    noted = board.data._arrivals
    assert noted is not None

    def meanwhile(keys: Sequence[bytes]) -> list[int]:
        board.photograph("cat/latest.png", 20)
        return noted(keys)

    board.data._arrivals = meanwhile
    assert board.seen(FIRST) == []
    board.data._arrivals = noted
    board.now = SECOND.start
    assert (board.seen(SECOND), board.seen(FIRST)) == ([20], [])


@pytest.mark.parametrize("kind", ["arrays", "csv"])
def test_rows_of_a_file_have_windows_of_their_own(kind: str, tmp_path: Path, store: DeviceStore) -> None:
    path = tmp_path / "values"
    section = OwnDataSection(kind, str(path), values="numbers")  # type: ignore[arg-type] - of two kinds
    board = Board(tmp_path, store, section)

    def write(*values: int) -> None:
        rows = np.repeat(np.array(values, np.float32), 16).reshape(-1, 1, 4, 4)
        if kind == "arrays":
            with path.open("wb") as file:
                np.savez(file, x=rows, y=["cat"] * len(rows))
        else:
            lines = [",".join(["cat", *map(str, row.ravel())]) for row in rows]
            path.write_text("\n".join([",".join(["label", *(f"v{index}" for index in range(16))]), *lines]))

    write(1, 2)
    assert board.seen(FIRST) == [1, 2]
    board.now = SECOND.start
    write(3, 2, 1)
    assert (board.seen(SECOND), board.seen(FIRST)) == ([3], [1, 2])


@pytest.mark.parametrize("kind", ["arrays", "csv"])
def test_a_window_without_a_usable_row_is_empty(kind: Any, tmp_path: Path, store: DeviceStore) -> None:
    """The board then sends noise, as if it had no data, and its owner reads why."""
    path = tmp_path / "values"
    board = Board(tmp_path, store, OwnDataSection(kind, str(path), values="numbers"))
    header = ",".join(["label", *(f"v{index}" for index in range(16))])
    for rows in ([], [np.full(16, np.nan)]):
        if kind == "arrays":
            with path.open("wb") as file:
                np.savez(file, x=np.array(rows, np.float32).reshape(-1, 1, 4, 4), y=np.array(["cat"] * len(rows)))
        else:
            path.write_text("\n".join([header, *(",".join(["cat", *map(str, row)]) for row in rows), ""]))
        assert board.seen(FIRST) == []
        use = read_data_use(tmp_path)
        assert use is not None
        assert (use.used, use.left_out, use.noise_alone) == (0, len(rows), True)


def test_what_is_held_out_of_all_samples_trains_in_no_window(board: Board, tmp_path: Path, store: DeviceStore) -> None:
    """Where a window has a single sample, or all of a window are held out, chance decides all the same."""
    board = Board(tmp_path, store, OwnDataSection("folder", str(tmp_path / "photos")), held_out=0.5)
    trained: set[int] = set()
    for number in range(12):
        board.now = number * DAY
        board.photograph(f"cat/{number}.png", 10 + number)
        trained |= set(board.seen(Period.of(board.now, DAY)))
    held_out = set(board.data.held_out().kept.reshape(-1, 16)[:, 0].tolist())
    assert held_out
    assert trained == set(range(10, 22)) - held_out


def test_what_was_held_out_and_is_deleted_is_tested_on_no_more(tmp_path: Path, store: DeviceStore) -> None:
    board = Board(tmp_path, store, OwnDataSection("folder", str(tmp_path / "photos")), held_out=0.5)
    for number in range(12):
        board.photograph(f"cat/{number}.png", 10 + number)

    def held_out() -> set[int]:
        return set(board.data.held_out().kept.reshape(-1, 16)[:, 0].tolist())

    before = held_out()
    deleted = min(before)
    (board.path / f"cat/{deleted - 10}.png").unlink()
    assert held_out() == before - {deleted}
    assert set(board.seen()) == set(range(10, 22)) - before


def test_the_client_divides_the_samples_of_a_window_by_their_content(
    make_bench: Callable[..., Bench],  # noqa: F811
    config: DeviceConfig,  # noqa: F811
    linear: Package,  # noqa: F811
) -> None:
    """One that is held out of all samples trains nothing either where it is alone in its window."""
    question = QuestionSpec("evaluation", every=2, noise_multiplier=4.0, held_out=0.3)
    task = linear.with_spec(method="hush", method_config={}, question=question, data_window_s=DAY)
    bench = make_bench(package=task)
    bench.until(lambda: bench.agent.tasks.runtime is not None)
    now = bench.agent.tasks.runtime.party.now
    images = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8), np.uint8)
    held = chosen_by_content(images, np.arange(len(images)), 0.3)
    held_out, *_ = np.flatnonzero(held)
    earlier = np.delete(np.arange(20), held_out)
    np.savez(config.data.path, images=images[earlier], labels=np.arange(19) % 10)
    task = bench.load()
    assert len(task.data.samples(Period.of(now(), DAY))) == 20 - held.sum()
    bench.store.arrivals.of(list(task.trainer.store.new), now=now())
    bench.clock.now += DAY
    np.savez(config.data.path, images=images, labels=np.arange(20) % 10)
    task = bench.load()
    assert len(task.data.samples(Period.of(now(), DAY))) == 0
    assert len(task.data.held_out()) == held.sum()


class Pump(Board):
    """A board with a task that learns to give back samples of two channels and two steps."""

    def __init__(self, folder: Path, store: DeviceStore) -> None:
        targets, moments = Targets("reconstruction", false_alarms=0.2), {"mean": (0.0, 0.0), "std": (1.0, 1.0)}
        model = replace(MODEL, input_shape=(2, 1, 2), class_names=("fault",), targets=targets, **moments)
        super().__init__(folder, store, OwnDataSection("csv", str(folder / "pump.csv")), model)

    def trained(self) -> list[float]:
        """The first value of each sample in the window of the day."""
        return self.data.samples(Period.of(self.now, DAY)).kept[:, 0, 0, 0].tolist()


def test_what_an_anomaly_threshold_is_chosen_by_trains_in_no_window(tmp_path: Path, store: DeviceStore) -> None:
    """Nor does it follow from samples of other windows, which may go, what trains in this one."""
    board, trained = Pump(tmp_path, store), list[float]()
    for day in range(10):
        board.now = day * DAY
        rows = [f"{number},0,0,0" for number in range(day, 2 * day + 2)]  # the first ones go
        board.path.write_text("\n".join(["a,b,c,d", *rows, ""]))
        trained += board.trained()
    values = np.array([[number, 0, 0, 0] for number in range(20)], np.float32).reshape(-1, 2, 1, 2)
    normal = Targets("reconstruction", false_alarms=0.2)
    train, held = divided(Samples(values, np.zeros((20, 1), np.float32), (0,) * 2, (1,) * 2, normal), by_content=True)
    assert len(held)
    assert trained == train.images[:, 0, 0, 0].tolist()


def test_a_task_that_takes_other_columns_for_targets_sees_no_row_as_new(tmp_path: Path, store: DeviceStore) -> None:
    """Else an aggregator could bring the samples of each window into the next, with one column after the other."""
    section = OwnDataSection("csv", str(tmp_path / "rows.csv"))
    alike: dict[str, Any] = {"mean": (0.0,), "std": (1.0,)}
    numbers, normal = Targets("squared", tolerance=1.0), Targets("reconstruction", false_alarms=0.2)
    models = (
        replace(MODEL, input_shape=(1, 1, 3), **alike),
        replace(MODEL, input_shape=(1, 1, 2), class_names=("b",), targets=numbers, **alike),
        replace(MODEL, input_shape=(1, 1, 3), class_names=("label",), targets=numbers, **alike),
        replace(MODEL, input_shape=(1, 1, 3), class_names=("fault",), targets=normal, **alike),
        replace(MODEL, input_shape=(1, 1, 2), class_names=("c",), targets=normal, **alike),
    )
    for day, model in enumerate(models):
        label = "cat" if model.targets.are_classes else "5"
        lines = [f"{label},{number},7,0" for number in (3, 5)] + [f"{label},7,3,0"] * day
        Path(section.path).write_text("\n".join(["label,a,b,c", *lines, ""]))
        board = Board(tmp_path, store, section, replace(model, layout=MODEL.layout))
        board.now = day * DAY
        seen = board.data.samples(Period.of(board.now, DAY))
        assert len(seen) == {0: 2, 1: 1}.get(day, 0), "7, 3, 0 are another row than 3, 7, 0; all else was seen before"


def test_a_task_that_says_otherwise_what_values_are_sees_no_sample_as_new(tmp_path: Path, store: DeviceStore) -> None:
    """An aggregator writes `data.values`: with each new word all samples would have come into the present window."""
    file, x = tmp_path / "d.npz", np.arange(64, dtype=np.uint8).reshape(4, 1, 4, 4)
    np.savez(file, x=x, y=[0, 1, 0, 1])
    section = OwnDataSection("arrays", str(file))
    boards = [Board(tmp_path, store, replace(section, values=values)) for values in ("pixels", "numbers")]
    for board in (*boards, *boards[::-1]):
        assert len(board.data.samples(FIRST)) == 4
        board.now = SECOND.start
        assert len(board.data.samples(SECOND)) == 0
        for each in boards:
            each.now = SECOND.start


def test_a_photograph_under_an_old_name_and_date_is_a_new_one(board: Board) -> None:
    """A program may set a file's date, as rsync and cp -p do, and pictures without compression have one size."""
    file = board.path / "cat/1.bmp"
    board.photograph("cat/1.bmp", 10)
    dates = os.stat(file).st_atime_ns, os.stat(file).st_mtime_ns
    assert board.seen(FIRST) == [10]
    board.now = SECOND.start
    board.photograph("cat/1.bmp", 20)
    os.utime(file, ns=dates)
    assert (board.seen(SECOND), board.seen(FIRST), board.seen()) == ([20], [], [20])


def test_a_series_is_not_cut_into_windows_anew_when_lines_go(tmp_path: Path, store: DeviceStore) -> None:
    """The second cut would bring the first day's values into the second day as samples that were not seen before."""
    board, lines = Pump(tmp_path, store), [f"{step},0" for step in range(1, 9)]
    board.path.write_text("\n".join(["left,right", *lines, ""]))
    assert board.trained() == []
    board.now = DAY
    board.path.write_text("\n".join(["left,right", *lines[1:], ""]))
    assert board.trained() == []
    use = read_data_use(tmp_path)
    assert use is not None
    assert "write a whole sample of 4 values into each line" in use.why
    assert len(board.data.samples()), "without windows of data it is cut"


def test_a_large_file_among_the_images_does_not_come_into_memory(board: Board) -> None:
    board.photograph("cat/1.png", 10)
    film = board.path / "cat/film.mp4"
    film.write_bytes(b"no image")
    board.seen(FIRST)  # loads Pillow's parts
    os.truncate(film, 16 << 20)
    tracemalloc.start()
    try:
        assert board.seen(FIRST) == [10]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_the_arrivals_of_years_do_not_come_into_memory(store: DeviceStore) -> None:
    store.arrivals.of([number.to_bytes(16, "big") for number in range(20_000)], now=1)
    tracemalloc.start()
    try:
        assert store.arrivals.of([bytes(16), b"\xff" * 16, bytes(16)], now=2) == [1, 2, 1]
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("window_s", [DAY, 0])
@pytest.mark.parametrize("method", ["fedper", "feddpa"])
def test_a_round_follows_from_its_own_window_alone(
    method: str,
    window_s: int,
    make_bench: Callable[..., Bench],  # noqa: F811
    config: DeviceConfig,  # noqa: F811
    package: Package,  # noqa: F811
) -> None:
    """What a board keeps would carry the first window's samples into the second's updates: the head of `fedper`, and
    the last update, by which `feddpa` chooses entries."""
    privacy = PrivacySpec("record", "strict", 1.0, 1.0, 1e-5, sample_rate=0.5, batches=2)
    task = package.with_spec(method=method, privacy=privacy, data_window_s=window_s)
    ends = []
    for seed in (1, 2):
        folder = Path(config.device.state_dir).with_name(f"board-{seed}")
        folder.mkdir()
        data = replace(config.data, path=str(folder / "train.npz"))
        bench = make_bench(
            package=task,
            config=replace(config, device=replace(config.device, state_dir=str(folder / "state")), data=data),
        )
        write(folder, seed)
        newcomer = method_of(task.spec).init_state().public
        bench.server.open_round(1, cohort={DEVICE: newcomer.digest()})
        bench.acked(1)
        bench.clock.now += DAY
        write(folder, 3)
        state = bench.store.load_state("digits-test")
        assert state is not None
        bench.server.open_round(2, cohort={DEVICE: state.public.digest()})
        bench.acked(2)
        first, second = bench.store.ledger.entries()
        if window_s:
            assert second.window == Period(first.window.start + DAY, first.window.stop + DAY)
            assert second.window.holds(second.at)
        else:
            assert first.window is second.window is None
        after = bench.store.load_state("digits-test")
        assert after is not None
        ends.append(after.own)
    assert np.array_equal(*ends) == bool(window_s)


def test_within_a_window_a_device_goes_on_from_its_last_round(
    make_bench: Callable[..., Bench],  # noqa: F811
    config: DeviceConfig,  # noqa: F811
    package: Package,  # noqa: F811
) -> None:
    """In each window, also after the first. An own part that began anew each round would never learn."""
    privacy = PrivacySpec("record", "strict", 1.0, 1.0, 1e-5, sample_rate=0.5, batches=2)
    bench = make_bench(package=package.with_spec(method="fedper", privacy=privacy, data_window_s=DAY))
    begins_with_own, train = [], DeviceRound.train

    def watched(round: DeviceRound, *arguments: Any, **more: Any) -> Any:
        begins_with_own.append(round.state().own is not None)
        return train(round, *arguments, **more)

    held = method_of(bench.server.package.spec).init_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRound, "train", watched)
        for number, days in enumerate((0, 0, 1, 1, 2), start=1):
            bench.clock.now += DAY * (days - len({entry.window for entry in bench.store.ledger.entries()}) + 1)
            bench.server.open_round(number, cohort={DEVICE: held.public.digest()})
            bench.acked(number)
            held = bench.store.load_state("digits-test")
    assert begins_with_own == [False, True, False, True, False]


@pytest.mark.parametrize("window_s", [DAY, 0])
def test_a_task_with_windows_goes_on_from_no_own_part_of_an_earlier_task(
    window_s: int,
    make_bench: Callable[..., Bench],  # noqa: F811
    linear: Package,  # noqa: F811
) -> None:
    """It was trained on samples of other windows, with the unit `device` without noise."""
    first = linear.with_spec(method="hush", method_config={})
    bench = make_bench(package=first)
    bench.server.open_round(1, cohort={DEVICE: method_of(first.spec).init_state().public.digest()})
    bench.acked(1)
    earlier = EarlierTask(first.spec.task, first.spec.model.class_names)
    bench.server.package = first.with_spec(task="next-test", continues=earlier, data_window_s=window_s)
    bench.server.announce()
    bench.until(lambda: bench.agent.tasks.runtime is not None and bench.agent.tasks.name == "next-test")
    round = DeviceRound(bench.load().trainer, bench.server.plan(1))
    assert (round.state().own is None) == bool(window_s)


@pytest.mark.parametrize("unit", ["device", "record"])
def test_a_task_whose_unit_is_the_record_goes_on_from_no_own_part_of_an_earlier_task(
    unit: str,
    make_bench: Callable[..., Bench],  # noqa: F811
    package: Package,  # noqa: F811
) -> None:
    """It may have been trained without noise, and gradients would follow it."""
    first = package.with_spec(method="fedper")
    bench = make_bench(package=first)
    bench.server.open_round(1, cohort={DEVICE: method_of(first.spec).init_state().public.digest()})
    bench.acked(1)
    earlier = EarlierTask(first.spec.task, first.spec.model.class_names)
    of_records = PrivacySpec("record", "strict", 1.0, 1.0, 1e-5, sample_rate=0.5, batches=2)
    privacy = of_records if unit == "record" else first.spec.privacy
    bench.server.package = first.with_spec(task="next-test", continues=earlier, privacy=privacy)
    bench.server.announce()
    bench.until(lambda: bench.agent.tasks.runtime is not None and bench.agent.tasks.name == "next-test")
    round = DeviceRound(bench.load().trainer, bench.server.plan(1))
    assert (round.state().own is None) == (unit == "record")


def test_a_charge_has_the_time_at_which_it_was_allowed(
    make_bench: Callable[..., Bench],  # noqa: F811
) -> None:
    """Counted time is stored once an hour: by that, a charge would count in the period that has ended."""
    bench = make_bench()
    bench.until(lambda: bench.agent.tasks.runtime is not None)
    now = bench.agent.tasks.runtime.party.now()
    bench.clock.now += 1800
    bench.train(1)
    (entry,) = bench.store.ledger.entries()
    assert entry.at == now + 1800


def test_before_the_first_charge_samples_arrive_anew_at_each_start(
    make_bench: Callable[..., Bench],  # noqa: F811
    config: DeviceConfig,  # noqa: F811
    package: Package,  # noqa: F811
) -> None:
    """A board without a battery has read its data in 1970, and lost its power before it could train."""
    privacy = PrivacySpec("record", "strict", 1.0, 1.0, 1e-5, sample_rate=0.5, batches=2)
    task = package.with_spec(method="fedper", privacy=privacy, data_window_s=DAY)
    bench = make_bench(package=task)
    images = np.load(config.data.path)["images"]
    keys = [sample_key(image.tobytes()) for image in images]
    bench.store.arrivals.of(keys, now=60)
    bench.restart()
    bench.server.open_round(1, cohort={DEVICE: method_of(task.spec).init_state().public.digest()})
    bench.acked(1)
    (entry,) = bench.store.ledger.entries()
    arrived = bench.store.arrivals.of(keys, now=60)
    assert {entry.window.holds(at) for at in arrived} == {True}
    bench.restart()
    bench.server.announce()
    bench.until(lambda: bench.agent.tasks.runtime is not None)
    assert bench.store.arrivals.of(keys, now=60) == arrived, "what was trained on never arrives again"


def write(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    np.savez(
        folder / "train.npz", images=rng.integers(0, 256, (16, 1, 8, 8), dtype=np.uint8), labels=np.arange(16) % 10
    )


def test_a_method_that_would_decline_without_samples_is_refused(
    make_bench: Callable[..., Bench],  # noqa: F811
    package: Package,  # noqa: F811
) -> None:
    bench = make_bench(package=package.with_spec(data_window_s=DAY))
    bench.server.open_round(1)
    bench.until(lambda: bench.server.declines != [])
    assert "takes no device without samples" in bench.server.declines[0].reason
