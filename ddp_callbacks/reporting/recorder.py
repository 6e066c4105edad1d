"""Count where the time of a rank goes, and send the totals to ``ddprun`` now and then.

Whatever a rank does between two marks counts as the part that the second one names, except its waits. A mark costs a
microsecond, and a message, of one line of JSON, 50: one each second at first, later one in five seconds. A thread sends
them, also while the rank hangs. A new number goes into ``_totals``, and where it is shown: in :mod:`.status`,
:mod:`.page` or :mod:`.summary`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from operator import itemgetter
from typing import Any, TypeVar

from ddp_callbacks.cluster.environment import NO_REPORT, REPORT, TRACE
from ddp_callbacks.reporting.progress import Progress
from ddp_callbacks.reporting.stopwatch import Stopwatch
from ddp_callbacks.reporting.trace import Tracer

T = TypeVar("T")
FORWARD, BACKWARD, LOADING, WAITING, BETWEEN, VALIDATION = PARTS = (
    *("in forward", "in backward", "loading", "waiting", "between steps", "validation"),
)
"""Between steps: the optimizer, callbacks, logging, checkpoints. Waiting: for sums, and so for the other ranks, too; by
the part in which it is, waits for the gradients are those of waiting. A process alone counts forward, backward and the
optimizer as forward."""

_NEXT = {FORWARD: BACKWARD, BACKWARD: WAITING, WAITING: BETWEEN}
"""The part that comes after another; forward, if it is none of these."""

_OFTEN, _RARELY, _FIRST = 1.0, 5.0, 60.0  # seconds between two messages at first, and later; how long "at first" is
_AT_LEAST = 20  # steps whose shortest wait counts as what the sums take in any case
_MOST = 4096  # bytes that a pipe takes whole or not at all
_PACKAGES = ("torch", "lightning", "pytorch_lightning", "torchbearer", "ddp_callbacks")


class Recorder:
    """The time of this process by part, since this was made.

    Args:
        path: The file to which the totals go, a pipe.

    Attributes:
        progress: Where the rank is.
        is_loading: Whether it is in a loader, which may draw from another one.
    """

    def __init__(self, path: str) -> None:
        self._begin, self._watch = time.perf_counter(), Stopwatch()
        self._has_begun = self.is_loading = self._is_cut = False  # by an exception
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._waits, self._marked = dict.fromkeys(PARTS, 0.0), ""  # the last part that was marked
        self._has_validated = False  # since the last step
        self._starting = 0.0  # of loading, until a pass has its first batch
        self.compared = 0.0  # of what lies between steps, to compare a batch with one process
        self._longest, self._spent = (0, 0.0), 0.0  # step, and seconds of its own; the latter by now
        self._validated = 0, 0, 0.0  # whole validations, the steps until the last one, and seconds of all
        self._pid, self._file = os.getpid(), os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.progress = Progress()
        self._nbytes = self._sums = 0  # of the gradients; synchronizations
        self._launched = self._exchange = 0.0  # when the first sum of a backward began; seconds from there to the end
        self._shortest = _Shortest()
        self._about: dict[str, Any] = {}
        self._sending = threading.Lock()
        steps = int(os.environ.get(TRACE) or 0)
        self._tracer = Tracer(steps)
        if steps:
            Stopwatch.listeners.append(functools.partial(self._tracer.add, WAITING))

    @property
    def is_alone(self) -> bool:
        """Whether there is one process, or one is left: nobody marks what precedes a step."""
        return os.environ.get("WORLD_SIZE") == "1"

    def describe(self, module: Any, settings: Mapping[str, object]) -> None:
        """Note the module that is trained, and how its gradients are synchronized."""
        self._nbytes = sum(each.numel() * each.element_size() for each in module.parameters() if each.requires_grad)
        self._about = {"settings": {name: str(value) for name, value in settings.items()}, **_place()}

    def mark(self, part: str) -> None:
        """Count the time since the last mark as that of ``part``. Never blocks."""
        begin, now, waited = self._watch.lap()
        if self._has_begun:  # before lies what prepares training
            self._add(part, now - begin, waited, self._seconds, self._waits)
            self._tracer.add(part, begin, now)
        self._has_begun, self._marked = True, part
        if part == WAITING and self._launched:
            self._exchange += now - self._launched
            self._launched, self._sums = 0.0, self._sums + 1

    def _add(self, part: str, spent: float, waited: float, seconds: dict[str, float], waits: dict[str, float]) -> None:
        """Add the seconds of a lap, of which a rank has waited some; for gradients, all of them.

        Before the first step after a validation, it waits for the ranks that still validate.
        """
        waited = spent if part == WAITING else waited
        seconds[part] += spent - waited
        seconds[WAITING] += waited
        waits[VALIDATION if self._has_validated else part] += waited

    def _part_now(self) -> str:
        """Return the part that has not ended yet."""
        if self.progress.validates or self.is_loading:
            return VALIDATION if self.progress.validates else LOADING
        return _NEXT.get(self._marked, FORWARD)

    def launch(self, bucket: int = 0) -> None:
        """Note that a sum over the ranks begins."""
        now = time.perf_counter()
        self._launched = self._launched or now
        self._tracer.begin_sum(bucket, now)

    def finish(self, bucket: int) -> None:
        """Note that this rank has waited for it."""
        self._tracer.end_sum(bucket, time.perf_counter())

    def step(self) -> None:
        """Note that an optimizer has stepped. Of several that step with one batch, the first counts."""
        if self.is_alone or self._marked == LOADING:  # no engine sums gradients
            self.mark(FORWARD)
        if self.progress.step():
            self._has_validated = False
            self._shortest.end_step(self._waits.values(), self._sums)
            self._note_longest()
            for said in self._tracer.end_step(self.progress.steps):
                self._write(said)

    def _note_longest(self) -> None:
        apart = self._seconds[WAITING] + self._seconds[VALIDATION] + self.compared
        spent = sum(self._seconds.values()) - apart
        self._longest = max(self._longest, (self.progress.steps, spent - self._spent), key=itemgetter(1))
        self._spent = spent

    def begin_loading(self, batches: object, training: bool) -> None:
        """Note that this rank asks the iterator ``batches`` for its next batch; nothing, before a training or after."""
        if not training and not self._has_begun:
            return
        self._mark_rest()
        self.is_loading, self._has_validated = True, self._has_validated or not training
        self.progress.begin_loading(batches, training)
        if training:
            self._note_validations()

    def end_loading(self, has_batch: bool, samples: int = 0) -> None:
        """Note that it has the batch, or that there is none; with the samples of all ranks in it, if known."""
        if self.is_loading:
            before = self._seconds[LOADING]
            self.mark(self._part_now())
            self.is_loading = False
            self._starting += self.progress.is_first * (self._seconds[LOADING] - before)
            self.progress.end_loading(has_batch, samples)

    def end_validation(self) -> None:
        """Note that no batch of this validation follows."""
        if self.progress.validates:
            self.mark(VALIDATION)
            self.progress.validates = False

    def end(self) -> None:
        """Count what has followed the last step, such as a checkpoint, and send it: a training is over."""
        self._is_cut = sys.exc_info()[0] is not None or hasattr(sys, "last_value")
        if self._has_begun:
            self.mark(self._part_now()) if self._is_cut else self._mark_rest()
        if not self._is_cut:
            self._note_validations()
        self._has_begun = self.is_loading = self.progress.validates = False
        self._shortest.count()
        self.send()

    def _note_validations(self) -> None:
        if self.progress.steps and self.progress.validations > self._validated[0]:
            spent = self._seconds[VALIDATION] + self._waits[VALIDATION]
            self._validated = self.progress.validations, self.progress.steps, spent

    def _mark_rest(self) -> None:
        """Mark the end of what has followed a step or a validation. Gradients are accumulated without a step."""
        accumulates = self.is_alone and self.progress.has_batch
        self.mark(VALIDATION if self.progress.validates else FORWARD if accumulates else BETWEEN)

    def keep_sending(self) -> None:
        """Send the totals now and then."""
        while True:
            time.sleep(_OFTEN if time.perf_counter() - self._begin < _FIRST else _RARELY)
            self.send()

    def send(self) -> None:
        """Send the totals, unless the pipe is full."""
        if os.getpid() != self._pid or not (self._has_begun or any(self._seconds.values())):
            return  # a forked child, or a script that does not train
        with self._sending:  # the last message is the newest
            self._write(self._totals())

    def _totals(self) -> dict[str, Any]:
        self._about = self._about or _place()
        seconds, waits = self._seconds.copy(), self._waits.copy()
        if self._has_begun:  # what has not ended: a rank may hang
            self._add(self._part_now(), *self._watch.running(), seconds, waits)
        spent = *seconds.values(), *waits.values(), *self._shortest.of(waits.values())
        return {
            "seconds": [round(each, 4) for each in spent],
            "steps": self.progress.steps,
            "epoch": max(self.progress.epoch, 0),
            "validation": self.progress.validations,
            "held_out": self.progress.held_out,
            "stage": "validating" if self.progress.validates else "training" * (self._has_begun or self._is_cut),
            "gradients": [self._nbytes, self._sums, round(self._exchange, 4)],
            "starting": round(self._starting, 4),
            "longest": [self._longest[0], round(self._longest[1], 4)],
            "validated": self._validated,
            "compared": round(self.compared, 4),
            "loads_all": self.progress.loads_all,
            "batch": self.progress.samples,
            "memory": _memory(),
            "process": self._pid,
            "about": self._about,
        }

    def _write(self, said: Mapping[str, Any]) -> None:
        line = json.dumps(said).encode() + b"\n"
        if len(line) <= _MOST:
            with suppress(OSError):  # nobody reads
                os.write(self._file, line)


class _Shortest:
    """Tells how long a rank waits in any case, also where the ranks wait for each other by turns.

    A rank that comes last waits for nobody. So of each 20 steps, the shortest wait in a part counts for all of them.
    """

    def __init__(self) -> None:
        self._steps: list[list[float]] = []  # seconds of waits, by part
        self._waited, self._sums = [0.0] * len(PARTS), 0  # when the last step ended
        self._least, self._is_known = [0.0] * len(PARTS), False

    def end_step(self, waits: Iterable[float], sums: int) -> None:
        """Note the seconds of all waits until now, by part, and the number of synchronizations."""
        waited = [*waits]
        if sums > self._sums:
            self._steps.append([now - before for now, before in zip(waited, self._waited, strict=True)])
        self._waited, self._sums = waited, sums
        if len(self._steps) == _AT_LEAST:
            self.count()

    def count(self) -> None:
        """Count the steps since the last ones that were counted."""
        for part, own in enumerate(zip(*self._steps, strict=True)):
            self._least[part] += len(self._steps) * min(own)
        self._is_known, self._steps = self._is_known or bool(self._steps), []

    def of(self, waits: Iterable[float]) -> list[float]:
        """Return the seconds that the rank has waited in any case; all, until it is known. They never get fewer."""
        return self._least.copy() if self._is_known else [*waits]


@functools.cache
def recorder() -> Recorder | None:
    """Return the recorder of this process; ``None`` unless it is one of ``ddprun``, which reports on its job."""
    path = os.environ.pop(REPORT, "")  # a child process is no rank
    if not path or os.environ.get(NO_REPORT) == "1":
        return None
    try:
        made = Recorder(path)
    except OSError:  # this process belongs to another user
        return None
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(lambda *_: made.step())
    import_module("ddp_callbacks._torch").surround_loading(timed_loading)
    atexit.register(made.end)
    threading.Thread(target=made.keep_sending, name="ddp_callbacks report", daemon=True).start()
    return made


def end_training() -> None:
    """Note that a training is over, see :meth:`Recorder.end`."""
    if (own := recorder()) is not None:
        own.end()


def end_validation() -> None:
    """Note that a validation is over, see :meth:`Recorder.end_validation`."""
    if (own := recorder()) is not None:
        own.end_validation()


def timed_loading(draw: Callable[[Any], T]) -> Callable[[Any], T]:
    """Count the time of an iterator's ``__next__`` as loading; without gradients, as that of a validation."""

    @functools.wraps(draw)
    def timed(batches: Any) -> T:
        own = recorder()
        if own is None or own.is_loading or threading.current_thread() is not threading.main_thread():
            return draw(batches)
        own.begin_loading(batches, sys.modules["torch"].is_grad_enabled())
        has_batch = False
        try:
            batch = draw(batches)
            has_batch = True
            return batch
        finally:
            own.end_loading(has_batch, getattr(batches, "samples", None) or 0)

    return timed


def _memory() -> list[int]:
    """Return the largest use of memory so far, in MB: this process's, and that of its GPU if it uses one."""
    own = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024]
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return own if cuda is None or not cuda.is_initialized() else [*own, cuda.max_memory_allocated() >> 20]


def _place() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    there = {name: str(each) for name, each in versions.items() if each}
    return {
        "versions": {"Python": platform.python_version(), **there},
        "device": _device(torch),
        "threads": torch.get_num_threads() if torch else 0,
    }


def _device(torch: Any) -> str:
    if torch is not None and torch.cuda.is_initialized():
        return str(torch.cuda.get_device_name())
    with suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "CPU")
    return "CPU"
