"""Fresh ranks of a kind (:mod:`kit.ranks`) that join once and then run one body after another, for tests of GPUs."""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import os
import pickle
import select
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.ranks import Nursery, Process, kill

SIZES = {"one": 1, "gloo": 2, "nccl": 2, "cpu": 2}
START = 180.0  # seconds until all processes have joined
BODY = 120.0  # seconds for a body
GRACE = 15.0  # seconds for the others after the first has failed
_PAUSE = 0.002  # seconds between two looks
_OUTPUT = 20_000  # characters of each process that an error shows


class WorldFailed(AssertionError):
    """A body has raised, died or taken too long on a rank; the text has every rank's output."""


class World:
    """Ranks that run one body after another; after a failure, the next body gets new ones. Close it at the end."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.size, self._folder, self._calls = kind, SIZES[kind], folder, 0
        self._ranks: list[Process] = []

    def run(self, body: Callable[..., Any], *args: Any, deadline: float = BODY) -> list[Any]:
        """Call ``body(*args)`` on every rank; what each returned, by rank.

        ``body`` is a function at the top of a module of the tests; arguments and results are pickled.

        Raises:
            WorldFailed: With every rank's output.
        """
        if not self._ranks:
            self._ranks = Nursery(self.kind).start(serve, self.size, self._folder, self._calls, deadline=1e6)
            self._call("device_failures", "join_on", (self.kind,), START)
        return self._call(body.__module__, body.__name__, args, deadline)

    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def close(self) -> None:
        kill(self._ranks)
        for rank in self._ranks:
            rank.wait()
        self._ranks = []

    def _call(self, module: str, name: str, args: tuple[Any, ...], deadline: float) -> list[Any]:
        folder = self._folder / f"{self.kind}-{self._calls}"
        folder.mkdir()
        self._calls += 1
        errors = [self._folder / f"stderr-{rank}" for rank in range(self.size)]
        marks = [path.stat().st_size for path in errors]
        _write(folder / "call", (module, name, args, deadline))
        answers = self._await_answers(folder, time.monotonic() + deadline + GRACE)
        if all(answer and answer[0] == "done" for answer in answers):
            return [answer[1] for answer in answers]
        found = [answer[0] if answer else f"no answer in {deadline:.0f} s" for answer in answers]
        self.close()
        texts = [path.read_bytes()[mark:].decode(errors="replace") for path, mark in zip(errors, marks, strict=True)]
        shown = "\n".join(f"--- rank {rank}\n{text[-_OUTPUT:]}" for rank, text in enumerate(texts))
        raise WorldFailed(f"{name} on {self.kind}: {found}\n{shown}")

    def _await_answers(self, folder: Path, end: float) -> list[tuple[str, Any]]:
        """What each rank has answered; empty for one that has not."""
        answers: list[tuple[str, Any]] = [()] * self.size  # type: ignore[list-item]
        while not all(answers) and time.monotonic() < end:
            time.sleep(_PAUSE)
            for index, rank in enumerate(self._ranks):
                path = folder / f"answer-{index}"
                has_ended = bool(select.select([rank.ends], [], [], 0)[0])
                if not answers[index] and (path.exists() or has_ended):
                    answers[index] = pickle.loads(path.read_bytes()) if path.exists() else ("ended", None)
                    if answers[index][0] != "done":
                        end = min(end, time.monotonic() + GRACE)
        return answers


def why_not(world: World, probe: Callable[..., Any], device: str = "cuda") -> str:
    """Why two ranks on this GPU cannot exchange anything, in NCCL's words; empty if they can.

    Raises:
        WorldFailed: They could not join, and that was not NCCL.
    """
    try:
        world.run(probe, device, deadline=60.0)
    except WorldFailed as error:
        lines = [line.strip() for line in str(error).splitlines() if "NCCL" in line or "Duplicate GPU" in line]
        reasons = [line for line in lines if "WARN" in line or "rror" in line or "Duplicate" in line]
        if not reasons and str(error).startswith("join_on"):
            raise
        return " | ".join(dict.fromkeys(reasons))[-600:] or str(error)[-600:]
    return ""


def serve(first: int) -> None:
    """On a rank: run what is called, from that number on, until the tests end."""
    torch.set_num_threads(1)
    os.dup2(2, 1)
    base, tests = Path.cwd(), os.getppid()
    for number in itertools.count(first):
        while not (calls := list(base.glob(f"*-{number}/call"))):
            if os.getppid() != tests:
                return
            time.sleep(_PAUSE)
        os.chdir(calls[0].parent)
        module, name, args, deadline = pickle.loads(calls[0].read_bytes())
        faulthandler.dump_traceback_later(deadline, exit=True)
        try:
            answer = ("done", _to_cpu(getattr(importlib.import_module(module), name)(*args)))
        except BaseException as error:
            traceback.print_exc()
            _tell_the_others(error)
            answer = ("failed", None)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        _write(Path(f"answer-{os.environ['RANK']}"), answer)


def _write(path: Path, found: Any) -> None:
    """So that it is whole when it is seen."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(found))
    part.rename(path)


def _to_cpu(found: Any) -> Any:
    """To be unpickled where nothing should use CUDA."""
    if isinstance(found, torch.Tensor):
        return found.detach().cpu()
    if isinstance(found, dict):
        return {key: _to_cpu(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(map(_to_cpu, found))
    return found


def _tell_the_others(error: BaseException) -> None:
    """They stop waiting for this rank."""
    from ddp_callbacks.process_group.failures import report_failure

    if dist.is_initialized():
        report_failure(error)
