"""Where things listen: `HOST:PORT`, URLs, and whether two of them are the same place."""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

LISTEN = "127.0.0.1:8080"


def split_listen(text: str) -> tuple[str, int]:
    """`HOST:PORT` in two; an IPv6 host stands in brackets. Port 0 lets the system choose.

    Raises:
        ValueError: it is not such an address.
    """
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) is not None and int(port) <= 65_535
    is_host = re.fullmatch(r"[A-Za-z0-9._-]+", bare, re.ASCII) or (
        bare != host and re.fullmatch(r"[0-9A-Fa-f:.%]+", bare, re.ASCII)
    )
    if not (colon and is_host and is_port):
        raise ValueError(f"`{text[:60]}` is not HOST:PORT, like {LISTEN} or [::1]:8080")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    return host in {"localhost", "::1"} or host.startswith("127.")


def is_own(url: str, host: str, port: int) -> bool:
    """Whether a URL leads to rota's own port on this machine, by whatever name."""
    parts = urlsplit(url)
    url_port = parts.port or (443 if parts.scheme == "https" else 80)
    if port == 0 or url_port != port or parts.hostname is None:
        return False
    everywhere = {"0.0.0.0", "::", "0"}  # noqa: S104  # named to be refused
    is_here = is_loopback(parts.hostname) or parts.hostname in everywhere
    if host in everywhere:
        return is_here or _is_of_this_machine(parts.hostname)
    return parts.hostname == host or (is_here and is_loopback(host))


def _is_of_this_machine(host: str) -> bool:
    """Whether an address is one of our own: what is sent there comes from there. Nothing is
    sent to find out; names are not resolved, which takes long and changes by the hour."""
    try:
        address = ipaddress.ip_address(host)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except (OSError, ValueError):
        return False


def url_problem(url: str) -> str | None:
    if not re.fullmatch(r"[!-~]+", url):
        return "is not a URL: spaces and characters beyond ASCII are to be escaped"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"`{url}` is not a URL: {error}"
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        return f"`{url}` is not a URL like http://10.0.0.7:8000"
    if parts.username is not None or parts.password is not None:
        return "a URL with a name or password in it would end up in logs; remove them"
    if parts.query or parts.fragment:
        return f"`{url}` ends in a query or fragment; only a path is possible"
    return None
