"""Worlds of ranks side by side: those that wait for seconds wait together."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit.machine import Slowness
from kit.ranks import DEADLINE, Nursery, Process, Rank, collect, kill

LIMIT = 60.0  # seconds
REST = 25.0  # seconds, beside twice the time until all worlds were ready


@dataclass(frozen=True)
class World:
    """Ranks that run ``body(*args)``.

    Attributes:
        stopped: A rank that stops itself; it is killed when the others have ended.
    """

    body: Callable[..., None]
    args: tuple[Any, ...] = ()
    size: int = 2
    stopped: int | None = None


def run_side_by_side(nursery: Nursery, folder: Path, worlds: Mapping[str, World]) -> dict[str, list[Rank]]:
    """The ranks of each world, each of which has a folder of its own."""
    for name in worlds:
        (folder / name).mkdir()
    with Slowness() as slowness:
        begun = {
            name: nursery.start(world.body, world.size, folder / name, *world.args) for name, world in worlds.items()
        }
        try:
            ends = _await_ends(begun, worlds, folder)
        finally:
            kill(process for processes in begun.values() for process in processes)
    return {
        name: [
            replace(collect(folder / name, rank, process.pid, *ends[name, rank]), slowness=slowness.factor)
            for rank, process in enumerate(processes)
        ]
        for name, processes in begun.items()
    }


def _await_ends(
    begun: Mapping[str, list[Process]], worlds: Mapping[str, World], folder: Path
) -> dict[tuple[str, int], tuple[int, float]]:
    """The exit code and end of each rank; those that still run at the deadline are killed.

    It comes sooner once all worlds are ready: then what is promised within seconds is due in all of them.
    """
    running = {
        process.ends: (name, rank, process) for name, ranks in begun.items() for rank, process in enumerate(ranks)
    }
    ends: dict[tuple[str, int], tuple[int, float]] = {}
    begin, are_ready = time.monotonic(), False
    end = begin + DEADLINE
    while running:
        found, _, _ = select.select(list(running), [], [], 0.5)
        if not are_ready and all((folder / name / "ready").exists() for name in worlds):
            are_ready, end = True, time.monotonic() + REST + 2 * (time.monotonic() - begin)
        if time.monotonic() > end:
            kill(process for _, _, process in running.values())
        for descriptor in found:
            name, rank, process = running.pop(descriptor)
            ends[name, rank] = process.wait(), time.monotonic()
            left = [(number, process) for other, number, process in running.values() if other == name]
            if [number for number, _ in left] == [worlds[name].stopped]:
                kill(process for _, process in left)
    return ends


def be_ready() -> None:
    """In a body, on one rank of each world: others need not wait any more for this one."""
    Path("ready").touch()


def wait_for_the_other_worlds() -> None:
    """In a body: until all worlds are ready, so that none of them still starts beside what is timed."""
    be_ready()
    worlds, end = [path for path in Path.cwd().parent.iterdir() if path.is_dir()], time.monotonic() + LIMIT
    while not all((world / "ready").exists() for world in worlds) and time.monotonic() < end:
        time.sleep(0.05)
