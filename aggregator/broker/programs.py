"""The programs that can be a broker, each one value in `PROGRAMS`: to add one, write its value."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hushfleet.aggregator.broker.config import BrokerTls

_SERVE_AMQTT = "from hushfleet.aggregator.broker.programs import serve_amqtt; serve_amqtt()"


@dataclass(frozen=True, kw_only=True)
class BrokerProgram:
    """A program that can be a broker.

    :param name: also the name of its process.
    :param title: its name for people.
    :param find: returns where it is; None if it is not installed.
    :param command: makes the command from path, host, port, folder for its files, and TLS.
    :param has_tls: whether it can require certificates of its clients.
    :param get: how to install it.
    """

    name: str
    title: str
    find: Callable[[], str | None]
    command: Callable[[str, str, int, Path, BrokerTls | None], list[str]]
    has_tls: bool
    get: str


def find_mosquitto() -> str | None:
    """Returns Mosquitto's path; Debian puts the binary in a folder that only root's PATH has."""
    elsewhere = "/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"
    return shutil.which("mosquitto") or shutil.which("mosquitto", path=elsewhere)


def _mosquitto_command(path: str, host: str, port: int, folder: Path, tls: BrokerTls | None) -> list[str]:
    from hushfleet.aggregator.broker.config import mosquitto_acl, mosquitto_config

    acl_path, config_path = folder / "mosquitto.acl", folder / "mosquitto.conf"
    if tls is not None:
        acl_path.write_text(mosquitto_acl(aggregator=tls.aggregator))
        acl_path.chmod(0o600)
    config_path.write_text(mosquitto_config(host=host, port=port, tls=tls, acl_path=acl_path))
    return [path, "-c", str(config_path)]


MOSQUITTO = BrokerProgram(
    name="mosquitto",
    title="Mosquitto",
    find=find_mosquitto,
    command=_mosquitto_command,
    has_tls=True,
    get="apt install mosquitto",
)
AMQTT = BrokerProgram(
    name="amqtt",
    title="amqtt",
    find=lambda: None if importlib.util.find_spec("amqtt") is None else sys.executable,
    command=lambda path, host, port, folder, tls: [path, "-c", _SERVE_AMQTT, host, str(port)],
    has_tls=False,
    get="pip install amqtt",
)
PROGRAMS = {each.name: each for each in (MOSQUITTO, AMQTT)}
"""In the order in which `auto` takes them."""

if TYPE_CHECKING:
    BrokerKind = str
else:
    BrokerKind = Literal[("auto", *PROGRAMS)]


def serve_amqtt() -> None:
    """Runs an amqtt broker at the host and port of the command line until the process is ended."""
    from amqtt.broker import Broker as AmqttBroker

    host, port = sys.argv[1:]
    address = f"[{host}]" if ":" in host else host
    config = {
        "listeners": {"default": {"type": "tcp", "bind": f"{address}:{port}"}},
        # logins without a user name make sessions that amqtt forgets at once, which is enough for clean sessions
        "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
    }

    import asyncio  # with TLS: no other program here needs either

    async def serve() -> None:
        await AmqttBroker(config).start()
        await asyncio.Event().wait()

    asyncio.run(serve())
