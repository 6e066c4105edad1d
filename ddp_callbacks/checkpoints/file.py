"""The file that all ranks of a run write and read together."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.checkpoints import disk
from ddp_callbacks.checkpoints.claim import Claim
from ddp_callbacks.checkpoints.format import Saved, Shared, make_file, pack_own
from ddp_callbacks.checkpoints.transfer import broadcast_file, on_rank_zero
from ddp_callbacks.comm.collectives import broadcast_object, gather_bytes
from ddp_callbacks.errors import CheckpointError, ConfigurationError, Preempted, say
from ddp_callbacks.process_group import get_world_size
from ddp_callbacks.process_group.presence import OWN_THREADS

_READ = "the reading of the checkpoint"
_OWN = "the ranks' states for the checkpoint"
_WRITE = "the writing of the checkpoint"
_CLOSE = "the end of the checkpoint's writing"


class CheckpointFile:
    """A checkpoint at a path, and the one before it. Rank 0 writes and reads; only it needs to see the files.

    Every rank makes one and calls its methods at the same moments; each blocks until all ranks have called it. A
    failure on one rank raises on all. It works with a single process, and without a process group. A context manager:
    ``with`` opens and closes it.

    Args:
        path: The path of the file: ``"run.pt"``. The file before it is ``run.previous.pt``; ``run.pt.lock`` keeps other
            jobs away.
        async_save: Let :meth:`write` return once ``torch.save`` has put the file into rank 0's memory; a thread writes
            it to the disk. If the process is killed meanwhile, the file before remains. :meth:`close` waits for the
            thread.
        weights_only: As in :func:`torch.load`: read only tensors and plain data. A file with other objects runs code
            when you read it, so pass ``False`` only if you trust the file.
        process_group: ``None`` is the default group.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        async_save: bool = False,
        weights_only: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self._weights_only = weights_only
        self.process_group = process_group
        self._is_open = False
        self._claim: Claim | None = None  # on rank 0
        self._thread = ThreadPoolExecutor(1, f"{OWN_THREADS} checkpoint") if async_save else None
        self._last: Future[None] | None = None  # the last write, in the thread

    def __enter__(self) -> CheckpointFile:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or isinstance(error, Preempted):
            self.close()
        else:  # the other ranks may not get here; the thread has reported its error
            with contextlib.suppress(Exception):
                self._let_go()

    def open(self) -> None:
        """Claim the path, make its folder, and remove files that killed processes have left. A collective.

        Raises:
            CheckpointError: Another job writes the file, named by host, process id and time; or the folder cannot be
                written.
        """
        if not self._is_open:
            self._claim = on_rank_zero(self._open, "the claim of the checkpoint", self.process_group)
            self._is_open = True

    def read(self) -> Saved | None:
        """Return the content of the newest readable file; ``None`` if there is no file. A collective.

        If the last file is damaged, this is the file before it, with a warning on rank 0. Rank 0 reads the file and
        sends it to the others.

        Raises:
            CheckpointError: No file can be read, or the file is not ours or of a newer format.
        """
        found = on_rank_zero(lambda: disk.find(self.path, self._weights_only), _READ, self.process_group)
        name, file, content = found or (None, None, None)
        if get_world_size(self.process_group) > 1:
            name = broadcast_object(name, _READ, self.process_group)
            if name is not None:
                received = broadcast_file(file, _READ, self.process_group)
                content = disk.load_whole(received, name, self._weights_only) if content is None else content
        return None if content is None else Saved(content, self._weights_only)

    def write(self, shared: Shared, own: Mapping[str, Any], about: Mapping[str, str]) -> None:
        """Write a new file; the last one becomes the previous one. A collective.

        The file is put together in rank 0's memory. This returns when the file exists; with ``async_save``, when it is
        in memory. If the last write is still running, this one waits for it, and says how long.

        Args:
            shared: The state that is equal on all ranks; only rank 0's is used. A function is called on rank 0 alone,
                while the others wait, so it must call no collective.
            own: This rank's own state: tensors and plain data.
            about: Names and values for ``require_same`` to compare: ``{"batch size": "64"}``. Equal on all ranks.

        Raises:
            CheckpointError: The file cannot be written, for example because the disk is full. The old files remain.
                With ``async_save``, the last write failed; this file isn't written either.
            ConfigurationError: The file is not open.
            PeerError: Another rank failed or died. The file is the old or the new one.
        """
        self.put(self.prepare(shared, own, about))

    def prepare(self, shared: Shared, own: Mapping[str, Any], about: Mapping[str, str]) -> io.BytesIO:
        """Do the first half of :meth:`write`: put the file together in rank 0's memory. A collective.

        Args:
            shared, own, about: As for :meth:`write`.
        """
        if not self._is_open:
            raise ConfigurationError("call open() before write(), or use the CheckpointFile as a context manager.")
        try:
            packed = pack_own(own)
        except Exception as error:
            text = f"{self.path} is not written, as this rank's state cannot be: {type(error).__name__}: {error}"
            raise CheckpointError(text) from error
        ranks = gather_bytes(packed, _OWN, self.process_group)  # on rank 0
        prepared = on_rank_zero(lambda: self._prepare(shared, ranks, about), _WRITE, self.process_group)
        return prepared or io.BytesIO()

    def put(self, prepared: io.BytesIO) -> None:
        """Do the second half of :meth:`write`. A collective; it raises the same errors.

        Args:
            prepared: The result of :meth:`prepare`.
        """
        on_rank_zero(lambda: self._put(prepared), _WRITE, self.process_group)

    def wait(self) -> None:
        """Block until the last write is complete, and the file exists. A collective.

        Raises:
            CheckpointError: With ``async_save``: the file could not be written.
        """
        on_rank_zero(self._wait, _CLOSE, self.process_group)

    def close(self) -> None:
        """Like :meth:`wait`, and then let other jobs write the path. A collective; safe to call twice.

        Raises:
            CheckpointError: As for :meth:`wait`. The file is closed all the same.
        """
        if self._is_open:
            self._is_open = False
            on_rank_zero(self._let_go, _CLOSE, self.process_group)

    def _open(self) -> Claim:
        if os.path.isdir(self.path):
            raise CheckpointError(f"{self.path} must be the path of a file, but there is a folder. Give another path.")
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            claim = Claim(self.path)
            disk.remove_temporary_files(self.path)
        except OSError as error:
            raise CheckpointError(f"the folder of {self.path} cannot be written: {error}") from error
        return claim

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _let_go(self) -> None:
        claim, self._claim = self._claim, None
        try:
            self._wait()
        finally:
            if claim is not None:
                claim.release()

    def _prepare(self, shared: Shared, ranks: list[torch.Tensor], about: Mapping[str, str]) -> io.BytesIO:
        if self._last is not None and not self._last.done():
            start = time.monotonic()
            wait([self._last])
            say(f"waited {time.monotonic() - start:.1f} s for the last write of {self.path} before the next one")
        self._wait()
        return make_file(shared, ranks, about)

    def _put(self, prepared: io.BytesIO) -> None:
        if self._thread is None:
            disk.write(prepared, self.path)
            return
        self._last = self._thread.submit(disk.write, prepared, self.path)
        self._last.add_done_callback(_say_failure)


def _say_failure(last: Future[None]) -> None:
    """Report a failed write at once: the call that raises its error may come an hour later."""
    if last.exception() is not None:
        say(f"{last.exception()}", logging.ERROR)
