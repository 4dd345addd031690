"""`hushfleet privacy`: compute epsilon from noise, and noise from epsilon, for both adversaries.

It always shows two adversaries. Client sampling counts only for the release: an adversary who sees a device's own
bytes also sees whether it took part, so against the server a device is charged as if it was drawn in every round. It
also shows two guesses: whether a unit took part or not (add or remove), and which of two units took part (replace-one).
"""

from __future__ import annotations

from collections.abc import Callable

from hushfleet.aggregator.commands.privacy_options import PrivacyOptions
from hushfleet.aggregator.report.options import with_options
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.privacy.terms import HONEST_FRACTION

_REFUSALS: tuple[tuple[Callable[[PrivacyOptions], bool], str], ...] = (
    (
        lambda o: (o.noise_multiplier is None) == (o.target is None),
        "give either --noise-multiplier or --epsilon, the other one is computed",
    ),
    (lambda o: o.rounds < 1, "--rounds must be 1 or more, got {0.rounds}"),
    (
        lambda o: o.unit == "record" and (o.noise_split != 1 or o.participants not in (None, 1)),
        "record-level noise is added whole on each device: leave out --noise-split, --participants",
    ),
    (
        lambda o: o.unit == "record" and o.parameters is not None,
        "--parameters asks about device-level noise: leave it out with --unit record",
    ),
    (lambda o: o.accounting == "strict" and o.noise_split != 1, "strict noise is not divided: leave out --noise-split"),
    (
        lambda o: (o.accounting == "secure") != (o.devices is not None),
        "--accounting secure needs --devices, and --devices needs --accounting secure",
    ),
    (
        lambda o: o.devices is None and (o.min_devices is not None or o.honest_fraction != HONEST_FRACTION),
        "--honest-fraction and --min-devices need --accounting secure",
    ),
    (lambda o: o.parameters is not None and o.parameters < 1, "--parameters must be 1 or more, got {0.parameters}"),
    (
        lambda o: (
            o.devices is not None
            and (o.unit == "record" or o.noise_split != 1 or o.participants is not None or o.sample_rate != 1)
        ),
        "secure aggregation takes --devices, --honest-fraction and --min-devices alone: remove the other options",
    ),
)
"""The options that do not go together, each with the sentence that says so."""


@with_options
def privacy(
    options: PrivacyOptions,
) -> None:
    """Compute epsilon from a noise multiplier, or the noise multiplier for an epsilon, against both adversaries.

    Ten devices that divide the noise of 20 rounds among them (FedGLP-ADP at its "epsilon = 2"):

        hushfleet privacy --noise-multiplier 3.975 --rounds 20 --delta 0.1 --noise-split 10

    The noise that gives epsilon 2 to the released models, nothing divided:

        hushfleet privacy --epsilon 2 --rounds 20 --delta 0.01

    Record-level noise, 3000 batches with each record drawn with probability 1/100:

        hushfleet privacy --unit record --epsilon 4 --rounds 3000 --sample-rate 0.01 --delta 1e-5

    A hundred devices with secure aggregation; a tenth may be corrupt and another tenth missing:

        hushfleet privacy --accounting secure --devices 100 --parameters 5130 --epsilon 2 --rounds 20 --delta 1e-5

    The table shows epsilon for adding or removing a unit, and for replacing one unit by another. `--accountant rdp`
    computes as the papers do, with Rényi's bound, which is larger.
    """
    from hushfleet.aggregator.commands.privacy_figures import figures, print_json, print_table

    for is_refused, why in _REFUSALS:
        if is_refused(options):
            raise BadInput(why.format(options))
    try:
        found = figures(options)
    except PrivacyError as error:
        raise BadInput(str(error)) from error
    (print_json if options.as_json else print_table)(found)
