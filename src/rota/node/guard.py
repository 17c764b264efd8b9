"""Between rota and each engine: a small process that ends the whole engine, whatever ends rota.

Run as a program (`python -I -S guard.py`, its stdin a socket to rota) this is the *guard
server*. It is started once and kept ready; for every byte that arrives with a descriptor it
forks one *guard* that speaks JSON lines over that descriptor, so a start costs two forks and
no interpreter. Each guard runs one engine:

    rota → guard    {"argv", "stop_argv", "env", "cwd", "log", "log_bytes_max"}, once;
                    {"stop": grace_ms}
    guard → rota    failed {error, permanent} | started {pid, guard}, then output {text, dropped},
                    exit {code, signal, tail} as the engine's own process ends, and
                    gone {forced, left, stop_failed} when nothing of it is left

The end of that socket is the order to end everything, so no kind of death of rota (kill -9
included) needs a last word from it. An engine leads its own session and dies with its guard
(PR_SET_PDEATHSIG); every orphan below it falls to the guard (PR_SET_CHILD_SUBREAPER), those
that left the group included. "No children left" is therefore the same as "nothing is left".
If a guard is killed, what it had falls to the server, which kills whatever it did not start.

An engine is asked to end by SIGTERM, or by the command that it brings for that (`stop_argv`),
which is then a second child of the guard's, heard and bounded and killed like the first. It is
run once, and only while the engine's own process lives: later its pid, which the command may
name, can be another's. Should it fail, and for what the engine leaves behind, it is SIGTERM.

Refused: asyncio's child watcher in rota (dies with rota), cgroups (need rights that rota does
not have), a thread or a shell wrapper per engine (neither survives a kill -9 of rota).

Only the quickly loaded part of the standard library may be imported here (no pathlib); rota
itself imports `descendants`.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is slow to load
    from typing import Any

LOST_GRACE_S = 0.7  # rota is dead: nothing may be left two seconds later
LEFT_GRACE_S = 1.0  # the engine ended by itself: what it leaves behind gets this long
KILL_EVERY_S = 0.02  # between two rounds of SIGKILL, for what was forked during the first
KILL_WAIT_S = 10.0  # then the guard gives up on what even SIGKILL does not end (a stuck driver)
LAST_WORD_S = 10.0  # how long a guard waits for rota to take its last messages
TAIL_BYTES = 4096
UNSENT_BYTES_MAX = 256 * 1024  # beyond it output goes to the log file only, and is counted
READ_BYTES = 64 * 1024

# A wrong command stays wrong until someone changes it; the rest may pass (no memory, say).
PERMANENT = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.E2BIG}

DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """The guard server: forks guards for as long as rota holds the other end of stdin."""
    _become_guardian()
    wake = _wake_on_child()
    rota = socket.socket(fileno=os.dup(0))
    _stdin_from_null()
    guards: set[int] = set()
    asked = [rota, wake]
    while True:
        ready, _, _ = select.select(asked, [], [])
        if rota in ready:
            orders, fds, _, _ = socket.recv_fds(rota, 1, 1)
            for fd in fds:
                with contextlib.suppress(OSError):  # no process to be had: rota sees the end
                    guards.add(_fork_guard(fd))
                os.close(fd)
            if not orders:
                asked.remove(rota)  # rota is gone; the guards know it and are ending theirs
        if wake in ready or rota not in asked:
            _drain(wake)
            anyone_left = _reap_and_end_strays(guards)
            if rota not in asked and not anyone_left:
                return


def _fork_guard(fd: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # so that a kill of the server's group is not a kill of the guards
        os.dup2(fd, 3, inheritable=False)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        _become_guardian()
        Guard(socket.socket(fileno=3)).run()
    except BaseException:  # noqa: BLE001 - the engine dies with this process; rota is told by that
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _reap_and_end_strays(guards: set[int]) -> bool:
    """Whether any child is left. A child that is no guard is the orphan of a killed guard."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not pid:
            break
        guards.discard(pid)
    parents = _parents()
    for stray in [pid for pid, parent in parents.items() if parent == os.getpid()]:
        if stray not in guards:
            for pid in (stray, *_below(stray, parents)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
    return True


class Guard:
    """One engine, from its start until nothing of it is left."""

    def __init__(self, rota: socket.socket) -> None:
        self._rota: socket.socket | None = rota
        self._heard = b""
        self._unsent = b""
        self._dropped = 0
        self._tail = b""
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._leader = 0
        self._leader_ended = False
        self._stop_argv: list[str] = []  # none: SIGTERM is what ends it, or by now it is
        self._stopper: int | None = None  # that command's process; 0 = it has ended
        self._stop_failed = ""
        self._signalled = False
        self._forced = False
        self._deadline: float | None = None  # of the grace; None = nobody asked for the end
        self._give_up_at: float | None = None

    def run(self) -> None:
        """Start the engine, then serve its output, its end and rota's orders until it is gone."""
        assert self._rota is not None
        spec, rest = _read_line(self._rota)
        if spec:
            self._rota.setblocking(False)
            if self._start(json.loads(spec)):
                self._obey(rest)
                self._watch()
            self._say_the_last_word()

    def _start(self, spec: dict[str, Any]) -> bool:
        assert self._rota is not None
        self._wake = _wake_on_child()
        # The writing end stays open here too: what is run to end the engine gets it as well.
        self._output, self._child_output = os.pipe()
        os.set_blocking(self._output, False)
        self._poll = select.poll()
        for source in (self._wake, self._output, self._rota):
            self._poll.register(source, select.POLLIN)
        self._log = CappedLog(spec["log"], spec["log_bytes_max"])
        self._spec = spec
        try:
            self._leader = self._spawn(spec["argv"])
        except OSError as error:
            self._tell("failed", error=_say(error), permanent=error.errno in PERMANENT)
            return False
        self._stop_argv = spec["stop_argv"]
        self._tell("started", pid=self._leader, guard=os.getpid())
        return True

    def _spawn(self, argv: list[str]) -> int:
        return _spawn(argv, self._spec["env"], self._spec["cwd"], self._child_output)

    def _watch(self) -> None:
        while self._reap():
            self._end_what_is_due()
            if self._give_up_at is not None and time.monotonic() > self._give_up_at:
                break  # what is left falls to the server when this guard ends
            self._serve(self._patience_ms())
        self._read_output()
        left = descendants(os.getpid())
        self._tell("gone", forced=self._forced, left=left, stop_failed=self._stop_failed)

    def _serve(self, timeout_ms: int | None) -> None:
        for fd, _ in self._poll.poll(timeout_ms):
            if fd == self._wake.fileno():
                _drain(self._wake)
            elif fd == self._output:
                self._read_output(chunks_max=1)
            else:
                self._hear()
                self._send()

    def _reap(self) -> bool:
        """Take in every child that has ended. Returns whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self._stopper:
                self._stopper = 0
                self._judge_stopper(os.waitstatus_to_exitcode(status))
            if pid == self._leader:
                self._leader_ended = True
                self._stop_argv = []
                self._read_output()
                code = os.waitstatus_to_exitcode(status)
                self._tell(
                    "exit",
                    code=code if code >= 0 else None,
                    signal=-code if code < 0 else None,
                    tail=self._tail.decode("utf-8", "replace"),
                )
                self._end_what_it_left()

    def _ask_to_end(self, grace_s: float) -> None:
        """By its command or SIGTERM, and SIGCONT so that a stopped one hears it. Asked again,
        only a shorter grace counts: to many engines a second SIGTERM means at once."""
        deadline = time.monotonic() + grace_s
        if self._deadline is None or deadline < self._deadline:
            self._deadline = deadline
            if self._stop_argv and self._stopper is None:
                self._run_stopper()
            if not self._stop_argv:
                self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)

    def _run_stopper(self) -> None:
        pid = str(self._leader)
        try:
            self._stopper = self._spawn([word.replace("${PID}", pid) for word in self._stop_argv])
        except OSError as error:
            self._stop_failed = f"could not be run: {_say(error)}"
            self._stop_argv = []

    def _judge_stopper(self, code: int) -> None:
        """What ended well may have asked for an end that takes time; what failed has not."""
        if self._leader_ended:
            self._end_what_it_left()
        elif code and not self._forced:
            how = f"exited with code {code}" if code > 0 else f"was killed by signal {-code}"
            self._stop_failed = how
            self._stop_argv = []
            self._signal(signal.SIGTERM)

    def _end_what_it_left(self) -> None:
        """The engine's own process has ended: what was not asked so far has little time."""
        if not self._signalled and not self._stopper:
            self._ask_to_end(LEFT_GRACE_S)

    def _end_what_is_due(self) -> None:
        now = time.monotonic()
        if self._deadline is None or now < self._deadline:
            return
        self._deadline = now + KILL_EVERY_S
        self._give_up_at = self._give_up_at or now + KILL_WAIT_S
        self._forced = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group at once, then to each descendant that left it."""
        self._signalled |= number == signal.SIGTERM
        group = 0
        if not self._leader_ended:  # once it is reaped its number may be someone else's
            group = self._leader
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) != group:
                    os.kill(pid, number)

    def _patience_ms(self) -> int | None:
        if self._deadline is None:
            return None
        return max(0, int((self._deadline - time.monotonic()) * 1000) + 1)

    def _read_output(self, chunks_max: int = 64) -> None:
        """Take what the engine wrote: all to the log, the end to the tail, what fits to rota."""
        for _ in range(chunks_max):
            try:
                chunk = os.read(self._output, READ_BYTES)
            except BlockingIOError:
                return
            self._log.write(chunk)
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            if self._dropped or len(self._unsent) > UNSENT_BYTES_MAX:
                self._dropped += len(chunk)  # until all is sent, so that the order is kept
            else:
                self._tell("output", text=self._text.decode(chunk), dropped=0)

    def _hear(self) -> None:
        try:
            data = self._rota.recv(READ_BYTES) if self._rota else b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose_rota()
        else:
            self._obey(data)

    def _obey(self, data: bytes) -> None:
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            self._ask_to_end(json.loads(line)["stop"] / 1000)

    def _tell(self, kind: str, **facts: object) -> None:
        self._unsent += json.dumps({"kind": kind, **facts}).encode() + b"\n"
        self._send()

    def _send(self) -> None:
        if self._rota is None:
            self._unsent = b""
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[self._rota.send(self._unsent) :]
        except BlockingIOError:
            self._poll.modify(self._rota, select.POLLIN | select.POLLOUT)
        except OSError:
            self._lose_rota()
        else:
            self._poll.modify(self._rota, select.POLLIN)
            if self._dropped:
                self._catch_up()

    def _catch_up(self) -> None:
        """Rota listens again: tell it the end of what it missed."""
        late = self._tail[-self._dropped :]
        dropped, self._dropped = self._dropped - len(late), 0
        self._text.reset()
        self._tell("output", text=self._text.decode(late), dropped=dropped)

    def _lose_rota(self) -> None:
        if self._rota is not None:
            self._poll.unregister(self._rota)
            self._rota.close()
            self._rota = None
            self._unsent = b""
            if self._leader:
                self._ask_to_end(LOST_GRACE_S)

    def _say_the_last_word(self) -> None:
        if self._rota is not None:
            self._rota.settimeout(LAST_WORD_S)
            with contextlib.suppress(OSError):
                self._rota.sendall(self._unsent)


class CappedLog:
    """A file that is appended to and moves to `.1` when it would grow beyond `bytes_max`."""

    def __init__(self, path: str, bytes_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._fd = -1
        self._size = 0
        self._open()

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._size = os.fstat(self._fd).st_size

    def write(self, chunk: bytes) -> None:
        """Never raises: a full disk costs the log, not the engine."""
        with contextlib.suppress(OSError):
            if self._size + len(chunk) > self._bytes_max and self._size:
                os.close(self._fd)
                os.replace(self._path, self._path + ".1")  # noqa: PTH105
                self._open()
            self._size += os.write(self._fd, chunk)


def _spawn(argv: list[str], env: dict[str, str], cwd: str | None, output: int) -> int:
    """Fork and exec an engine, or the command that ends it. Returns its pid; raises OSError with
    what exec said."""
    guard = os.getpid()
    report_read, report_write = os.pipe()  # closes by itself when exec succeeds
    pid = os.fork()
    if not pid:
        try:
            _become_child(argv, env, cwd, output=output, report=report_write, guard=guard)
        except OSError as error:
            word = json.dumps([error.errno, error.strerror, error.filename or argv[0]])
            os.write(report_write, word.encode())
        except ValueError as error:  # a NUL in an argument
            os.write(report_write, json.dumps([errno.ENOEXEC, str(error), argv[0]]).encode())
        finally:
            os._exit(127)
    os.close(report_write)
    with os.fdopen(report_read, "rb") as report:
        word_read = report.read()
    if word_read:
        os.waitpid(pid, 0)
        raise OSError(*json.loads(word_read))
    return pid


def _become_child(
    argv: list[str], env: dict[str, str], cwd: str | None, *, output: int, report: int, guard: int
) -> None:
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(127)  # the guard died before the line above took hold
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, report)
    os.closerange(report + 1, os.sysconf("SC_OPEN_MAX"))
    for number in (*DEAF_TO, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if cwd is not None:
        os.chdir(cwd)
    try:
        os.execvpe(argv[0], argv, env)  # noqa: S606 - no shell is meant
    except OSError as error:  # its own file name is the last folder of PATH that was tried
        raise OSError(error.errno, error.strerror, argv[0]) from None


def _say(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)


def descendants(root: int) -> list[int]:
    """Every process below `root`, parents first; empty where there is no /proc."""
    return _below(root, _parents())


def _below(root: int, parents: dict[int, int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    ahead = [root]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def _parents() -> dict[int, int]:
    parents = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # noqa: PTH123
                    # The name stands in brackets and may hold anything, brackets too.
                    parents[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
    return parents


def _become_guardian() -> None:
    """Inherit orphans, and outlive the signals that a terminal or a service manager sends to
    all at once: the end of the socket is what ends a guard."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # Linux only; elsewhere as far as it goes
        _LIBC.prctl(option, value, 0, 0, 0)


_LIBC = ctypes.CDLL(None)


def _wake_on_child() -> socket.socket:
    """A socket that becomes readable when a child has ended."""
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
    return wake


def _drain(wake: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while wake.recv(4096):
            pass


def _stdin_from_null() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _read_line(rota: socket.socket) -> tuple[bytes, bytes]:
    """The first line and what came with it; b"" when rota went before it had sent one."""
    data = b""
    while b"\n" not in data:
        more = rota.recv(READ_BYTES)
        if not more:
            return b"", b""
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest


if __name__ == "__main__":
    main()
