"""Flags of `jaxinfer serve` that say who may ask, how, and for how long. Never loads JAX."""

from __future__ import annotations

import argparse

from jaxinfer.config import ACCESS_LOGS, ServerConfig

FIELDS = (
    *("allowed_origins", "allowed_methods", "allowed_headers", "ssl_certfile", "ssl_keyfile"),
    *("request_timeout_s", "drain_timeout_s", "access_log"),
)
"""Fields of ServerConfig that keep their defaults where the command line says nothing."""


def add(parser: argparse.ArgumentParser, key_variable: str) -> None:
    """Adds them to the parser of the command. key_variable: of the environment, which may hold the key."""
    group = parser.add_argument_group("access")

    def several(flag: str, metavar: str, text: str) -> None:
        group.add_argument(flag, action="append", metavar=metavar, help=f"{text}; may be given several times")

    several("--api-key", "KEY", f"key that clients must show (default: that of {key_variable}, or none)")
    group.add_argument(
        "--allow-public-without-key",
        action="store_true",
        help="serve an address that other machines reach without asking for a key",
    )
    several("--allowed-origins", "ORIGIN", "origin of web pages that may read replies, * for any (default: none)")
    several("--allowed-methods", "METHOD", "method that these pages may use (default: any)")
    several("--allowed-headers", "HEADER", "request header that these pages may send (default: any)")
    group.add_argument("--allow-credentials", action="store_true", help="these pages' requests may carry cookies")
    group.add_argument("--ssl-certfile", help="PEM file with the certificate, to serve HTTPS")
    group.add_argument("--ssl-keyfile", help="PEM file with its key, where that is another file")
    group.add_argument("--request-timeout-s", type=float, help="longest a request may take (default: any time)")
    group.add_argument(
        "--strict-max-tokens",
        action="store_true",
        help="refuse what prompt and max_tokens together make longer than the context, instead of cutting it there",
    )
    group.add_argument(
        "--drain-timeout-s",
        type=float,
        help=f"what open requests get to finish when the server stops (default {ServerConfig.drain_timeout_s:g})",
    )
    group.add_argument(
        "--access-log",
        choices=ACCESS_LOGS,
        default="requests",
        help="prompts: log the beginning of each request's body, too (default: requests)",
    )
