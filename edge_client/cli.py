"""`hushfleet client`: the device's command (`hushfleet-edge`) under the one command of the kit."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    @app.command(
        "client",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
        help="Run a device: `hushfleet client DEVICE.toml`, or `status` and `predict`; see `--help`.",
    )
    def client(context: typer.Context) -> None:
        from hushfleet.edge_client.__main__ import main

        raise typer.Exit(main(context.args))
