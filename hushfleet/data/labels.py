"""Reads class labels: names in one Unicode form, missing labels, and numbers that are codes."""

from __future__ import annotations

import logging
import math
import unicodedata
from collections.abc import Collection, Sequence

import numpy as np

from hushfleet.errors import BadInput

MISSING = frozenset((
    "", "#N/A", "#N/A N/A", "#NA", "-NaN", "-nan", "<NA>", "N/A", "NA", "NULL", "NaN", "NaT", "None", "n/a", "nan",
    "null",
))  # fmt: skip
"""Texts that pandas reads as a missing value, and texts that a missing value becomes."""

_log = logging.getLogger(__name__)


def one_form(name: str) -> str:
    """Returns the name in Unicode form NFC, which keyboards give; macOS may write an accent as a separate character."""
    return unicodedata.normalize("NFC", name)


def texts_of(labels: np.ndarray) -> np.ndarray:
    """Returns each label as a text in one form, object `[n]`."""
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


def have_two_readings(labels: np.ndarray, class_names: Sequence[str]) -> np.ndarray:
    """Marks ambiguous labels, bool of their shape: those that are the name of one class and the place of another."""
    place_of = {name: place for place, name in enumerate(class_names)}
    numbers = np.unique(labels) if labels.dtype.kind in "iuf" else ()
    # the text of a fraction is not a class
    return np.isin(labels, [number for number in numbers if place_of.get(f"{number:.17g}", number) != number])


def check_one_reading(labels: np.ndarray, class_names: Sequence[str], where: str) -> None:
    """Raises `BadInput` for the first of the labels that `have_two_readings`."""
    for number in labels[have_two_readings(labels, class_names)][:1]:
        raise BadInput(
            f"{where}: the label {number:.17g} may be the name of a class or its place from 0, and the task's classes "
            f"are {', '.join(class_names[:8])}; give labels as texts, as y.astype(str) does"
        )


def as_labels(y: np.ndarray, class_names: Sequence[str], *, count: int, where: str) -> np.ndarray:
    """Converts whole numbers or names of classes to labels int64 `[n]`. Raises `BadInput`."""
    if y.shape != (count,):
        raise BadInput(
            f"{where} has shape {list(y.shape)}; it must be [{count}], a label for each sample (or several, with "
            'model.loss = "binary" or "squared")'
        )
    check_present(y, where, names=class_names)
    classes = len(class_names)
    if y.dtype.kind in "iu" or (y.dtype.kind == "f" and (y == np.floor(y)).all()):
        if count and not 0 <= y.min() <= y.max() < classes:
            raise BadInput(
                f"{where} has labels {y.min():.0f} to {y.max():.0f}; there are 0 to {classes - 1}, for "
                f"{', '.join(class_names[:8])}{', ...' * (classes > 8)}; numbers that are names go as texts, as "
                "y.astype(str) gives them"
            )
        labels: np.ndarray = y.astype(np.int64)
        return labels
    if y.dtype.kind not in "UO":
        raise BadInput(
            f"{where} is {y.dtype}; it must be whole numbers, or names of classes (or numbers to predict, with "
            'model.loss = "squared")'
        )
    number_of = {one_form(name): number for number, name in enumerate(class_names)}
    texts = texts_of(y)
    for place, text in enumerate(texts):
        if text not in number_of:
            raise BadInput(f"{where}: sample {place} has the label {text!r}, which is none of {', '.join(class_names)}")
    return np.array([number_of[text] for text in texts], np.int64)


def class_names_of(labels: Sequence[np.ndarray], where: str) -> tuple[str, ...]:
    """Returns the names that occur, in order; for whole numbers all from 0, if half of them do. Raises `BadInput`."""
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
