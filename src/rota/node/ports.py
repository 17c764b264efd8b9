"""Ports on loopback: one that is free, and whose the listener on one is.

A free port is only a guess until our child has bound it, so the one that answers is looked up:
port → listening sockets' inodes (the kernel's socket diagnosis) → the process that has one
open. Where that cannot be told, the answer is "not foreign": then the engine is believed.

Refused: `/proc/net/tcp` as the first source (25 ms a read on a machine with a large connection
table, all of it added to a load), and passing a bound socket to the engine (no engine takes one).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass

from rota.node import processes
from rota.node.guard import descendants

# They stand in for engines that run in a container, beside and not below us.
CONTAINER_PROXIES = {"docker-proxy", "dockerd", "rootlessport", "pasta", "slirp4netns", "conmon"}

_LOOPBACK = bytes([127, 0, 0, 1])
_REACHED_BY_LOOPBACK = {
    _LOOPBACK,
    bytes(10) + b"\xff\xff" + _LOOPBACK,  # ::ffff:127.0.0.1
    bytes(4),  # any
    bytes(16),
}
_Listener = tuple[int, bytes]  # a socket's inode and its address
_TCP_LISTEN = 10


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that listens on a port."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


def free_port() -> int:
    """A port that was free a moment ago. Whoever binds it late may find it taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could bind `port` on loopback now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def holder_of(port: int, *, anywhere: bool = False) -> Holder | None:
    """Who listens on `port`, of loopback or of any address of this machine; None = nobody, or
    nobody whom we may look at."""
    return _find(listening(port, anywhere=anywhere), processes.all_pids())


def foreign_holder(port: int, guard_pid: int) -> Holder | None:
    """Who, other than the engine under `guard_pid`, listens on `port` of loopback.

    Returns None when it is ours and also when it cannot be told: not Linux, no permission, or
    a container's proxy.
    """
    inodes = listening(port)
    ours = {guard_pid, *descendants(guard_pid)}
    if _find(inodes, ours) is not None:
        return None  # looked for first: to look through everyone is slow on a large machine
    found = _find(inodes, processes.all_pids() - ours)
    return None if found is None or found.name in CONTAINER_PROXIES else found


def listening(port: int, *, anywhere: bool = False) -> set[int]:
    """The inodes of the sockets that listen on `port`: anywhere, or where 127.0.0.1 reaches
    them."""
    try:
        four, six = _diagnosed(socket.AF_INET, port), _diagnosed(socket.AF_INET6, port)
    except (OSError, AttributeError):  # a kernel without it, or no Linux
        four, six = _listed("tcp", port), _listed("tcp6", port)
    found = four | six
    return {inode for inode, address in found if anywhere or address in _REACHED_BY_LOOPBACK}


def _diagnosed(family: int, port: int) -> set[_Listener]:
    """Ask over netlink (sock_diag(7)). Raises OSError where the kernel cannot answer."""
    wanted = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN)
    wanted += struct.pack(">H", port) + bytes(46)
    request, dump, by_family = 0x1, 0x300, 20
    header = struct.pack("=IHHII", 16 + len(wanted), by_family, request | dump, 1, 0)
    found: set[_Listener] = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:
        kernel.settimeout(1.0)
        kernel.send(header + wanted)
        while True:
            answer = kernel.recv(65536)
            while answer:
                length, kind = struct.unpack_from("=IH", answer)
                if kind == 3:  # NLMSG_DONE
                    return found
                if kind != by_family:  # NLMSG_ERROR
                    raise OSError("no socket diagnosis")
                message, answer = answer[16:length], answer[(length + 3) & ~3 :]
                (at,) = struct.unpack_from(">H", message, 4)
                address = message[8:12] if family == socket.AF_INET else message[8:24]
                if at == port:
                    found.add((struct.unpack_from("=I", message, 68)[0], address))


def _listed(table: str, port: int) -> set[_Listener]:
    """Read /proc/net/tcp (proc_pid_net(5)): words of four bytes, each in the machine's order."""
    found: set[_Listener] = set()
    with contextlib.suppress(OSError):
        for line in (processes.PROC / "self/net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            words, _, at = fields[1].partition(":")
            raw = bytes.fromhex(words)
            address = b"".join(raw[n : n + 4][::-1] for n in range(0, len(raw), 4))
            if int(fields[3], 16) == _TCP_LISTEN and int(at, 16) == port:
                found.add((int(fields[9]), address))
    return found


def _find(inodes: set[int], among: set[int]) -> Holder | None:
    if not inodes:
        return None
    links = {f"socket:[{inode}]" for inode in inodes}
    for pid in among:
        with contextlib.suppress(OSError):
            for fd in (processes.PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(fd.readlink()) in links:
                        name = (processes.PROC / str(pid) / "comm").read_text().strip()
                        return Holder(pid, name)
    return None
