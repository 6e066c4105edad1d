"""What follows from the time of the ranks: shares, the rank that sets the pace, one line, and what to try next.

A rank waits for the sums, which take some time in any case (:func:`.collector.in_any_case`), and for ranks that are
slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from ddp_callbacks.reporting.recorder import BACKWARD, BETWEEN, FORWARD, LOADING, VALIDATION, WAITING

Data = Mapping[str, Any]
COMPUTING, LOADS, EXCHANGING, SLOWER, OTHER, VALIDATING = SHOWN = (
    *("computing", "loading", "exchanging gradients", "waiting for slower processes", "between steps", "validating"),
)
_PACE = 0.1  # of the time that the others wait for a rank, so that it is named
_LITTLE = 0.03  # a share that is not told
_UNEVEN = 10  # samples of a process: a part of one more takes a tenth longer
_MUCH, _QUARTER, _LONG, _MOSTLY = 0.15, 0.25, 0.3, 0.6  # shares from which on something is advised
_SMALL = 0.005  # seconds of a short step
_STILL, _STUCK = 10.0, 5  # seconds without a step, and times as long as one, that may be a hang


def parts_of(data: Data) -> list[dict[str, float]]:
    """Return the seconds of each rank by the names of :data:`SHOWN`, in the order of the ranks."""
    return [_shown(each["seconds"], sum(each["least"].values())) for each in data["ranks"]]


def _shown(seconds: Data, exchange: float) -> dict[str, float]:
    computing, waits = seconds[FORWARD] + seconds[BACKWARD], seconds[WAITING] - exchange
    values = (computing, seconds[LOADING], exchange, waits, seconds[BETWEEN], seconds[VALIDATION])
    return dict(zip(SHOWN, map(float, values), strict=True))


def step_of(rank: Data) -> float:
    """Return the mean seconds of a rank's step, without validations."""
    spent = sum(rank["seconds"].values()) - rank["seconds"][VALIDATION] - rank["waits"][VALIDATION]
    return float(spent / max(rank["steps"], 1))


def shares_of(data: Data) -> dict[str, float]:
    """Return the share of each part in the time of all ranks."""
    parts = parts_of(data)
    total = sum(sum(own.values()) for own in parts) or 1.0
    return {name: sum(own[name] for own in parts) / total for name in SHOWN}


def has_parts(data: Data) -> bool:
    """Whether the time is known by its parts. Of one process whose loader is none of torch's, only steps are marked."""
    return len(data["ranks"]) > 1 or shares_of(data)[LOADS] > 0


def pace_of(data: Data) -> int | None:
    """Return the place in ``data["ranks"]`` of the rank for which the others wait; ``None`` if they hardly wait."""
    parts, there = parts_of(data), _were_there(data)
    waits = [
        (parts[place][SLOWER] / (sum(parts[place].values()) or 1.0), place)
        for place in there
        if not data["ranks"][place]["is_lost"]
    ]
    least, most = min(waits, default=(0.0, 0)), max(waits, default=(0.0, 0))
    is_alone = most[0] - least[0] > _PACE and least[0] < most[0] / 3  # else others are late as well, at other times
    return least[1] if is_alone else None


def _were_there(data: Data) -> list[int]:
    """Return the places of the ranks that took at least half of the steps."""
    steps = [each["steps"] for each in data["ranks"]]
    return [place for place, own in enumerate(steps) if own > max(steps) / 2]


def still_for(ranks: Sequence[Data]) -> float:
    """Return the seconds for which no rank has taken a step, though all train or validate; 0 if one may be slow."""
    since = min((rank["stepped"] for rank in ranks), default=0.0)
    usual = max(map(step_of, ranks), default=0.0)
    hangs = since > max(_STILL, _STUCK * usual) and all(rank["stage"] for rank in ranks)
    return since if hangs else 0.0


def times_as_fast(data: Data) -> float:
    """Return how many times as long one process would take if each sample cost it as much, without an exchange."""
    parts = parts_of(data)
    divided = sum(own[COMPUTING] + own[VALIDATING] for own in parts)
    shared = max((own[OTHER] for own in parts), default=0.0)  # one process does what rank 0 does alone
    if _load_all(data):
        shared += max(own[LOADS] for own in parts)
    else:
        divided += sum(own[LOADS] for own in parts)
    times = (divided + shared) / (sum(sum(own.values()) for own in parts) / len(parts) or 1.0)
    return min(times, _samples(data) or times)  # a process without a sample repeats what another one computes


def _samples(data: Data) -> int:
    """Return the samples of a batch, on all processes; 0 if unknown."""
    return max((each["batch"] for each in data["ranks"]), default=0)


def _load_all(data: Data) -> bool:
    """Whether each process loads all batches, of which it takes its part."""
    return any(each["loads_all"] for each in data["ranks"])


def bandwidth_of(data: Data) -> float | None:
    """Return bytes of gradients by the seconds from the first sum of a backward to the last; ``None`` if unknown."""
    rates = [nbytes * sums / seconds for nbytes, sums, seconds in (each["gradients"] for each in data["ranks"]) if sums]
    return max(rates, default=None)


def name_of(data: Data, place: int) -> str:
    """Return the name of a rank, with its node if there are several."""
    rank = data["ranks"][place]
    return f"rank {rank['rank']}" + (f" on {rank['node']}" if len({each["node"] for each in data["ranks"]}) > 1 else "")


def in_words(seconds: float) -> str:
    """Return a time for people."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.0f} %"


def in_digits(number: float) -> str:
    """Return a number with three digits, without an exponent."""
    return f"{float(f'{number:.3g}'):g}"


def in_bytes(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def one_line(data: Data) -> str:
    """Say in one line where the time went; empty if no rank has trained."""
    parts = parts_of(data)
    if not any(each["steps"] for each in data["ranks"]):
        return ""
    seconds = max(sum(own.values()) for own in parts)
    shares = [f"{percent(share)} {name}" for name, share in shares_of(data).items() if share >= _LITTLE]
    where = f": {', '.join(shares)}" if has_parts(data) else ""
    said = [f"{len(parts)} process{'es' * (len(parts) > 1)}, {in_words(seconds)} of training{where}"]
    if (pace := pace_of(data)) is not None:
        said.append(f"{name_of(data, pace)} sets the pace")
    if len(parts) > 1:
        said.append(f"at most {times_as_fast(data):.1f} times as fast as one")
    return "; ".join(said)


def advice(data: Data) -> list[str]:
    """Return what to try next, the most promising first."""
    if not has_parts(data):
        return [*_of_job(data), "Start two processes: only then is it measured where the time goes."]
    if since := still_for([rank for rank in data["ranks"] if not rank["is_lost"]]):
        return [f"No rank took a step in the last {in_words(since)}: see what happened, below, and the logs."]
    return [*_of_batch(data), *_of_loading(data), *_of_waits(data), *_of_job(data)] or [
        "Nothing stands out: most of the time goes into computing, which is all that training_step does, logging "
        "included, and backward."
    ]


def _of_batch(data: Data) -> Iterator[str]:
    """Yield what to do if the samples of a batch cannot be divided well."""
    samples, count = _samples(data), len(data["ranks"])
    idle = count - samples
    if samples and idle > 0:
        yield (
            f"A batch has {samples} sample{'s' * (samples > 1)} for {count} processes: {idle} "
            f"compute{'s' * (idle == 1)} none of it. Start {samples}, or take larger batches."
        )
    elif _is_uneven(data):
        yield (
            f"A batch of {samples} samples is divided unevenly among {count} processes: rank 0 has "
            f"{-(-samples // count)}, the last one {samples // count}. Let its size be a multiple of their number."
        )


def _is_uneven(data: Data) -> bool:
    """Whether the first ranks have a tenth more of a batch than the last ones, or more."""
    samples, count = _samples(data), len(data["ranks"])
    return 0 < samples < _UNEVEN * count and samples % count > 0


def _of_loading(data: Data) -> Iterator[str]:
    """Yield what to try about ranks that load for long."""
    loads = _loads(data)
    if max(loads) > _MUCH:
        who, share = name_of(data, loads.index(max(loads))), max(loads)
        if share < 1.5 * min(loads):
            who, share = "each rank" if len(loads) > 1 else "the process", shares_of(data)[LOADS]
        yield f"{who[0].upper()}{who[1:]} loads for {percent(share)} of its time. {_to_load_faster(data)}"


def _loads(data: Data) -> list[float]:
    """Return the share of loading in the time of each rank."""
    return [own[LOADS] / (sum(own.values()) or 1.0) for own in parts_of(data)]


def _of_waits(data: Data) -> Iterator[str]:
    """Yield what to try about ranks for which others wait."""
    parts, share, pace = parts_of(data), shares_of(data)[SLOWER], pace_of(data)
    if pace is not None and _beyond(parts, pace, part := _excess(parts, pace)) > 0:
        is_said = (part == COMPUTING and _is_uneven(data)) or (part == LOADS and max(_loads(data)) > _MUCH)
        if not is_said:
            remedy = _remedy(data, pace, part)
            yield f"The others wait for {name_of(data, pace)}, most of all while it is {part}: {remedy}"
    elif share > _MUCH and (pace is not None or len(_were_there(data)) < len(parts)):
        yield f"{percent(share)} went by while ranks waited for one that was lost or stopped: see what happened, below."
    elif share > _MUCH:
        late = [f"{name_of(data, place)} is late {'while ' * (part != OTHER)}{part}" for place, part in _late(parts)]
        why = (
            f"{' and '.join(late)}."
            if late
            else "their batches take unequal times, or they share cores. Put samples of similar length into one batch, "
            "or try --bind core."
        )
        yield f"The ranks wait for each other by turns for {percent(share)} of their time: {why}"


def _remedy(data: Data, pace: int, part: str) -> str:
    """Return what to do about the rank for which the others wait while it is in a part."""
    if stop := _one_stop(data, pace):
        return stop
    if part == OTHER:
        return "look at its hooks, checkpoints and loggers. Write less often, or to a faster disk."
    if part == LOADS:
        return _to_load_faster(data)
    alone = "" if data["ranks"][pace]["rank"] else "what rank 0 does alone, "
    return (
        f"look for {alone}other work on its machine, let --bind core give each process cores of its own, or start "
        "fewer processes there."
    )


def _one_stop(data: Data, pace: int) -> str:
    """Say which step of a rank took long, if the others waited for that most of all."""
    waits = [own[SLOWER] for own in parts_of(data)]
    step, seconds = data["ranks"][pace]["longest"]
    usual = min(each["longest"][1] for each in data["ranks"])
    if seconds - usual < _MOSTLY * (max(waits) - min(waits)):
        return ""
    return f"its step {step} alone took {in_words(seconds)}. See what it did there, and what its machine did."


def _to_load_faster(data: Data) -> str:
    """Return what to do about long loading."""
    if _load_all(data) and len(data["ranks"]) > 1:
        return "It loads every batch and takes its part: a data set with an index (map-style) is divided before."
    if sum(each["starting"] for each in data["ranks"]) > _MOSTLY * sum(own[LOADS] for own in parts_of(data)):
        return "Most of that is the first batch of each epoch: persistent_workers=True keeps a DataLoader's workers."
    return "Give the DataLoader more workers (num_workers), or prepare the samples before training."


def _late(parts: Sequence[Mapping[str, float]]) -> list[tuple[int, str]]:
    """Return the ranks that take much longer than the mean in a part, with the part."""
    excess = ((place, part := _excess(parts, place), _beyond(parts, place, part)) for place in range(len(parts)))
    return [(place, part) for place, part, seconds in excess if seconds > _PACE / 2 * sum(parts[place].values())]


def _excess(parts: Sequence[Mapping[str, float]], place: int) -> str:
    """Return the part in which a rank takes longer than the mean by most."""
    return max((COMPUTING, LOADS, OTHER, VALIDATING), key=lambda part: _beyond(parts, place, part))


def _beyond(parts: Sequence[Mapping[str, float]], place: int, part: str) -> float:
    return parts[place][part] - sum(own[part] for own in parts) / len(parts)


def _of_job(data: Data) -> Iterator[str]:
    shares, parts, pace = shares_of(data), parts_of(data), pace_of(data)
    nodes = len({each["node"] for each in data["ranks"]})
    if shares[EXCHANGING] > _QUARTER:
        wire = ' and compress="bf16", which sends half of the bytes between nodes' if nodes > 1 else ""
        yield (
            f"The exchange of gradients takes {percent(shares[EXCHANGING])}: try a larger batch{wire}. Fewer "
            "processes may be as fast."
        )
    number, longest = max((each["longest"] for each in data["ranks"]), key=itemgetter(1))
    if pace is None and longest > _LONG * max(sum(own.values()) for own in parts):
        yield f"Step {number} alone took {in_words(longest)}. See what the ranks did there."
    step = max(map(step_of, data["ranks"]))
    if len(parts) > 1 and step < _SMALL:
        yield f"A step takes {step * 1e3:.1f} ms, so there is little to divide: a larger batch gives each process more."
    if shares[OTHER] > _QUARTER and (pace is None or _excess(parts, pace) != OTHER):
        is_check = sum(each["compared"] for each in data["ranks"]) > _MOSTLY * sum(own[OTHER] for own in parts)
        what = (
            "most of it to compare batches with one process, which verify=None leaves out."
            if is_check
            else "in the optimizer, checkpoints, callbacks or loggers. A profiler, such as Lightning's, tells in "
            "which; ddprun stacks shows where the ranks are just now."
        )
        yield f"{percent(shares[OTHER])} goes by between steps: {what}"
    if shares[VALIDATING] > _LONG:
        yield (f"Validation takes {percent(shares[VALIDATING])}: validate less often, or with a larger batch.")
