"""`hushfleet broker`: run a broker in the foreground, for labs and trials."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.broker.programs import BrokerKind
from hushfleet.errors import BadInput

_FILE = {"metavar": "FILE", "exists": True, "dir_okay": False, "resolve_path": True}


def broker(
    kind: Annotated[BrokerKind, typer.Option(help="auto: Mosquitto if it is installed.")] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 1883,
    data_dir: Annotated[Path, typer.Option(help="Folder for the broker's configuration and log.")] = Path(
        "runs/broker"
    ),
    ca_file: Annotated[
        Path | None, typer.Option(help="CA that signed the clients' certificates; turns on mutual TLS.", **_FILE)
    ] = None,
    cert_file: Annotated[Path | None, typer.Option(help="The broker's certificate.", **_FILE)] = None,
    key_file: Annotated[Path | None, typer.Option(help="Private key of that certificate.", **_FILE)] = None,
    open_to_network: Annotated[bool, typer.Option("--open", help="Let anyone on the network in, without TLS.")] = False,
) -> None:
    """Run an MQTT broker in the foreground: Mosquitto if installed, else amqtt.

    Examples:

    For this machine alone: `hushfleet broker`

    `hushfleet broker --host 0.0.0.0 --port 8883 --ca-file ca.pem --cert-file broker.pem --key-file broker.key`
    """
    from hushfleet.aggregator.broker.config import BrokerTls
    from hushfleet.aggregator.broker.process import start_broker

    tls = None
    if ca_file is not None and cert_file is not None and key_file is not None:
        tls = BrokerTls(ca_file=ca_file, cert_file=cert_file, key_file=key_file)
    elif ca_file or cert_file or key_file:
        raise BadInput("TLS needs all of --ca-file, --cert-file and --key-file")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # before clients can connect: one may stop the broker
    try:
        with start_broker(
            kind,
            host=host,
            port=port,
            data_dir=data_dir.resolve(),
            tls=tls,
            open_to_network=open_to_network,
        ) as running:
            print(f"{running.program.name} listens at {running.url}; its log is {running.log_path}", flush=True)
            status = running.wait()
    except KeyboardInterrupt:
        status = 0
    raise typer.Exit(status)
