"""`hushfleet fleet`: make a fleet, let boards in, watch, update and lock them out."""

from __future__ import annotations

import typer

from hushfleet.aggregator.fleet.commands import (
    ask,
    bundle,
    membership,
    release_keys,
    roster,
    run,
    setup,
    status,
    tested,
    updates,
)

fleet = typer.Typer(
    no_args_is_help=True,
    help="""Make a fleet of boards, let them enrol, watch them, update them, lock them out.

    Examples:

    `hushfleet fleet init greenhouse --broker-name broker.example --task task.toml`

    `hushfleet fleet add greenhouse --count 40 --board raspberry-pi-4-4gb`

    `hushfleet flash --fleet greenhouse --count 40 --image raspios.img --out cards`

    `hushfleet fleet up greenhouse`
    """,
)
for part in (setup, membership, roster, run, ask, tested, status, bundle, updates, release_keys):
    fleet.add_typer(part.app)
