"""Reads class labels: names in one Unicode form, missing labels, and numbers that are codes."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Sequence

import numpy as np

from hushfleet.data.form import one_form
from hushfleet.errors import BadInput

MISSING = frozenset((
    "", "#N/A", "#N/A N/A", "#NA", "-NaN", "-nan", "<NA>", "N/A", "NA", "NULL", "NaN", "NaT", "None", "n/a", "nan",
    "null",
))  # fmt: skip
"""Texts that pandas reads as a missing value, and texts that a missing value becomes."""

SAY_WHICH = 'give names as texts, as y.astype(str) does, or say which with data.labels = "names" or "numbers"'
_PLACE = re.compile(r"0|[1-9][0-9]{0,8}")
_WHOLE = re.compile(r"-?(0|[1-9][0-9]*)")

_log = logging.getLogger(__name__)


def texts_of(labels: np.ndarray) -> np.ndarray:
    """Returns each label as a text in one form, object `[n]`.

    >>> texts_of(np.array([0, 2])).tolist()
    ['0', '2']
    """
    return np.array([one_form(str(label)) for label in labels.ravel()], dtype=object)


def check_present(labels: np.ndarray, where: str, *, names: Collection[str] = (), what: str = "label") -> None:
    """Raises `BadInput` for samples without a label, or a device: NaN, None, and texts of `MISSING`.

    :param names: texts that are names here, even if they are in `MISSING`.
    """
    labels = labels.ravel()
    if labels.dtype.kind == "f":
        gaps = np.isnan(labels)
    elif labels.dtype.kind in "UO":
        known = MISSING - set(map(one_form, names))
        gaps = np.array([text.strip() in known for text in texts_of(labels)], bool)
    else:
        return
    if gaps.any():
        first = int(gaps.argmax())
        a_name = ", or name it in class_names if it is a class" * (isinstance(labels[first], str) and what == "label")
        raise BadInput(
            f"{where}: {gaps.sum()} samples, the first of them number {first} (from 0), have no {what} "
            f"({str(labels[first])!r}); leave these samples out{a_name}"
        )


NO_CLASS, UNCLEAR = -1, -2


def read_labels(y: np.ndarray, class_names: Sequence[str], kind: str) -> np.ndarray:
    """Returns the class of each label, int64 of the shape of `y`: `NO_CLASS` if it is none, `UNCLEAR` if it may be two.

    No label decides how another is read: an array of numbers and one text is an array of texts, and is read alike.

    :param kind: `names` of classes; `numbers`, the places of classes from 0; or `each`, where a label may be either.
    """
    named: dict[str, int] = {}
    for place, name in enumerate(map(one_form, class_names)):
        key = _number_form(name)
        named[key] = place if named.get(key, place) == place else UNCLEAR

    def class_of(text: str) -> int:
        key = _number_form(one_form(text))
        by_name = NO_CLASS if kind == "numbers" else named.get(key, NO_CLASS)
        is_place = kind != "names" and _PLACE.fullmatch(key) is not None and int(key) < len(class_names)
        by_place = int(key) if is_place else NO_CLASS
        return max(by_name, by_place) if NO_CLASS in (by_name, by_place) or by_name == by_place else UNCLEAR

    texts = [each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in y.ravel().tolist()]
    places = {text: class_of(text) for text in set(texts)}
    return np.array([places[text] for text in texts], np.int64).reshape(y.shape)


def _number_form(text: str) -> str:
    """Returns a number in one form: the type of an array decides whether NumPy writes `3`, `3.0`, `(3+0j)` or `True`.

    A text that no program writes for a number stays as it is, such as `007`. Whole numbers are rounded to float64, and
    fractions to float32, because the type of an array may have done so.
    """
    number = {"True": "1", "False": "0"}.get(text, text)
    try:
        value = complex(number)
    except ValueError:
        return text
    is_written_so = _WHOLE.fullmatch(number) or number in (repr(value.real), repr(value))
    if value.imag or not math.isfinite(value.real) or not is_written_so:
        return text
    return str(int(value.real)) if value.real.is_integer() else str(np.float32(value.real))


def class_names_of(labels: Sequence[np.ndarray], where: str) -> tuple[str, ...]:
    """Returns the names that occur, in order; for whole numbers all from 0, if half of them do. Raises `BadInput`.

    >>> class_names_of([np.array(["leaf", "stem", "leaf"])], "plants")
    ('leaf', 'stem')
    """
    for each in labels:
        check_present(each, where)
    kinds = {each.dtype.kind in "UO" for each in labels}
    if len(kinds) > 1:
        raise BadInput(f"{where}: train_y and test_y must both be texts, or both numbers")
    if kinds == {True}:
        texts = {text for each in labels for text in texts_of(each)}
        if fractions := [text for text in sorted(texts) if _is_fraction(text)]:
            raise BadInput(
                f"{where}: label {fractions[0]!r} is a number and no name of a class; for numbers to predict take "
                'model.loss = "squared", and for classes of such names say data.class_names'
            )
        numeric = all(text.isdecimal() for text in texts)
        return tuple(sorted(texts, key=int) if numeric else sorted(texts))
    found = np.unique(np.concatenate([each.ravel() for each in labels]))
    if not len(found) or found.dtype.kind not in "iuf" or found.min() < 0 or found.max() >= 1 << 16:
        raise BadInput(f"{where}: labels must be whole numbers from 0 to 65535, or names of classes")
    outputs = int(found.max()) + 1
    if (never := outputs - len(found)) > 0:
        said = (
            f"{where}: whole numbers count from 0, so the labels {found.min():.0f} to {found.max():.0f} make {outputs} "
            f"outputs, and {never} of these never occur{'s' * (never == 1)}; give them as texts, as y.astype(str) "
            "does, for an output for each that occurs"
        )
        if 2 * never > outputs:
            raise BadInput(f"{said}, or name all {outputs} in class_names")
        _log.warning("%s", said)
    return tuple(str(number) for number in range(outputs))


def _is_fraction(text: str) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return math.isfinite(number) and not number.is_integer()
