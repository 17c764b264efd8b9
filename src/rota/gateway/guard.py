"""Who may use what only this machine may use, and which pages may use anything.

What decides is the peer address of the socket itself, never a forwarded header, which anyone
can write. A page in a browser on this machine is on this machine too, so `Host` must be a name
of ours (a rebound DNS name is not) and `Origin`, or what the browser says of the fetch's site,
must be ours.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from rota.errors import RequestError

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


def check_admin(connection: HTTPConnection, listen_host: str) -> None:
    """Raises: RequestError: 403, saying what would be accepted."""
    peer = connection.client.host if connection.client else ""
    if not is_loopback(peer):
        raise _forbidden(f"this surface answers the machine it runs on only, not {peer!r}")
    hosts = connection.headers.getlist("host")
    name = _host_name(hosts[0]) if len(hosts) == 1 else None
    if name is None or not _is_ours(name, listen_host):
        raise _forbidden(
            "the Host header must be localhost, a loopback address or the address rota listens "
            f"on, not {', '.join(hosts)!r}"
        )
    origin = connection.headers.get("origin")
    if origin is not None and origin != f"{connection.url.scheme}://{hosts[0]}":
        raise _forbidden(f"the Origin header must be rota's own, not {origin!r}")
    site = connection.headers.get("sec-fetch-site", "none")
    if site not in ("same-origin", "none"):
        raise _forbidden(f"a page of another site asked ({site}); open rota's own address")


def check_page(connection: HTTPConnection, listen_host: str) -> None:
    """Turn away the pages of strangers. A browser lets any page open a web socket to any host
    and read all that it says, this machine included; whoever is no page sends no `Origin`.

    Raises: RequestError: 403, saying what would be accepted.
    """
    origin = connection.headers.get("origin")
    if origin is None:
        return
    try:
        name = urlsplit(origin).hostname or ""
    except ValueError:
        name = ""
    if not _is_ours(name, listen_host):
        raise _forbidden(
            "a web socket may be opened by a page of localhost, of a loopback address or of the "
            f"address rota listens on, not of {origin!r}"
        )


def is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)  # ::ffff:127.0.0.1, on a socket for both
    return bool((mapped or parsed).is_loopback)


def _is_ours(name: str, listen_host: str) -> bool:
    return is_loopback(name) or name in ("localhost", listen_host.lower())


def _host_name(host: str) -> str | None:
    """The name or address in a Host header; None for what is no such header."""
    match = _HOST.fullmatch(host)
    return match["name"].strip("[]").lower() if match else None


def _forbidden(message: str) -> RequestError:
    return RequestError(message, code="forbidden", status=403)
