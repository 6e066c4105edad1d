"""Find out why a wait cannot succeed, or broke: a rank has failed, left or died, or all live and one is late."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ddp_callbacks.errors import MismatchError, PeerError
from ddp_callbacks.process_group.control_channel import Message
from ddp_callbacks.process_group.coordinator import GRACE
from ddp_callbacks.process_group.places import Place
from ddp_callbacks.process_group.presence import Presence, presence


def look(here: Presence, place: Place, begins: bool) -> None:
    """Raise if this rank has heard that its wait cannot succeed any more. Does not block."""
    if end := here.end_of_run(begins):
        raise error_of(here, end, place.purpose)
    if ranks := _absent(here, place):
        raise _left(here, ranks, place.purpose)


def _absent(here: Presence, place: Place) -> list[int]:
    """Return the awaited ranks that have left, and will never come."""
    closing = here.heard.get("closing")
    if closing and place.concerns(0) and place.turn and not place.patience(Place(**closing["place"])):
        return [0]
    return list((here.told(place) or {}).get("absent", []))


def diagnose(group: dist.ProcessGroup, purpose: str, error: Exception) -> PeerError | MismatchError:
    """Find out why a wait broke with ``error``: which ranks failed, left or died. Blocks for four seconds at most."""
    here = presence()
    place, heard = here.place(purpose, group), here.heard
    with here.waiting(place, broke=True):
        heard.wait_for(lambda: here.end_of_run() or here.told(place) or heard.get("closing"), 2 * GRACE)
    if end := here.end_of_run():
        return error_of(here, end, purpose, f" First error: {error}")
    absent = _absent(here, place)
    if heard.get("closing") or absent:  # without rank 0, nobody knows whether another rank has ended
        return _left(here, absent or [0], purpose, f" First error: {error}")
    late = "".join(f" {each}" for each in (here.told(place) or {}).get("late", []))
    return PeerError(
        f"{here.name} waited for {purpose} in vain, though every rank is alive: one did not come within the timeout, "
        f"or a connection broke.{late} First error: {error}"
    )


def error_of(here: Presence, end: Message, purpose: str, first_error: str = "") -> PeerError | MismatchError:
    """Return the error for the end of a run, in a wait for ``purpose``."""
    if end["kind"] == "mismatch":
        return MismatchError(end["text"])
    if end["kind"] == "gone":
        why = f" ({end['why']})" if "why" in end else ""
        turn = here.exchanges.turn(purpose)
        which = f", number {turn} of this run" if turn > 1 else ""
        return PeerError(
            f"{here.describe(*end['ranks'])} died or went silent{why} while {here.name} was waiting for "
            f"{purpose}{which}. Check the output of that process and the kernel log of its host (out of memory, power, "
            f"network).{first_error}",
            *end["ranks"],
        )
    report = end["report"]
    return PeerError(
        f"{here.describe(report['rank'])} failed with {report['type']}: {report['message']}\n"
        f"This is {here.name}, which stops because the run cannot continue without it. "
        f"The other rank's traceback:\n{report['traceback']}",
        report["rank"],
    )


def _left(here: Presence, ranks: Sequence[int], purpose: str, first_error: str = "") -> PeerError:
    return PeerError(
        f"{here.describe(*ranks)} left the run while {here.name} still waits for {purpose}. Every "
        f"rank must make the same calls (run, evaluate and predict too) the same number of times; its own loss or data "
        f"must not decide about them.{first_error}",
        *ranks,
    )
