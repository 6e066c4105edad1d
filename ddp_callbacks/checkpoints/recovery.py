"""Continue a run without processes that died: the others go back to a copy in memory, and resume from it.

Every rank keeps the whole copy, as a file of :class:`.file.CheckpointFile` would have it, so any of them can give it to
the others. The run is entered again, as by a program that starts again with a file.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from ddp_callbacks.checkpoints.disk import load_whole
from ddp_callbacks.checkpoints.format import Saved, Shared, make_file, pack_own
from ddp_callbacks.checkpoints.resume import Content, Interval, ResumableRun, ResumeOptions
from ddp_callbacks.checkpoints.transfer import broadcast_file
from ddp_callbacks.cluster.environment import KEEP_GOING
from ddp_callbacks.comm.collectives import all_gather_object, any_rank
from ddp_callbacks.data.attributes import decode, encode
from ddp_callbacks.data.global_state import get_global_state, set_global_state
from ddp_callbacks.errors import PeerError, say
from ddp_callbacks.process_group import get_rank
from ddp_callbacks.process_group.survivors import (
    MembersChanged,
    form_anew,
    have_members_changed,
    is_call_of_new_processes,
    note_call,
    note_end_of_call,
)

_COPY = "the copy of the run in memory"
_SECONDS = 1.0  # between two copies
_SHARE = 20  # of the time, one in so many seconds may be spent on copies

Result = TypeVar("Result")
TakeContent = Callable[[], AbstractContextManager[Content]]


def is_wanted() -> bool:
    """Whether the launcher lets the job continue without processes that died."""
    return bool(os.environ.get(KEEP_GOING))


class Host(Protocol):
    """What a Trial or a Trainer does when processes have died. Its methods are local."""

    def begin_again(self) -> None:
        """Forget the call that has failed."""

    def follow(self) -> None:
        """Take this process's place in the new group."""


class Recovery:
    """Lets the calls of one Trial or Trainer continue without processes that died. Every rank has one.

    Attributes:
        is_inside: Whether a call is running, of this object or of another one.
        copy: The copy of the current call that this rank has; ``None``: it has none.
    """

    is_inside: ClassVar[bool] = False

    def __init__(self) -> None:
        self.copy: io.BytesIO | None = None
        self._number = 0  # of the copies that this call has made
        self._at_start: dict[str, dict[str, Any]] = {}

    def call(self, method: Callable[[], Result], host: Host) -> Result:
        """Call a method of the host, and again on the ranks that are left, if others have died meanwhile.

        Returns once all ranks have come to the end of the method.
        """
        if Recovery.is_inside:
            return method()
        random_state = get_global_state()
        Recovery.is_inside = True
        note_call()
        try:
            while True:
                try:
                    result = method()
                    note_end_of_call()
                    any_rank(False, "the end of a call")
                    return result
                except PeerError as error:
                    if form_anew(error):
                        self._forget()
                        host.follow()
                        return result
                    host.begin_again()
                    host.follow()
                    set_global_state(random_state)
        finally:
            self._forget()
            Recovery.is_inside = False

    def _forget(self) -> None:
        self.copy, self._number, self._at_start = None, 0, {}

    def at_start(self, attributes: Mapping[str, Mapping[str, Any]], device: torch.device | str) -> dict[str, Any]:
        """Return the attributes of objects as they were when this call first noted them, if it has. Local.

        A copy has only those that the run had changed by then.

        Args:
            attributes: Plain attributes, by the object's name and their own.
            device: For tensors that were not on the CPU.
        """
        known = {name: decode(self._at_start[name], device) for name in attributes if name in self._at_start}
        self._at_start = {name: encode(values) for name, values in attributes.items()} | self._at_start
        return known

    def read(self) -> Saved | None:
        """Return the newest copy of this call that a rank has; ``None`` if none has any. A collective."""
        numbers = all_gather_object(self._number, _COPY)
        newest = max(numbers)
        if not newest:
            return None
        source = numbers.index(newest)
        file = broadcast_file(self.copy if get_rank() == source else None, _COPY, source=source)
        self.copy, self._number = file, newest
        return Saved(load_whole(file, _COPY, weights_only=False), weights_only=False)

    def write(self, shared: Shared, own: Mapping[str, Any], about: Mapping[str, str]) -> None:
        """Make a new copy on every rank. A collective. The arguments are those of ``CheckpointFile.write``.

        Raises:
            MembersChanged: On every rank: the launcher has new members, which continue from this copy, too.
        """
        mine = pack_own(own), get_rank() == 0 and have_members_changed()  # others may hear of it a little later
        ranks, changed = zip(*all_gather_object(mine, _COPY), strict=True)
        self.copy, self._number = make_file(shared, ranks, about), self._number + 1
        if any(changed):
            raise MembersChanged("the launcher has other members")


class Savers:
    """What saves one run: copies in memory, a file, or both. Each method is a collective.

    Args:
        recovery: Keeps the copies; ``None``: there are none.
        options: Those of the file; ``None``: there is none.

    Attributes:
        path: The name of what the run continues from, for messages.
    """

    def __init__(self, recovery: Recovery | None, options: ResumeOptions | None) -> None:
        self._recovery = recovery
        self._file = None if options is None else ResumableRun(options)
        self._interval = Interval(timedelta(seconds=_SECONDS))  # between two copies
        self.path = _COPY if self._file is None else self._file.file.path

    def opened(self) -> AbstractContextManager[None]:
        """Keep other jobs from writing the file, and listen for requests to stop, inside."""
        return contextlib.nullcontext() if self._file is None else self._file.opened()

    def read(self) -> Saved | None:
        """Return what the run continues from; ``None`` if it begins at its start."""
        saved = None if self._recovery is None else self._recovery.read()
        if saved is not None:
            self.path = _COPY
        elif self._file is not None:
            saved = self._file.file.read()
        if saved is None and is_call_of_new_processes() and get_rank() == 0:
            say("all processes that knew the state of the run are lost: it begins again", logging.WARNING)
        return saved

    def save_at_begin(self, take: TakeContent) -> None:
        """Make the first copy of a run that begins at its start. Without a file, it begins there again."""
        if self._recovery is not None:
            self._copy(self._recovery, take)

    def save_if_due(self, take: TakeContent, accumulates: bool = False, **is_at: bool) -> None:
        """Save if it is due. Raise ``Preempted`` if the ranks are asked to stop.

        Args:
            accumulates: Whether gradients wait for those of the next batch. Copies lack them: a part of them is lost
                with a process.
            is_at: See :meth:`.resume.ResumableRun.save_if_due`.
        """
        if self._recovery is not None and not accumulates and self._interval.is_due(False, False):
            self._copy(self._recovery, take)
        if self._file is not None:
            self._file.save_if_due(take, **is_at)

    def stop_in_validation(self) -> None:
        """Raise ``Preempted`` if the ranks are asked to stop. No copy is due: a validation is repeated as a whole."""
        if self._file is not None:
            self._file.stop_in_validation()

    def _copy(self, recovery: Recovery, take: TakeContent) -> None:
        begin = time.monotonic()
        with take() as content:
            recovery.write(*content)
        seconds = max(_SECONDS, _SHARE * (time.monotonic() - begin))
        self._interval = Interval(timedelta(seconds=seconds))
