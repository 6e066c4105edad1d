"""Simulate what the ranks of a large job cost rank 0, which decides who waits in vain: time, memory and bytes.

    python examples/benchmarks/scale/main.py            measures, and writes scale.json and the tables of the README
    python examples/benchmarks/scale/main.py --draw     the tables alone, from scale.json

No process is started, and nothing is sent: the messages of all ranks, as they travel, go one by one to the state
machine that decides in rank 0, and its answers are encoded as they would travel. Eight ranks are on each node.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ddp_callbacks.process_group.control_channel import encode
from ddp_callbacks.process_group.coordinator import Coordinator
from ddp_callbacks.process_group.places import Place

HERE = Path(__file__).parent
SIZES = (8, 64, 512, 4096)
EXCHANGES = 60  # that a rank counts: buckets of gradients, BatchNorm layers, metadata, ...
ON_A_NODE = 8
SUM = "the metadata of the step"
Rows = dict[str, dict[str, list[float]]]  # case, and number of ranks: what measure() returns


class Simulation:
    """The ranks of a job, which have joined.

    Attributes:
        messages: How many came.
        seconds: Of the processor, for each of them and for each look at the clock.
        sent: Bytes to all ranks.
    """

    def __init__(self, size: int) -> None:
        self._coordinator, self._now = Coordinator(size), 0.0
        self.size = size
        self.seconds: list[float] = []
        self.messages = self.sent = 0
        for rank in range(size):
            name = f"rank {rank} (host node{rank // ON_A_NODE}, pid {1000 + rank})"
            self.say([rank], lambda _, name=name: {"event": "join", "name": name})

    def say(self, ranks: Iterable[int], message: Callable[[int], dict[str, Any]]) -> list[int]:
        """Let ranks send a message each; return whom rank 0 asks where they are because of that."""
        receive = self._coordinator.receive
        return [rank for each in ranks for rank in self._time(receive, each, message(each), self._now)]

    def lose(self, ranks: Iterable[int]) -> list[int]:
        return [rank for each in ranks for rank in self._time(self._coordinator.lose, each, self._now)]

    def pass_time(self, seconds: float) -> list[int]:
        asked = []
        for _ in range(round(seconds * 4)):
            self._now += 0.25
            asked += self._time(self._coordinator.tick, self._now)
        return asked

    def _time(self, event: Callable[..., Any], *values: Any) -> list[int]:
        begin = time.process_time()
        sent = event(*values)
        for _, receivers in groupby(sent, lambda each: id(each[1])):
            messages = [message for _, message in receivers]
            self.sent += len(encode(messages[0])) * len(messages)
        self.seconds.append(time.process_time() - begin)
        self.messages += event != self._coordinator.tick
        return [rank for rank, message in sent if message["event"] == "where"]


TURNS = {f"the gradients of bucket {number} of the model's parameters": 100 for number in range(EXCHANGES)}


def place(waits: bool) -> dict[str, Any]:
    """A place in the training as it arrives: at the sum of the step, or in the data behind the sum before it."""
    at = Place(0, SUM, 101 if waits else 100, TURNS | {SUM: 101 if waits else 100}, 400, None, line="train.py:30")
    return dict(json.loads(json.dumps(asdict(at) | {"waits": waits})))


def wait(broke: bool) -> Callable[[int], dict[str, Any]]:
    return lambda _: {"event": "wait", "place": place(True), "broke": broke}


def answer(made: Simulation, asked: list[int], late: set[int]) -> None:
    made.say((rank for rank in asked if rank not in late), lambda _: {"event": "place", "place": place(True)})
    made.say((rank for rank in asked if rank in late), lambda _: {"event": "place", "place": place(False)})


def gather(made: Simulation) -> None:
    value = {"at": [123456, 400], "failed": False, "aborted": False}
    sent = {"event": "put", "about": "begin", "run": 0, "value": value, "members": None}
    made.say(range(made.size), lambda _: dict(sent))


def one_is_late(made: Simulation) -> None:
    made.say(range(1, made.size), wait(broke=False))
    answer(made, made.pass_time(60), {0})
    made.say(range(1, made.size), lambda _: {"event": "done", "about": SUM})


def all_waits_break(made: Simulation) -> None:
    answer(made, made.say(range(1, made.size), wait(broke=True)), {0})
    answer(made, made.pass_time(3), {0})


def dies(count: int) -> Callable[[Simulation], None]:
    def happens(made: Simulation) -> None:
        rest = range(count, made.size)
        made.say(rest, wait(broke=False))
        made.lose(range(count))
        answer(made, made.say(rest, wait(broke=True)), set())
        made.pass_time(3)

    return happens


CASES: dict[str, Callable[[Simulation], None]] = {
    "all join": lambda made: None,
    "a run begins": gather,
    "one rank is late by a minute": one_is_late,
    "all waits break, and all ranks live": all_waits_break,
    "a rank dies": dies(1),
    "a node of eight dies": dies(ON_A_NODE),
}


def measure(case: str, size: int) -> list[float]:
    """Milliseconds for a message and for the longest event, MB sent to each rank, and MB of memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the largest memory so far is forgotten
    before = largest_memory()
    made = Simulation(size)
    if case != "all join":
        made.seconds, made.messages, made.sent = [], 0, 0
    CASES[case](made)
    each, longest = 1e3 * sum(made.seconds) / made.messages, 1e3 * max(made.seconds)
    return [round(each, 4), round(longest, 2), round(made.sent / size / 1e6, 4), round(largest_memory() - before, 1)]


def largest_memory() -> float:
    """MB."""
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) / 1024


def measure_all() -> Rows:
    rows: Rows = {}
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # for the memory of each
        for case in CASES:
            # Of a job on one node none would be left.
            sizes = [size for size in SIZES if case != "a node of eight dies" or size > ON_A_NODE]
            rows[case] = {str(size): pool.apply(measure, (case, size)) for size in sizes}
            print(case, rows[case], flush=True)
    return rows


def table(rows: Rows) -> str:
    def part(title: str, cell: Callable[[list[float]], str]) -> str:
        lines = [f"| {title} | {' | '.join(f'{size:,} ranks' for size in SIZES)} |", "|---" * (1 + len(SIZES)) + "|"]
        for case, found in rows.items():
            cells = [cell(found[str(size)]) if str(size) in found else "" for size in SIZES]
            lines.append(f"| {case} | {' | '.join(cells)} |")
        return "\n".join(lines)

    times = part("ms for a message (longest event)", lambda row: f"{row[0]:.3f} ({row[1]:.1f})")
    sizes = part("kB to each rank (MB of memory)", lambda row: f"{1e3 * row[2]:.1f} ({row[3]:.0f})")
    return f"{times}\n\n{sizes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only write the tables, from scale.json")
    measured, page = HERE / "scale.json", HERE / "README.md"
    if not parser.parse_args().draw:
        text = json.dumps(measure_all(), indent=1)
        measured.write_text(re.sub(r"\n {3,}|\n {2}(?=\])", " ", text) + "\n")
    shown = table(json.loads(measured.read_text()))
    marked = f"<!-- scale.json -->\n\n{shown}\n\n<!-- end -->"
    page.write_text(re.sub(r"<!-- scale.json -->.*?<!-- end -->", lambda _: marked, page.read_text(), flags=re.DOTALL))
    print(shown)


if __name__ == "__main__":
    main()
