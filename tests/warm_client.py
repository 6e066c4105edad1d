"""What a wrapper of :mod:`warm_python` runs: a server's child takes this process's place, as far as that goes.

It starts without ``site`` and imports next to nothing, so that a command costs 15 ms. The server's child gets all that
this process was given. Signals are passed on to it, and this process ends as it has ended.
"""

from __future__ import annotations

import _signal
import _socket
import marshal
import os
from typing import NoReturn

COLD = "COLD_PYTHON"  # a variable that asks for the real interpreter
LARGEST = 200  # descriptors; the kernel sends no more than 253 at once
NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")
# What the one end says to the other: a letter and a number.
COLD_START, PROCESS, STATUS = b"C", b"P", b"E"
# These are about this process itself, or say nothing to Python.
_KEPT = {"SIGKILL", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGCHLD", "SIGPIPE", "SIGXFSZ"}
_KEPT |= {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGSYS", "SIGTRAP"}


def main(python: str, server: str, words: list[str]) -> NoReturn:
    """Be ``python WORDS``: warm if the server at that path can do it, else the real interpreter."""
    descriptors = _inherited()
    connection = _connect(server) if _can_be_warm(descriptors) else None
    if connection is None:
        _be_cold(python, words)
    signals = Signals()
    _send(connection, signals, descriptors, words)
    while True:
        kind, number = _receive(connection)
        if kind == COLD_START:
            signals.restore()
            connection.close()
            _be_cold(python, words)
        elif kind == PROCESS:
            signals.pass_on_to(number)
            for descriptor in set(descriptors) - _ends_with_this_process():
                os.close(descriptor)  # or nobody would see that the child closes it
        elif kind == STATUS:
            _end(number)
        else:
            os._exit(70)  # the server is gone, and its children with it


def _can_be_warm(descriptors: list[int]) -> bool:
    try:
        os.getcwd()
    except OSError:
        return False  # the folder is gone
    return COLD not in os.environ and len(descriptors) <= LARGEST


def _inherited() -> list[int]:
    """What this interpreter has opened itself is not inheritable."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            pass  # that of the listing
    return found


def _ends_with_this_process() -> set[int]:
    """mpiexec takes the end of this one for the end of the process, and kills all."""
    return {int(os.environ.get("PMI_FD", "-1"))}


def _connect(server: str) -> _socket.socket | None:
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(server)
    except OSError:
        return None
    return connection


def _be_cold(python: str, words: list[str]) -> NoReturn:
    os.execv(python, [python, *words])


def _send(connection: _socket.socket, signals: Signals, descriptors: list[int], words: list[str]) -> None:
    umask = os.umask(0o22)
    os.umask(umask)
    request = {
        "words": [os.fsencode(word) for word in words],
        "cwd": os.fsencode(os.getcwd()),
        "environ": dict(os.environ._data),  # type: ignore[attr-defined]
        "umask": umask,
        "ignored": signals.ignored,
        "blocked": signals.blocked,
        "cores": list(os.sched_getaffinity(0)),
        "place": place(),
        "descriptors": descriptors,
    }
    data = marshal.dumps(request)
    numbers = b"".join(descriptor.to_bytes(4, "little") for descriptor in descriptors)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)] if descriptors else []
    connection.sendmsg([len(data).to_bytes(4, "little")], rights)
    connection.sendall(data)


def place() -> list[object]:
    """The server's child is in the server's namespaces, and the same user."""
    return [os.getuid(), os.getgid(), *(os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES)]


def _receive(connection: _socket.socket) -> tuple[bytes, int]:
    data = b""
    while len(data) < 5:
        try:
            part = connection.recv(5 - len(data))
        except OSError:
            part = b""
        if not part:
            return b"", 0
        data += part
    return data[:1], int.from_bytes(data[1:], "little")


class Signals:
    """Those that come are kept until there is a process to pass them on to."""

    def __init__(self) -> None:
        kept = {getattr(_signal, name) for name in _KEPT}
        self.ignored = [n for n in range(1, _signal.NSIG) if _signal.getsignal(n) == _signal.SIG_IGN]
        self.blocked = [int(n) for n in _signal.pthread_sigmask(_signal.SIG_BLOCK, [])]
        self._pending: list[int] = []
        self._process: int | None = None
        self._handled = [n for n in sorted(_signal.valid_signals() - kept) if n not in self.ignored]
        for number in self._handled:
            _signal.signal(number, self._pass_on)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, [])

    def pass_on_to(self, process: int) -> None:
        try:
            self._process = os.pidfd_open(process)
        except OSError:
            return  # it has ended already
        while self._pending:
            self._pass_on(self._pending.pop(0), None)

    def restore(self) -> None:
        """As this process has found them; what has come meanwhile comes again."""
        for number in self._handled:
            _signal.signal(number, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self.blocked)
        for number in self._pending:
            os.kill(os.getpid(), number)

    def _pass_on(self, number: int, _: object) -> None:
        if self._process is None:
            self._pending.append(number)
            return
        try:
            _signal.pidfd_send_signal(self._process, number)
        except OSError:
            pass  # it has ended


def _end(status: int) -> NoReturn:
    """As the child has."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(number, _signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.waitstatus_to_exitcode(status))
