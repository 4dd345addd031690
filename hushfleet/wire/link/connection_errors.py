"""Explains failed connections, and says what to do.

TLS to a port without TLS, and the reverse, give the same errors as many other faults. So the port is tried once more in
the other way; this sends only an empty login, or the start of a TLS handshake.
"""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
import time

from hushfleet.wire.link.address import BrokerAddress

ASK_S = 3.0
_NOT_YET, _ENDED = 9, 10  # X509_V_ERR_* of OpenSSL
_OTHER_AUTHORITY = (2, 7, 18, 19, 20, 21)
_OTHER_NAME = (62, 64)
_EMPTY_LOGIN = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x0a\x00\x00"  # CONNECT of MQTT 3.1.1 without a client id
_CONNACK = 0x20
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def explained(error: OSError, address: BrokerAddress) -> str:
    """Explains an error that came while connecting."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explained_certificate(error, address)
    in_handshake = isinstance(error, ssl.SSLError | ConnectionResetError | BrokenPipeError)
    if address.tls and in_handshake and _speaks_plainly(address):
        return (
            f"{address} speaks MQTT without TLS: name its TLS port (mostly 8883), or write mqtt:// where that is meant"
        )
    said = f"{error or type(error).__name__}"
    if address.tls and in_handshake and address.cert_file is not None:
        return (
            f"{address} ended the connection before the login ({said}): this mostly means that it does not accept our "
            "certificate, which was locked out or has ended; its operator knows why. Or it is just being started"
        )
    return f"{address} cannot be reached: {said}"


def explained_silence(address: BrokerAddress) -> str:
    """Explains why a broker address without TLS gave no answer to a login; empty: nothing is known."""
    if address.tls or not _speaks_tls(address):
        return ""
    return "; this port speaks TLS: write mqtts:// (with ca_file), or name the port without TLS (mostly 1883)"


def _explained_certificate(error: ssl.SSLCertVerificationError, address: BrokerAddress) -> str:
    code = error.verify_code
    if code in (_NOT_YET, _ENDED):
        says = "is not valid yet" if code == _NOT_YET else "has ended"
        now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        return f"the certificate of {address} {says}, and it is {now} (UTC) here: is the clock right?"
    if code in _OTHER_NAME:
        return f"the certificate of {address} is for other names than {address.host}: {error.verify_message}"
    if code in _OTHER_AUTHORITY:
        return (
            f"{address} is not a broker that {_authority(address)} vouches for: its certificate is "
            f"{_certificate_text(address)}. Is it another fleet's broker?"
        )
    return f"the certificate of {address} does not hold: {error.verify_message}"


def _authority(address: BrokerAddress) -> str:
    if address.ca_file is None:
        return "one of this system's authorities (ca_file names another)"
    try:
        first = _PEM.search(address.ca_file.read_bytes())
        known = _fingerprint(ssl.PEM_cert_to_DER_cert(first[0].decode())) if first else "unknown"
    except (OSError, ValueError):
        known = "unreadable"
    return f"{address.ca_file} (SHA-256 {known})"


def _certificate_text(address: BrokerAddress) -> str:
    from cryptography import x509

    try:
        pem = ssl.get_server_certificate((address.host, address.port), timeout=ASK_S)
        issuer = x509.load_pem_x509_certificate(pem.encode()).issuer.rfc4514_string()
        return f"SHA-256 {_fingerprint(ssl.PEM_cert_to_DER_cert(pem))}, issued by {issuer!r}"
    except (OSError, ValueError):
        return "not shown to us"


def _fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


def _speaks_plainly(address: BrokerAddress) -> bool:
    try:
        with socket.create_connection((address.host, address.port), ASK_S) as asked:
            asked.sendall(_EMPTY_LOGIN)
            return asked.recv(1) == bytes([_CONNACK])
    except OSError:
        return False


def _speaks_tls(address: BrokerAddress) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no data is sent over it
    try:
        with socket.create_connection((address.host, address.port), ASK_S) as asked:
            context.wrap_socket(asked, server_hostname=address.host).close()
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # the peer refuses with a TLS alert, so it speaks TLS
    except OSError:
        return False
    return True
