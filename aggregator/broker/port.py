"""Ports of this machine: a free one, whether one can be listened on, and whether a broker answers there."""

from __future__ import annotations

import socket
import ssl

from hushfleet.errors import BadInput

# CONNECT of MQTT 3.1.1, clean session, keep-alive 10 s, a client id of its own; and the answer "accepted"
_PROBE = b"\x10\x1b\x00\x04MQTT\x04\x02\x00\x0a\x00\x0fhushfleet-probe"
_PROBE_ANSWER = b"\x20\x02\x00\x00"


def _new_socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


def free_port(host: str) -> int:
    with _new_socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port_free(host: str, port: int) -> None:
    """Raises `BadInput` where something listens there."""
    with _new_socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BadInput(
                f"a broker cannot listen on {host} port {port}: {error.strerror}; stop what uses it (another "
                "broker, perhaps the system's own) or choose another port"
            ) from error


def answers(host: str, port: int, *, plain: bool) -> bool:
    """Whether a broker takes an MQTT login there, or with TLS at least a handshake.

    Mosquitto listens before it has read its certificates, so an open port is not enough.
    """
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((target, port), timeout=2.0) as probe:
            if plain:
                probe.sendall(_PROBE)
                answer = probe.recv(4)
                probe.sendall(b"\xe0\x00")
                return answer == _PROBE_ANSWER
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE  # nothing is sent; the question is only whether TLS is spoken
            with context.wrap_socket(probe):
                return True
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return False
    except ssl.SSLError:
        return True  # TLS 1.2 asks for our certificate within the handshake
    except OSError:
        return False
