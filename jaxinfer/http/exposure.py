"""To whom the server shows itself: which addresses it may listen on, and its certificate."""

from __future__ import annotations

import ipaddress
import socket
import ssl

from jaxinfer.config import ConfigError, ServerConfig


def refuse_public_without_key(sock: socket.socket, config: ServerConfig) -> None:
    """ConfigError for a bound socket that other machines reach while no key is asked for."""
    host = sock.getsockname()[0]
    if config.api_keys or config.allow_public_without_key or _is_loopback(host):
        return
    raise ConfigError(
        f"host is {config.host!r}, which other machines may reach, and there is no API key; give one (api_keys, "
        "--api-key, or JAXINFER_API_KEY in the environment), serve 127.0.0.1 alone, or allow it with "
        "--allow-public-without-key"
    )


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def check_certificate(config: ServerConfig) -> None:
    """ConfigError for files that HTTPS cannot be served with."""
    if config.ssl_certfile is None:
        return
    files = f"ssl_certfile {config.ssl_certfile!r}"
    if config.ssl_keyfile is not None:
        files += f" and ssl_keyfile {config.ssl_keyfile!r}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The password keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: b"-")
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"HTTPS cannot be served with {files}: {error}; give PEM files of a certificate and its own key, "
            "which is not encrypted"
        ) from error
