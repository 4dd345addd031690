"""Says how samples are written in tables: in CSV files, and in the arrays of an .npz.

A task, or the owner of a board in DEVICE.toml, fixes this. Readers never conclude it from the samples: then one sample
would decide how all others are read, and with the unit `record` it would be in more than its own gradient.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from hushfleet.rules import Rule, Rules
from hushfleet.schema import Checked, later, require

MOST_COLUMNS = 4096
Columns = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=MOST_COLUMNS)]
DecimalMark = Literal["", ".", ","]
OwnData = Literal["folder", "arrays", "csv"]
"""The kinds of data that come from the user."""
OWN_DATA: tuple[OwnData, ...] = get_args(OwnData)
PUBLIC_DATA = ("digits", "mnist", "fashion-mnist", "emnist", "cifar10", "cifar100", "svhn")
"""The names of `hushfleet.data.sets`, which is imported when one of them is read."""
LabelKind = Literal["", "names", "numbers"]
ValueKind = Literal["", "pixels", "numbers", "tokens"]
Vocabulary = Annotated[int, Meta(ge=0, le=1_000_000)]


def one_form(name: str) -> str:
    r"""Returns the name in Unicode form NFC, which keyboards give; macOS may write an accent as a separate character.

    >>> len("e\u0301"), len(one_form("e\u0301"))
    (2, 1)
    """
    return unicodedata.normalize("NFC", name)


@dataclass(frozen=True)
class SampleForm(Checked):
    """The form of samples in tables. An empty value is not fixed.

    :param columns: the columns of values of a CSV file, in the order in which the network takes them. Empty: all
        columns but those of labels, devices and targets, in the file's order.
    :param decimal: the decimal mark of CSV files. Empty: a point; a comma too if commas do not separate the columns.
    :param labels: `names` of classes, or their `numbers` from 0. Empty: in an .npz, numbers if the array is numeric.
    :param values: `pixels`, whole numbers from 0 to 255, which are divided by 255; `numbers`, which stay unchanged; or
        `tokens`, whole numbers from 0 to below `vocabulary`. Empty: uint8 are pixels.
    """

    columns: Columns = later(())
    decimal: DecimalMark = later("")
    labels: LabelKind = later("")
    values: ValueKind = later("")
    vocabulary: Vocabulary = later(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = list(map(one_form, self.columns))
        require(len(set(names)) == len(names), "columns", list(self.columns[:8]), "different names")

    def merged(self, other: SampleForm) -> SampleForm:
        """Returns this form, with the values of `other` where it fixes nothing."""
        return SampleForm(
            self.columns or other.columns,
            self.decimal or other.decimal,
            self.labels or other.labels,
            self.values or other.values,
            other.vocabulary or self.vocabulary,
        )


ANY_FORM = SampleForm()


def form_rules(section: str, kind_of: Callable[[Any], str]) -> Rules:
    """Returns the rules of a section that has the fields of `SampleForm`: each goes with some kinds of data.

    :param section: its name in codes.
    :param kind_of: returns `csv`, `arrays`, or another kind.
    """

    def rule(name: str, kinds: tuple[str, ...]) -> Rule:
        used = " or ".join(map(repr, kinds))
        return (
            lambda each: bool(getattr(each, name)) and kind_of(each) not in kinds and {"kind": kind_of(each)},
            f"{name} = {{{name}!r}}: must be left out with {{kind!r}}; it says what {used} contain",
        )

    of_text = dict.fromkeys(("columns", "decimal"), ("csv",))
    return {
        f"{section}.{each.name}-not-used": rule(each.name, of_text.get(each.name, ("csv", "arrays")))
        for each in fields(SampleForm)
        if each.name != "vocabulary"  # goes with values
    }
