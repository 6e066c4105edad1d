"""Programs that nobody wrote: some parts each, by a seed, with a Trainer or a Trial, proven against plain one process.

    python tests/scenarios/programs.py --count 500 --seed 7 --size 2 --resumed-on 3

runs 500 programs on two processes. Some are cut at a random moment, and go on on three. Each that fails is run again
without parts that it does not need to fail, and is left as a script.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import faulthandler
import hashlib
import inspect
import itertools
import json
import os
import pickle
import random
import re
import sys
import tempfile
import time
import traceback
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]

import program_parts_draws  # noqa: F401  (it adds its parts)
import torch
import torch.distributed as dist
import trainers
import trials
from kit.ranks import Nursery
from kit.warm import Server
from program_parts import PARTS, TURNS, Part
from program_parts_trainer import TrainerBuild
from program_parts_trial import TrialBuild
from torch.utils.data import TensorDataset
from ways import Way

from ddp_callbacks.errors import Preempted
from ddp_callbacks.process_group.runs import begin_run

RELATIVE = 1e-10
LIMIT = 120.0  # seconds for one program
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Program:
    """
    Attributes:
        host: "trainer" or "trial".
        seed: Of what its parts choose.
        parts: Their names.
        cut: Where it is cut, as a share of its moments; ``None``: it is not.
    """

    host: str
    seed: int
    parts: tuple[str, ...]
    cut: float | None = None

    @property
    def all_parts(self) -> list[Part]:
        return [PARTS[self.host][name] for name in self.parts]

    @property
    def key(self) -> str:
        return hashlib.sha1(repr(self).encode()).hexdigest()[:16]

    def smaller(self) -> Iterator[Program]:
        if self.cut is not None:
            yield dataclasses.replace(self, cut=None)
        for index in range(len(self.parts)):
            yield dataclasses.replace(self, parts=self.parts[:index] + self.parts[index + 1 :])


def draw(host: str, seed: int, forced: Sequence[str] = (), without: Sequence[str] = ()) -> Program:
    """Some parts that go with each other; a part has the same chance, however many variants it has."""
    rng = random.Random(f"{host} {seed}")
    chosen = [PARTS[host][name] for name in forced]
    by_function: dict[str, list[Part]] = {}
    for each in PARTS[host].values():
        if not {each.name, each.function.__name__} & {*without}:
            by_function.setdefault(each.function.__name__, []).append(each)
    count = len(chosen) + rng.randint(2, 6)
    for name in rng.sample(sorted(by_function), len(by_function)):
        more = rng.choice(by_function[name])
        if len(chosen) < count and all(more.goes_with(each) for each in chosen):
            chosen.append(more)
    cut = rng.random() if rng.random() < 0.4 and all(each.can_be_cut for each in chosen) else None
    return Program(host, seed, tuple(each.name for each in chosen), cut)


def each_alone(host: str) -> list[Program]:
    """Programs of one part, whole, and cut."""
    found = []
    for number, (name, each) in enumerate(PARTS[host].items()):
        found.append(Program(host, number, (name,)))
        if each.can_be_cut:
            found.append(Program(host, number, (name,), random.Random(name).random()))
    return found


# --- on a rank --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """
    Attributes:
        error: The traceback, if it has raised.
        message: Of the error; of the traceback of another rank in it, the last line.
        allowed: The patterns of errors that it may raise.
    """

    result: Any = None
    moments: int = 0
    error: str = ""
    message: str = ""
    allowed: Sequence[str] = ()


def execute(program: Program, way: Way | None, folder: str, moment: int | None = None) -> Outcome:
    """Run it in this process; a run that is cut raises ``Preempted``."""
    allowed: list[str] = []

    def script(within: Any) -> Any:
        build = (TrainerBuild if program.host == "trainer" else TrialBuild)(program.seed, within)
        build.allowed = allowed
        for each in sorted(program.all_parts, key=lambda part: not part.samples_draw):  # loaders come behind their data
            each.add_to(build)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", f".*{TURNS}")  # its batches are those of one process that may be cut
            return build.run()

    resumes = way is not None and program.cut is not None
    if way is not None and program.seed % 2:
        way = dataclasses.replace(way, resume=(("every", 2),))
    try:
        with unittest.mock.patch.dict(os.environ, PL_GLOBAL_SEED="0", PL_SEED_WORKERS="0"), trainers.quiet():
            if program.host == "trainer":
                return Outcome(*trainers.run_script(script, way, folder, moment, resumes), allowed=allowed)
            extra = trials.Extra(way, folder, moment, resumes)
            return Outcome(script(extra), extra.moments, allowed=allowed)
    except Exception as error:
        before, _, of_peer = str(error).partition("traceback:")
        return Outcome(None, 0, traceback.format_exc(), before + of_peer.strip().rpartition("\n")[2], allowed)


def execute_alone(program: Program, folder: Path) -> Outcome:
    """The truth: plain, without the variables of a rank; kept in the folder."""
    path = folder / "truth"
    if not path.exists():
        kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        with unittest.mock.patch.dict(os.environ, kept, clear=True):
            samples_draw = any(each.samples_draw for each in program.all_parts)
            way = Way(1, options=(("randomness", "by_sample"),)) if samples_draw else None
            truth = execute(program, way, f"{folder}/alone")
            if "lbfgs" in program.parts and not truth.error:
                truth.error = _sensitivity(program, way, truth, folder)
            path.write_bytes(pickle.dumps(truth))
    return pickle.loads(path.read_bytes())  # type: ignore[no-any-return]


def _sensitivity(program: Program, way: Way | None, truth: Outcome, folder: Path) -> str:
    """What differs if the data change by their last bits, which LBFGS may make large: such numbers are no truth.

    By more than one: each step rounds in another way.
    """
    exact = trainers.data

    def moved(*args: Any) -> Any:
        x, y = exact(*args).tensors
        return TensorDataset(x * (1 + 1e-14 * torch.rand_like(x)), y)

    with unittest.mock.patch.object(trainers, "data", moved):
        found = [*differences(execute(program, way, f"{folder}/again").result, truth.result)]
    return "\n".join(["changes of 1e-14 in the data grow beyond the tolerance", *found]) if found else ""


def differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """Relative to the largest number of a tensor."""
    if isinstance(wanted, Mapping):
        if set(found) != set(wanted):
            yield f"{where} has {sorted(map(str, set(found) ^ set(wanted)))} on one side only"
        for key in wanted.keys() & found.keys():
            yield from differences(found[key], wanted[key], f"{where} {key}")
    elif isinstance(wanted, list | tuple):
        if len(found) != len(wanted):
            yield f"{where} has {len(found)} entries, not {len(wanted)}"
        for index, (one, other) in enumerate(zip(found, wanted, strict=False)):
            yield from differences(one, other, f"{where}[{index}]")
    elif found is None or wanted is None or isinstance(wanted, str):
        if found != wanted:
            yield f"{where} is {found}, not {wanted}"
    else:
        one, other = (torch.as_tensor(each, dtype=torch.float64) for each in (found, wanted))
        scale = float(other.nan_to_num(0, 0, 0).abs().max()) if other.numel() else 0.0
        if one.shape != other.shape or not torch.allclose(one, other, 0, RELATIVE * max(scale, 1e-3), equal_nan=True):
            yield f"{where} is {found!s:.80}, not {wanted!s:.80}"


def judge(program: Program, way: Way, folder: Path) -> tuple[str, str]:
    """Run it on this rank: whether it ``holds``, was ``refused`` as it may be, or ``cut``, or how it failed."""
    truth = execute_alone(program, folder)
    if truth.error:
        return "no program", truth.error
    moment = None if program.cut is None or way.resumed_on == 0 else 1 + int(program.cut * truth.moments)
    try:
        ours = execute(program, way, f"{folder}/files", moment)
    except Preempted:
        return "cut", ""
    if ours.error:
        is_allowed = any(re.search(pattern, ours.message) for pattern in ours.allowed)
        return ("refused" if is_allowed else "raised"), ours.error
    found = list(differences(ours.result, truth.result))
    return ("differs" if found else "holds"), "\n".join(found[:12])


def judge_all(programs: Sequence[Program], way: Way, folder: Path) -> None:
    """On each rank: all of them, one after another; the verdicts are left in their folders."""
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for program in programs[rank::size]:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        execute_alone(program, folder / program.key)
    patience = datetime.timedelta(seconds=2 * LIMIT)
    store = f"file://{Path.cwd()}/store"
    dist.init_process_group("gloo", init_method=store, timeout=patience, world_size=size, rank=rank)
    way.enter()
    ends = dist.new_group(timeout=patience)
    for program in programs:
        dist.barrier(ends)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        verdict = judge(program, way, folder / program.key)
        (folder / program.key / f"verdict-{rank}").write_text(json.dumps(verdict))
        begin_run()  # what has failed must not end the next one
    dist.barrier(ends)
    dist.destroy_process_group()


# --- many of them -----------------------------------------------------------------------------------------------------

Verdicts = dict[Program, tuple[str, str]]


def prove(programs: Iterable[Program], way: Way) -> Verdicts:
    """Run each on ranks, and those that were cut on others: ``(what, why)``."""
    programs = list(dict.fromkeys(programs))
    with tempfile.TemporaryDirectory() as name:
        for program in programs:
            for folder in ("files", "alone", "again"):
                Path(name, program.key, folder).mkdir(parents=True)
        found = _run(programs, way, Path(name))
        were_cut = [program for program in programs if found[program][0] == "cut"]
        second = dataclasses.replace(way, size=way.resumed_on, resumed_on=0)
        return found | (_run(were_cut, second, Path(name)) if were_cut else {})


def _run(programs: Sequence[Program], way: Way, folder: Path) -> Verdicts:
    """A program that takes its ranks with it is left out of the next start."""
    found: Verdicts = {}
    while left := [program for program in programs if program not in found]:
        with tempfile.TemporaryDirectory() as name:
            ranks = Nursery().run(judge_all, way.size, Path(name), left, way, folder, deadline=LIMIT * len(left) + 60)
        for program in left:
            verdicts = [_verdict(folder / program.key / f"verdict-{rank}") for rank in range(way.size)]
            if not all(verdicts):
                found[program] = (
                    "hung or died",
                    "\n".join(f"exit code {each.code}\n{each.stderr[-3000:]}" for each in ranks),
                )
                break
            found[program] = _joined(verdicts)
    return found


def _verdict(path: Path) -> Any:
    if not path.exists():
        return None
    verdict = json.loads(path.read_text())
    path.unlink()  # a run that goes on writes it anew
    return verdict


def _joined(verdicts: Sequence[tuple[str, str]]) -> tuple[str, str]:
    kinds = {kind for kind, _ in verdicts}
    worst: str = next(kind for kind in ("raised", "differs", "no program", "refused", "cut", "holds") if kind in kinds)
    if len(kinds) > 1 and worst in ("refused", "cut", "no program"):
        worst = f"{worst} on some ranks only"
    return worst, "\n".join(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in enumerate(verdicts) if text)


def has_failed(verdict: tuple[str, str]) -> bool:
    return verdict[0] not in ("holds", "refused", "no program")


def shrink(failing: Verdicts, way: Way) -> Verdicts:
    """Leave out parts, and the cut, one after another, as long as a program fails in the same way."""
    minimal: Verdicts = {}
    while failing:
        smaller = {program: list(program.smaller()) for program in failing}
        found = prove([each for some in smaller.values() for each in some], way)
        further: Verdicts = {}
        for program, verdict in failing.items():
            still = [each for each in smaller[program] if found[each][0] == verdict[0]]
            (further if still else minimal).update({still[0]: found[still[0]]} if still else {program: verdict})
        failing = _one_of_each_kind(further)
    return _one_of_each_kind(minimal)


def _one_of_each_kind(found: Verdicts) -> Verdicts:
    """Of those that differ in their seed only."""
    kinds = {(each.host, each.parts, each.cut is None): each for each in found}
    return {each: found[each] for each in kinds.values()}


def script_of(program: Program, way: Way) -> str:
    sources = [inspect.getsource(each.function) for each in program.all_parts]
    text = "\n".join(f"# {line}" for source in sources for line in source.splitlines())
    return f"""# python SCRIPT runs it alone, then on {way.size} processes; it goes on on {way.resumed_on} if it is cut.
import sys

sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
from programs import Program, prove, warm_server
from ways import Way

with warm_server():
    print(*prove([{program}], {way}).values())

{text}
"""


@contextlib.contextmanager
def warm_server() -> Iterator[None]:
    os.environ["OMP_NUM_THREADS"] = "1"
    server = Server()
    try:
        yield
    finally:
        server.close()


def report(programs: Sequence[Program], way: Way, chunk: int, folder: Path) -> None:
    counts, failing, begun = Counter[str](), Verdicts(), time.monotonic()
    for first in range(0, len(programs), chunk):
        found = prove(programs[first : first + chunk], way)
        counts.update(kind for kind, _ in found.values())
        failing |= {program: verdict for program, verdict in found.items() if has_failed(verdict)}
        print(f"{counts.total()} programs in {time.monotonic() - begun:.0f} s: {dict(counts)}", flush=True)
        for program, verdict in found.items():
            if verdict[0] not in ("holds", "refused"):
                print(verdict[0], program, verdict[1].strip().splitlines()[-1][:300], flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    for program, verdict in shrink(failing, way).items():
        path = folder / f"{program.key}.py"
        path.write_text(script_of(program, way))
        print(f"--- {path}\n{program}\n{verdict[0]}: {verdict[1][-1500:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--resumed-on", type=int, default=3, help="0: none is cut")
    parser.add_argument("--hosts", nargs="*", default=["trainer", "trial"])
    parser.add_argument("--each", action="store_true", help="each part alone")
    parser.add_argument("--parts", nargs="*", default=[], help="that each program has")
    parser.add_argument("--without", nargs="*", default=[], help="parts, or functions, that none has")
    parser.add_argument("--chunk", type=int, default=100, help="programs in a start of ranks")
    parser.add_argument("--scripts", type=Path, default=Path("failing-programs"))
    chosen = parser.parse_args()
    way = Way(chosen.size, resumed_on=chosen.resumed_on)
    hosts = itertools.cycle(chosen.hosts)
    seeds = (chosen.seed + index // len(chosen.hosts) for index in range(chosen.count))
    programs = [draw(next(hosts), seed, chosen.parts, chosen.without) for seed in seeds]
    if chosen.each:
        programs = [each for host in chosen.hosts for each in each_alone(host)]
    with warm_server():
        report(programs, way, chosen.chunk, chosen.scripts)


if __name__ == "__main__":
    import programs  # the ranks know its classes by that name

    programs.main()
