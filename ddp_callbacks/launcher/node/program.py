"""The program on a node: an event loop between the launcher and the ranks."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from ddp_callbacks.launcher.node.answers import Answers, Refusal, describe, hold_port
from ddp_callbacks.launcher.node.binding import cores_of_ranks, describe_cores
from ddp_callbacks.launcher.node.ending import GRACE, Ending
from ddp_callbacks.launcher.node.link import MOST, Link
from ddp_callbacks.launcher.node.processes import (
    Rank,
    StartRank,
    StartRanks,
    adopt_orphans,
    descendants,
    memory_file,
    start,
    start_rank,
)
from ddp_callbacks.launcher.node.reports import Asked, Beat, Done, Ended, Problem, Started, Wrote
from ddp_callbacks.launcher.node.stopped import Stopped

_GRACE_UNHEARD = 1.0  # seconds between SIGTERM and SIGKILL after the launcher's silence, which has already taken time
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # signals by which a scheduler asks the job to stop
_LOOK = 0.25  # seconds between two checks whether the launcher is silent
_KILLED = "ddprun kills this process, which was stopped for too long\n"
_NAMES = {number.value: number.name for number in signal.Signals}  # without most real-time signals
_READS = 16  # of what a rank has written; a terminal gives a page at a time, and the rank's orphans may still write
_TICK = 0.02  # seconds between two checks of the processes while the job ends or is asked to stop


def main() -> None:
    """Serve the launcher until it has ended the job, or is gone."""
    adopt_orphans()
    # A descriptor that receives the number of each signal, also when a child ends. (Older clusters' kernels lack
    # pidfd_open(2).)
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, *_REQUESTS):
        # The sender also ends the lifeline, or the launcher decides. The job would inherit SIG_IGN, but no handler.
        signal.signal(number, lambda *_: None)
    try:
        Node(read).serve()
    except Exception:  # an error of ours: nothing of the job may stay behind
        for pid in descendants():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        raise


class Node(Answers):
    """Runs the ranks of a node, and passes data between them and the launcher, which calls its public methods.

    Args:
        signals: A descriptor from which to read the numbers of received signals.
    """

    def __init__(self, signals: int) -> None:
        self._signals = signals
        self._link = Link()
        self._streams: dict[int, tuple[str, int]] = {}  # descriptor: name, rank
        self._ranks: dict[int, Rank] = {}  # by process id
        self._starts: dict[int, StartRank] = {}  # by rank
        self._ending = Ending(self._ranks.keys())
        self._stopped = Stopped()
        self._listener: socket.socket | None = None
        self._store: Popen[bytes] | None = None
        self._news = memory_file("news")  # what the launcher lets the ranks know, which they read
        self._input: int | None = None  # rank 0's standard input
        self._unread: bytes | None = b""  # data for it; None: no more will come
        self._leaves = False  # whether this program ends with the ranks
        self._halt: int | None = None  # the number of the question that waits until other ranks can be started

    def serve(self) -> None:
        self._hear()  # data that was read ahead with this program
        while not (self._leaves and self._ending.is_quiet()):
            self._wait()
            self._ending.look()
            self._reap()
            self._stopped.kill(self._ranks)
            if self._halt is not None and not self._leaves and self._ending.is_quiet():
                self._get_ready()
        self._end_store()
        for descriptor in list(self._streams):
            while self._pass_on(descriptor):
                pass
        self._link.tell(Done())
        while self._link.is_open and self._link.has_more:
            self._wait()

    # --- messages of the launcher -------------------------------------------------------------------------------------

    def hello(self, silence: float, grace: float | None) -> dict[str, Any]:
        """Describe this node. From now on, the job ends if the launcher is silent for ``silence`` seconds."""
        self._link.silence, self._ending.grace = silence, grace
        return describe()

    def listen(self, address: str, port: int) -> dict[str, Any]:
        """Hold a port for the store; 0 finds a free one."""
        self._listener = hold_port(address, port)
        own, held, *_ = self._listener.getsockname()
        return {"address": own, "port": held}

    def release(self) -> None:
        """Give up the port that :meth:`listen` holds."""
        if self._listener is not None:
            self._listener.close()

    def start(self, how: StartRanks) -> None:
        """Start these ranks, and on the first node the program that hosts their store on the port that is held."""
        how = StartRanks(*how)
        self._stopped.patience = how.patience
        set_here = {name: value for name, value in os.environ.items() if value or name not in how.defaults}
        found = how.defaults | set_here | how.environ
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (how.environ["PYTHONPATH"], os.environ.get("PYTHONPATH"))))
        try:
            self._start_store(how.store)
            self._ending.spared = descendants()
            cores, why = cores_of_ranks(how.bind, len(how.ranks), found.get("CUDA_VISIBLE_DEVICES"))
            bound = describe_cores(cores, why) if how.bind != "none" else ""
            for local_rank, rank in enumerate(how.ranks):
                own = found | {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(rank)}
                self._starts[rank] = StartRank(how, rank, own, cores[local_rank])
                self._start_rank(rank, DEVNULL if rank else self._open_input(how.stdin))
        except OSError as error:
            remedy = ". Name a program in PATH, or by its path (./run.sh); a script must begin with #!"
            is_wrong = error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
            self._link.tell(Problem(f"cannot start {how.argv[0]}: {error.strerror}{remedy if is_wrong else ''}"))
        if ranks := [rank.number for rank in self._ranks.values()]:  # without a problem, all
            restarts, threads = int(found["TORCHELASTIC_RESTART_COUNT"]), found["OMP_NUM_THREADS"]
            self._link.tell(Started(ranks, restarts, threads, found.get("GLOO_SOCKET_IFNAME", ""), bound))
        self._ending.stop_again()

    def replace(self, rank: int, environ: dict[str, str]) -> None:
        """Start a new process for a rank whose process has ended, as that one, with these variables and no input."""
        self._starts[rank].environ.update(environ)
        try:
            self._start_rank(rank, DEVNULL)
        except OSError as error:
            self._link.tell(Wrote(rank, "e", f"cannot start a new process: {error.strerror}\n"))
            self._link.tell(Ended(rank, 1, None, time.monotonic()))

    def input(self, data: str) -> None:
        """Pass ``data`` to rank 0's standard input once the rank has room; empty ``data`` closes it."""
        if data and self._unread is not None:
            self._unread += os.fsencode(data)
        else:
            self._unread = None
            self._close_input()

    def resize(self, size: tuple[int, int]) -> None:
        """Change the size of the terminals, in lines and columns."""
        for descriptor in filter(os.isatty, self._streams):
            termios.tcsetwinsize(descriptor, size)

    def news(self, news: dict[str, Any]) -> None:
        """Let the ranks know something."""
        os.write(self._news, f"{json.dumps(news)}\n".encode())

    def halt(self, seconds: float) -> None:
        """End the ranks. The answer comes once they have ended, and others can be started."""
        self._halt = self._question
        self._ending.end(seconds)

    def beat(self) -> None:
        """Answer a heartbeat."""
        self._link.tell(Beat())

    def stacks(self) -> None:
        """Ask the ranks to write the stacks of their threads."""
        self._ending.write_stacks()

    def ask(self, number: int) -> None:
        """Ask each rank to stop once it handles the signal; the launcher may start the ranks again."""
        self._ending.ask(signal.Signals(number))

    def stop(self, number: int) -> None:
        """Ask the ranks to stop, and end everything when their time is over."""
        self._ending.stop(signal.Signals(number))

    def end(self, seconds: float) -> None:
        """End the job: SIGTERM, and SIGKILL after ``seconds``."""
        self._leave()
        self._ending.end(seconds)

    def _leave(self) -> None:
        """End with the ranks, and end what ``--setup`` has left."""
        self._leaves = True
        self._ending.spared &= {self._store.pid if self._store else 0}

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start_store(self, words: list[str]) -> None:
        if not words or self._listener is None:
            return
        (address, port, *_), descriptor = self._listener.getsockname(), self._listener.fileno()
        words = [*words, address, str(port), str(descriptor)]
        self._store = start(
            words, ignored=_REQUESTS, pass_fds=(descriptor,), stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
        )

    def _open_input(self, inherited: int | None) -> int:
        """Return what rank 0 reads as its standard input."""
        if inherited is not None:
            return os.dup(inherited)
        if self._unread is None:
            return DEVNULL
        taken, self._input = os.pipe()
        os.set_blocking(self._input, False)
        return taken

    def _start_rank(self, rank: int, taken: int) -> None:
        """Start a process for a rank, with ``taken`` as its standard input."""
        started, streams = start_rank(self._starts[rank], taken, self._news)
        self._ranks[started.process.pid] = started
        self._streams |= {descriptor: (stream, rank) for descriptor, stream in streams.items()}

    def _reap(self) -> None:
        """Collect ended children, including orphans of the job; report the end of a rank after its output."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._stopped.note(pid, status):
                continue
            if pid in self._ranks:
                self._report_end(self._ranks.pop(pid), os.waitstatus_to_exitcode(status))
            elif self._store is not None and pid == self._store.pid:
                self._report_end_of_store(os.waitstatus_to_exitcode(status))

    def _report_end(self, rank: Rank, code: int) -> None:
        for descriptor in rank.pipes:
            os.close(descriptor)
        for descriptor in [each for each, (_, number) in self._streams.items() if number == rank.number]:
            for _ in range(_READS):
                if not self._pass_on(descriptor):
                    break
        name = _NAMES.get(-code, f"signal {-code}") if code < 0 else None
        code = code if code >= 0 else 128 - code
        stopped = self._stopped.killed.pop(rank.process.pid, 0.0)
        if stopped:
            self._link.tell(Wrote(rank.number, "e", _KILLED))
        self._link.tell(Ended(rank.number, code, name, time.monotonic(), stopped))

    def _report_end_of_store(self, code: int) -> None:
        assert self._store is not None and self._store.stderr is not None
        said = self._store.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        self._store = None
        if not self._ending.has_begun and self._ranks:
            text = f"the process that hosts the ranks' store ended with exit code {code}: {said}"
            self._link.tell(Problem(text))

    def _end_store(self) -> None:
        if self._store is not None:
            self._store.kill()
            self._store.wait()
            self._store = None
        self.release()

    def _get_ready(self) -> None:
        """Forget the ended ranks, and tell the launcher that others can be started."""
        self._end_store()
        os.close(self._news)
        self._news = memory_file("news")
        self._ending.reset()
        self._close_input()
        self._link.answer(self._halt, {})
        self._halt = None

    # --- the event loop -----------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for events and handle them; end the job if the launcher is gone or silent."""
        poll = select.poll()
        ready = self._what_may_come()
        for descriptor in ready:
            poll.register(descriptor, select.POLLOUT if descriptor in (1, self._input) else select.POLLIN)
        came = [descriptor for descriptor, _ in poll.poll((_TICK if self._ending.is_busy else _LOOK) * 1000)]
        if 0 not in came and self._link.is_silent:
            self._link.close()
            self._lose_launcher(_GRACE_UNHEARD)
        for descriptor in came:
            ready[descriptor]()
        if not self._link.is_open:
            self._lose_launcher(GRACE)

    def _what_may_come(self) -> dict[int, Callable[[], Any]]:
        """Return the handler of each descriptor to wait for."""
        ready: dict[int, Callable[[], Any]] = {self._signals: self._hear_signals}
        if self._link.is_open:
            ready[0] = self._hear
            if self._link.has_more:
                ready[1] = self._link.write
        if self._input is not None and self._unread:
            ready[self._input] = self._feed
        if not self._link.is_full:
            ready |= {descriptor: partial(self._pass_on, descriptor) for descriptor in self._streams}
        return ready

    def _hear_signals(self) -> None:
        """Tell the launcher about requests to stop. SIGCHLD needs nothing: the loop always checks the children."""
        came = os.read(self._signals, MOST)
        for number in _REQUESTS:
            if number in came:
                self._link.tell(Asked(number.name))

    def _hear(self) -> None:
        for call, question, values, named in self._link.messages():
            self._question = question
            try:
                # The launcher sends the names of these methods, no others.
                answer = getattr(self, call)(*values, **named)
            except (Refusal, OSError) as error:
                answer = {"problem": str(error)}
            if answer is not None:
                self._link.answer(self._question, answer)

    def _lose_launcher(self, grace: float) -> None:
        self._leave()
        if self._ending.grace is None:
            self._ending.end(grace)
        else:
            self._ending.stop(signal.SIGTERM)

    def _feed(self) -> None:
        """Write to rank 0's standard input."""
        assert self._input is not None and self._unread is not None
        try:
            self._unread = self._unread[os.write(self._input, self._unread) :]
        except OSError:  # the rank has closed it
            self._close_input()

    def _close_input(self) -> None:
        if self._input is not None:
            os.close(self._input)
            self._input = None

    def _pass_on(self, descriptor: int) -> bool:
        """Pass on available output; return whether there was any."""
        stream, rank = self._streams[descriptor]
        try:
            data = os.read(descriptor, MOST)
        except BlockingIOError:
            return False
        except OSError:  # the end of a terminal
            data = b""
        if data:
            self._link.tell(Wrote(rank, stream, os.fsdecode(data)))
        else:
            os.close(descriptor)
            del self._streams[descriptor]
        return bool(data)
