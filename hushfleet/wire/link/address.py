"""Parses the broker's address and our credentials: `mqtt://` and `mqtts://` URLs, TLS files, logins."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hushfleet.errors import BadInput
from hushfleet.paths import is_closed

_DEFAULT_PORTS = {"mqtt": 1883, "mqtts": 8883}


@dataclass(frozen=True, kw_only=True)
class BrokerAddress:
    """A broker's address, checked. `repr` never shows the password.

    :param ca_file: certificates that may sign the broker's certificate; None uses the system's. TLS only.
    :param cert_file: the device's certificate (PEM) with its `key_file`, for mutual TLS.
    """

    host: str
    port: int
    tls: bool
    username: str | None = None
    password: str | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        username: str | None = None,
        password_file: str | Path | None = None,
        ca_file: str | Path | None = None,
        cert_file: str | Path | None = None,
        key_file: str | Path | None = None,
    ) -> BrokerAddress:
        """Parses a URL. Raises `BadInput` that says which part cannot be used, and why.

        :param username: takes precedence over the one in the URL.
        :param password_file: its first line takes precedence over the password in the URL.
        """
        if "@" in url and "@" not in re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0]:
            raise BadInput(  # before the URL is parsed: a parser error would show a part of the password
                f"the user name or password in the broker's URL {_format_url(url)} has one of / ? #; write %2F, %3F or "
                "%23 for it, or name a password_file"
            )
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise BadInput(f"the broker's URL {_format_url(url)} has no valid host or port: {error}") from error
        if parts.scheme not in _DEFAULT_PORTS:
            raise BadInput(f"the broker's URL {_format_url(url)} must begin with mqtt:// or mqtts://")
        if not host:
            raise BadInput(f"the broker's URL {_format_url(url)} names no host")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise BadInput(f"the broker's URL {_format_url(url)} has something after the port; MQTT has no paths")
        tls = parts.scheme == "mqtts"
        if not tls and (ca_file or cert_file or key_file):
            raise BadInput(f"TLS files are given, but {_format_url(url)} is not encrypted; use mqtts://")
        if bool(cert_file) != bool(key_file):
            raise BadInput("a client certificate needs both cert_file and key_file")
        if username is None and parts.username:
            username = unquote(parts.username)
        password = None if parts.password is None else unquote(parts.password)
        if password_file is not None:
            try:
                password = Path(password_file).read_text("utf-8").partition("\n")[0].rstrip("\r")
            except (OSError, UnicodeDecodeError) as error:
                raise BadInput(f"the password_file {str(password_file)!r} cannot be read: {error}") from error
        if password is not None and username is None:
            raise BadInput("a password for the broker is given without a user name")
        address = cls(
            host=host,
            port=port or _DEFAULT_PORTS[parts.scheme],
            tls=tls,
            username=username,
            password=password,
            ca_file=Path(ca_file) if ca_file else None,
            cert_file=Path(cert_file) if cert_file else None,
            key_file=Path(key_file) if key_file else None,
        )
        address.tls_context()  # so that a wrong file is an error now, not an endless retry
        return address

    def tls_context(self) -> ssl.SSLContext | None:
        """Returns a new context, so that a renewed certificate is used at the next connection; None without TLS.

        Raises `BadInput` for files that are missing or have other content.
        """
        if not self.tls:
            return None
        for path in (self.ca_file, self.cert_file, self.key_file):
            if path is not None and not os.path.isfile(path):
                closed = ", or a folder above it is closed to this user" * is_closed(path)
                raise BadInput(f"the TLS file {path} does not exist{closed}")
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (ssl.SSLError, OSError) as error:
            raise BadInput(f"{self.ca_file} does not hold certificates in PEM form: {error}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file)
            except (ssl.SSLError, OSError) as error:
                raise BadInput(
                    f"{self.cert_file} and {self.key_file} are not a certificate and its key: {error}"
                ) from error
        return context

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.tls else 'mqtt'}://{host}:{self.port}"

    __repr__ = __str__


def without_password(url: str) -> str:
    """Returns the URL with the word PASSWORD for its password, so that it can be printed and completed by hand.

    >>> without_password("mqtts://me:secret@broker.example")
    'mqtts://me:PASSWORD@broker.example'
    """
    return re.sub(r"(://[^/\s:@]*):[^/\s]*@", r"\1:PASSWORD@", url)


def _format_url(url: str) -> str:
    """Returns the URL without the part that may contain a password."""
    scheme, mark, rest = url.partition("://")
    return repr(f"{scheme}{mark}{rest.rpartition('@')[2]}")
