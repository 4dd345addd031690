"""Says how samples are written in tables: in CSV files, and in the arrays of an .npz.

A task, or the owner of a board in DEVICE.toml, fixes this. Readers never conclude it from the samples: then one sample
would decide how all others are read, and with the unit `record` it would be in more than its own gradient.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from hushfleet.rules import Rule, Rules
from hushfleet.schema import Checked, later, require

MOST_COLUMNS = 4096
Columns = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=MOST_COLUMNS)]
DecimalMark = Literal["", ".", ","]
OwnData = Literal["folder", "arrays", "csv", "sound"]
"""The kinds of data of a board."""
TABLES = ("csv", "table")
FOLDERS = ("folder", "sound")
"""The kinds of data that are a folder of files for each class."""
NORMAL = "normal"
"""The class folder of samples without a fault."""
OWN_DATA = (*get_args(OwnData), "table")
"""The kinds of data that come from the user; `table` is `csv` under a name that fits Parquet files too."""
PUBLIC_DATA = ("digits", "mnist", "fashion-mnist", "emnist", "cifar10", "cifar100", "svhn")
"""The names of `hushfleet.data.sets`, which is imported when one of them is read."""
SOUND_SETS = {"speech-commands": 1.0, "esc-50": 5.0, "urbansound8k": 4.0}
"""The names of `hushfleet.data.sound_sets`, each with the seconds of its clips."""
SOUND = ("sound", *SOUND_SETS)
SOUND_KEYS = ("sample_rate", "segment_s", "hop_s")
SAMPLE_RATE, SEGMENT_S = 16000, 1.0
MOST_STEPS = 1 << 20
"""The largest number of steps of a sample: 65 seconds at 16 kHz."""
LabelKind = Literal["", "names", "numbers"]
ValueKind = Literal["", "pixels", "numbers", "tokens"]
Vocabulary = Annotated[int, Meta(ge=0, le=1_000_000)]
LayoutKind = Literal["", "channels-first", "channels-last"]
ColumnName = Annotated[str, Meta(max_length=256)]
BitDepth = Annotated[int, Meta(ge=0, le=16)]
SampleRate = Annotated[int, Meta(ge=0, le=192_000)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]


def one_form(name: str) -> str:
    r"""Returns the name in Unicode form NFC, which keyboards give; macOS may write an accent as a separate character.

    >>> len("e\u0301"), len(one_form("e\u0301"))
    (2, 1)
    """
    return unicodedata.normalize("NFC", name)


@dataclass(frozen=True)
class SampleForm(Checked):
    """The form of samples in tables. An empty value is not fixed.

    :param columns: the columns of values of a table, in the order in which the network takes them. Empty: all
        columns but those of labels, devices, times, records and targets, in the table's order.
    :param decimal: the decimal mark of CSV files. Empty: a point; a comma too if commas do not separate the columns.
    :param labels: `names` of classes, or their `numbers` from 0. Empty: in an .npz, numbers if the array is numeric.
    :param values: `pixels`, whole numbers from 0 to 255, which are divided by 255; `numbers`, which stay unchanged; or
        `tokens`, whole numbers from 0 to below `vocabulary`. Empty: uint8 are pixels.
    :param label_column: the column of labels of a table. Empty: `label`.
    :param device_column: likewise, of each sample's device. Empty: `device`.
    :param time_column: of times, by which the rows are sorted: numbers, or dates in the form of ISO 8601.
    :param record_column: rows with the same entry are the steps of one sample, a series of a channel a column.
    :param layout: the order of the axes of arrays, and of values in a row. Empty: `channels-first`, unless the shape
        shows that channels are last.
    :param bit_depth: 9 to 16: pixels are whole numbers below 2^bit_depth, and are divided by the largest of them.
        8: bytes, to which images with 16 bits are cut.
    :param sample_rate: Hz, of sound.
    :param segment_s: seconds of a segment of sound, which is one sample.
    :param hop_s: seconds from the beginning of one segment to that of the next. 0: `segment_s`.
    """

    columns: Columns = later(())
    decimal: DecimalMark = later("")
    labels: LabelKind = later("")
    values: ValueKind = later("")
    label_column: ColumnName = later("")
    device_column: ColumnName = later("")
    time_column: ColumnName = later("")
    record_column: ColumnName = later("")
    layout: LayoutKind = later("")
    bit_depth: BitDepth = later(0)
    vocabulary: Vocabulary = later(0)
    sample_rate: SampleRate = later(0)
    segment_s: Seconds = later(0.0)
    hop_s: Seconds = later(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not 0 < self.bit_depth < 8, "bit_depth", self.bit_depth, "8 to 16, or left out")
        deep = self.bit_depth > 8 and self.values == "numbers"
        require(not deep, "values", self.values, f"left out with bit_depth = {self.bit_depth}, which says pixels")
        if self.sample_rate and self.segment_s:
            most, hop = f"1 to {MOST_STEPS} frames at {self.sample_rate} Hz", self.hop_s or self.segment_s
            require(1 <= round(self.segment_s * self.sample_rate) <= MOST_STEPS, "segment_s", self.segment_s, most)
            require(round(hop * self.sample_rate) > 0, "hop_s", self.hop_s, "a frame or more, or left out")
        names = list(map(one_form, self.columns))
        require(len(set(names)) == len(names), "columns", list(self.columns[:8]), "different names")

    @classmethod
    def of(cls, section: Any) -> SampleForm:
        """Returns the form in those fields that a section has."""
        return cls(**{each.name: getattr(section, each.name) for each in fields(cls) if hasattr(section, each.name)})

    @property
    def sound_shape(self) -> tuple[int, int, int] | None:
        """The shape of a segment of sound, (1, 1, T); None if samples are no sound."""
        return (1, 1, round(self.segment_s * self.sample_rate)) if self.sample_rate else None

    @property
    def hop(self) -> int:
        """Frames from the beginning of one segment of sound to that of the next."""
        return round((self.hop_s or self.segment_s) * self.sample_rate)

    def merged(self, other: SampleForm) -> SampleForm:
        """Returns this form, with the values of `other` where it fixes nothing."""
        return SampleForm(*(getattr(self, each.name) or getattr(other, each.name) for each in fields(self)))


ANY_FORM = SampleForm()


def may_be_images(shape: tuple[int, ...] | None) -> bool:
    """Returns whether samples of a shape may be images; None: only the data say it."""
    return shape is None or (shape[0] in (1, 3) and shape[1] > 1)


def form_rules(section: str, kind_of: Callable[[Any], str], *, without: Sequence[str] = ()) -> Rules:
    """Returns the rules of a section that has the fields of `SampleForm`: each goes with some kinds of data.

    :param section: its name in codes.
    :param kind_of: returns `csv`, `arrays`, or another kind.
    :param without: the fields that the section lacks.
    """

    def rule(name: str, kinds: tuple[str, ...]) -> Rule:
        used = " or ".join(map(repr, kinds))
        return (
            lambda each: bool(getattr(each, name)) and kind_of(each) not in kinds and {"kind": kind_of(each)},
            f"{name} = {{{name}!r}}: must be left out with {{kind!r}}; it says what {used} contain",
        )

    kinds = dict.fromkeys(("labels", "values", "layout"), (*TABLES, "arrays"))
    kinds |= {"bit_depth": tuple(each for each in OWN_DATA if each != "sound")} | dict.fromkeys(SOUND_KEYS, SOUND)
    return {
        f"{section}.{each.name}-not-used": rule(each.name, kinds.get(each.name, TABLES))
        for each in fields(SampleForm)
        if each.name not in ("vocabulary", *without)  # vocabulary goes with values
    }
