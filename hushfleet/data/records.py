"""Compares the samples of a table with a task: one line, one record.

A table is a CSV file, or the arrays of an .npz or of a program. Each sample is read alone: neither the type of an
array, which follows from all of its values, nor another sample decides what a sample means, or whether it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hushfleet.data.form import ANY_FORM, SampleForm
from hushfleet.data.labels import NO_CLASS, SAY_WHICH, UNCLEAR, read_labels
from hushfleet.data.layout import channels_first
from hushfleet.data.measurements import far_away
from hushfleet.data.samples import Samples
from hushfleet.data.targets import CLASSES, Targets
from hushfleet.errors import BadInput
from hushfleet.losses import LOSSES

_SHOWN = 8  # names of classes in an error


class _Misfit(NamedTuple):
    """A reason why samples do not fit.

    :param are: the samples, bool `[n]`.
    :param where: the array that is to blame.
    :param shown: returns what a sample has, for people.
    """

    are: np.ndarray
    where: str
    shown: Callable[[int], object]
    why: str


def fitted(
    x: Any,
    y: Any,
    names: Sequence[str],
    *,
    targets: Targets = CLASSES,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    form: SampleForm = ANY_FORM,
    labels: str = "",
    shape: tuple[int, ...] | None = None,
    order: tuple[int, ...] | None = None,
    where: tuple[str, str],
    skipped: list[str] | None = None,
) -> Samples:
    """Returns the samples that fit a task.

    :param x: `[n, C, H, W]`, `[n, C, T]` or `[n, F]`.
    :param y: labels `[n]`, or the numbers of other targets.
    :param names: of the classes, or of the outputs.
    :param mean: per channel, like `std`; empty: 0 and 1.
    :param labels: the kind, as in `read_labels`; empty: names in an array of texts, else numbers.
    :param shape: of a sample, (C, H, W); None: any.
    :param order: as `shape`, where it only says which axis the channels are.
    :param where: the names of `x` and `y` in errors.
    :param skipped: receives a text for each sample that does not fit; None: the first of them is an error.
    :raises BadInput: the arrays have another shape or type, or `skipped` is None and a sample does not fit.
    """
    x, y = unmasked(x, where[0]), unmasked(y, where[1])
    if skipped is None and x.dtype.kind not in "uifb":
        raise BadInput(f"{where[0]} is {x.dtype}; it must be numbers")
    if skipped is None and x.dtype == np.uint8 and form.bit_depth > 8:
        raise BadInput(f"{where[0]} is uint8, and data.bit_depth = {form.bit_depth} is for larger pixels; leave it out")
    values, usable = read_values(x, where[0], form, shape=shape or order)
    if shape is not None and values.shape[1:] != shape:
        raise BadInput(f"{where[1]}: samples have the shape {list(values.shape[1:])}, and the task takes {list(shape)}")
    mean, std = mean or (0.0,) * values.shape[1], std or (1.0,) * values.shape[1]
    found, of_targets = _targets(y, names, targets, len(values), where[1], labels, is_strict=skipped is None)
    if form.values == "tokens":
        usable &= ((values >= 0) & (values < form.vocabulary) & (values == np.floor(values))).all((1, 2, 3))
    fits = usable & ~np.logical_or.reduce([each.are for each in of_targets])
    samples = Samples(values, found, tuple(mean), tuple(std), targets)
    far = far_away(values, mean, std) & fits
    most, key = (2**form.bit_depth - 1, "bit_depth") if form.bit_depth > 8 else (255, "values")
    is_free = form.values != "pixels" and not form.bit_depth
    wanted = "finite numbers" if is_free else f"pixels, whole numbers from 0 to {most} (data.{key})"
    if form.values == "tokens":
        wanted = f"tokens, whole numbers from 0 to {form.vocabulary - 1} (data.vocabulary)"
    misfits = (
        _Misfit(~usable, where[0], lambda at: _extreme(x[at]), f"its values are no {wanted}"),
        *(each._replace(are=each.are & usable) for each in of_targets),
        _Misfit(far, where[0], lambda at: _extreme(x[at]), "a million standard deviations from the mean"),
    )
    for misfit in misfits:
        places = np.flatnonzero(misfit.are)
        if skipped is None and len(places):
            raise BadInput(
                f"{misfit.where}: {len(places)} samples, the first of them number {places[0]} (from 0) with "
                f"{misfit.shown(places[0])}: {misfit.why}; leave these samples out, or mend them"
            )
        if skipped is not None:
            skipped += (f"sample {place} ({y[place]}): {misfit.why}" for place in places)
    places = np.flatnonzero(fits & ~far)
    return samples if len(places) == len(values) else samples.take(places)


def _targets(
    y: np.ndarray, names: Sequence[str], targets: Targets, count: int, where: str, kind: str, *, is_strict: bool
) -> tuple[np.ndarray, list[_Misfit]]:
    """Returns labels int64 `[n]`, or numbers float32 `[n, outputs]`, and who has others. Raises `BadInput`."""
    if not targets.are_classes:
        if is_strict and y.dtype.kind not in "uifb" and not (y.dtype.kind in "UO" and np.isfinite(as_float32(y)).all()):
            raise BadInput(f"{where} is {y.dtype}; with model.loss = {targets.loss!r} it must be numbers")
        rows = y[:, None] if y.ndim == 1 else y
        if rows.shape != (count, len(names)):
            raise BadInput(
                f"{where} has shape {list(rows.shape)}; with model.loss = {targets.loss!r} it must be "
                f"[{count}, {len(names)}], a number for each output: {', '.join(names)}"
            )
        if len(targets.mean) not in (0, len(names)):
            raise BadInput(f"data.target_mean has {len(targets.mean)} values; {where} has {len(names)} outputs")
        numbers, misfit = as_float32(rows), LOSSES[targets.loss].misfit + ", scaled" * bool(targets.mean)
        why = f"its targets are {misfit}"
        return numbers, [_Misfit(targets.misfits(numbers), where, lambda at: rows[at].tolist(), why)]
    if y.shape != (count,):
        raise BadInput(
            f"{where} has shape {list(y.shape)}; it must be [{count}], a label for each sample (one-hot rows give "
            'it by y.argmax(1)), or several, with model.loss = "binary" or "squared"'
        )
    kind = kind or ("numbers" if y.dtype.kind in "iufb" else "names")
    found = read_labels(y, names, kind)
    if is_strict and y.dtype.kind == "b" and kind != "names":  # False and True, and in which order
        found[:] = NO_CLASS
    known = f"{', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)}"
    places = f", or of their numbers 0 to {len(names) - 1}" * (kind != "names")
    places += '; if labels are places of classes from 0, say data.labels = "numbers"' * (is_strict and kind == "names")
    places += "; numbers to predict go with model.loss = 'squared'" * (is_strict and y.dtype.kind == "f")
    unclear = f"its label may be the name of a class or its place from 0; {SAY_WHICH}"
    return found, [
        _Misfit(found == NO_CLASS, where, lambda at: f"the label {y[at]!s}", f"its label is none of {known}{places}"),
        _Misfit(found == UNCLEAR, where, lambda at: f"the label {y[at]!s}", unclear),
    ]


def _extreme(values: np.ndarray) -> str:
    """Returns the value of a sample that is the largest, or no number."""
    numbers = as_float32(values).ravel()
    return f"the value {numbers[np.nan_to_num(np.abs(numbers), nan=np.inf).argmax()]:g}"


def unmasked(values: Any, where: str) -> np.ndarray:
    """Converts to an array. Raises `BadInput` if a mask (`numpy.ma`) hides values, which an array would still use."""
    if isinstance(values, np.ma.MaskedArray):
        mask = np.atleast_1d(np.ma.getmaskarray(values))
        hidden = np.asarray(mask.reshape(len(mask), -1).any(1))
        if hidden.any():
            raise BadInput(
                f"{where}: of {hidden.sum()} samples, the first of them number {int(hidden.argmax())} (from 0), a mask "
                "hides values; leave these samples out, or fill the gaps"
            )
    return np.asarray(values)


def read_values(
    x: np.ndarray, where: str, form: SampleForm = ANY_FORM, *, shape: tuple[int, ...] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the samples `[n, C, H, W]`, uint8, int16 or float32, and whether each fits, bool `[n]`; others are zeros.

    :param form: says whether values are pixels, of how many bits, and which axis the channels are.
    :param shape: (C, H, W), which the task takes; None: any.
    :raises BadInput: the whole array has another form.
    """
    x = channels_first(x, where, layout=form.layout, shape=shape, are_pixels=x.dtype == np.uint8)
    are_bytes = form.values == "pixels" or form.bit_depth == 8
    if x.dtype == np.uint8 and form.bit_depth <= 8:
        return np.ascontiguousarray(x if form.values in ("", "pixels") else x.astype(np.float32)), np.ones(len(x), bool)
    if x.dtype == np.int16 and form.sample_rate:
        return np.ascontiguousarray(x), np.ones(len(x), bool)
    values, most = as_float32(x), 2.0 ** (form.bit_depth or 8) - 1
    fits = np.isfinite(values).all((1, 2, 3))
    if are_bytes or form.bit_depth:
        fits &= are_pixels(values, most).all((1, 2, 3))
    values[~fits] = 0
    if form.bit_depth > 8:
        values /= np.float32(most)
    return np.ascontiguousarray(values.astype(np.uint8) if are_bytes else values), fits


def are_pixels(values: np.ndarray, most: float = 255) -> np.ndarray:
    """Returns which of these numbers are whole ones from 0 to `most`, bool of the same shape."""
    found: np.ndarray = (values >= 0) & (values <= most) & (values == np.floor(values))
    return found


def as_float32(x: np.ndarray) -> np.ndarray:
    """Converts numbers, or texts of numbers, to float32; a value that is no finite number becomes NaN or infinite.

    All go by way of float64, so that the type of the array changes no bit of a value.
    """
    if x.dtype.kind not in "iufb":
        x = np.array([_number(value) for value in x.ravel().tolist()], np.float64).reshape(x.shape)
    wide = x.astype(np.float64, copy=False) if x.dtype.itemsize > 4 else x
    with np.errstate(over="ignore", invalid="ignore"):  # becomes infinite
        return wide.astype(np.float32)


def _number(value: Any) -> float:
    try:
        text = value.decode() if isinstance(value, bytes) else value
        number = complex({"True": 1, "False": 0}.get(text, text))
    except (ValueError, TypeError, OverflowError):
        return np.nan
    return np.nan if number.imag else number.real
