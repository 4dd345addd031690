"""`hushfleet fleet`: make a fleet, let boards in, watch and lock them out."""

from __future__ import annotations

import typer

from hushfleet.aggregator.fleet.commands import ask, membership, roster, run, setup, status

fleet = typer.Typer(
    no_args_is_help=True,
    help="""Make a fleet of boards, let them enrol, watch them, lock them out.

    Examples:

    `hushfleet fleet init greenhouse --broker-name broker.example --task task.toml`

    `hushfleet fleet add greenhouse --count 40 --board raspberry-pi-4-4gb`

    `hushfleet flash --fleet greenhouse --count 40 --image raspios.img --out cards`

    `hushfleet fleet up greenhouse`

    `hushfleet fleet status greenhouse`

    A run without a fleet has a folder, too: add, status, approve, block, unblock, forget and roster take it in place of
    the fleet's.
    """,
)
for part in (setup, run, status, membership, ask, roster):
    fleet.add_typer(part.app)
