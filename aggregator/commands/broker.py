"""`hushfleet broker`: a broker in the foreground, for labs and for trying things out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.broker.process import BrokerKind, BrokerTls, run_foreground
from hushfleet.errors import BadInput

_FILE = {"exists": True, "dir_okay": False, "resolve_path": True}


def register(app: typer.Typer) -> None:
    """Adds the command `broker` to the application."""

    @app.command("broker")
    def broker(
        kind: Annotated[str, typer.Option(help="auto, mosquitto or amqtt.")] = "auto",
        host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 1883,
        data_dir: Annotated[Path, typer.Option(help="For its configuration and log.")] = Path("runs/broker"),
        ca_file: Annotated[Path | None, typer.Option(help="CA of all clients: mutual TLS.", **_FILE)] = None,
        cert_file: Annotated[Path | None, typer.Option(help="The broker's certificate.", **_FILE)] = None,
        key_file: Annotated[Path | None, typer.Option(help="The certificate's key.", **_FILE)] = None,
        open_to_network: Annotated[
            bool, typer.Option("--open", help="Let anyone on the network in, without TLS.")
        ] = False,
    ) -> None:
        """Run an MQTT broker in the foreground: Mosquitto if installed, else amqtt.

        Examples:

        `hushfleet broker` for this machine alone

        `hushfleet broker --host 0.0.0.0 --port 8883 --ca-file ca.pem --cert-file broker.pem --key-file broker.key`
        """
        raise typer.Exit(
            run_foreground(
                _kind(kind),
                host=host,
                port=port,
                data_dir=data_dir.resolve(),
                tls=_tls(ca_file, cert_file, key_file),
                open_to_network=open_to_network,
            )
        )


def _kind(text: str) -> BrokerKind:
    match text:
        case "auto" | "mosquitto" | "amqtt":
            return text
    raise BadInput(f"--kind {text!r} is not known; use auto, mosquitto or amqtt")


def _tls(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> BrokerTls | None:
    given = [path for path in (ca_file, cert_file, key_file) if path is not None]
    if not given:
        return None
    if ca_file is None or cert_file is None or key_file is None:
        raise BadInput("TLS needs all of --ca-file, --cert-file and --key-file")
    return BrokerTls(ca_file=ca_file, cert_file=cert_file, key_file=key_file)
