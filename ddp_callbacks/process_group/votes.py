"""Something that every rank may want at the same moment, found out without a message where nobody wants it.

Ranks that run the same program mostly want the same at the same moment. So a rank that wants nothing lets the moment
pass and tells nobody. A rank that wants something puts its vote; then the others are asked, and a rank that has let the
moment pass, or does so later, says that.
"""

from __future__ import annotations

import torch.distributed as dist

from ddp_callbacks.process_group.failures import wait
from ddp_callbacks.process_group.presence import VOTE, presence


def abstain() -> None:
    """Let a moment pass. Local; every rank must call this or :func:`is_unanimous` at the same moments."""
    here = presence()
    here.passed += 1
    here.decline(here.passed)


def is_unanimous(doing: str) -> bool:
    """Whether all ranks of the default group call this at this moment.

    Takes a few milliseconds. Blocks until the last rank has come there.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    world, here = dist.group.WORLD, presence()
    assert world is not None
    name = f"{VOTE} {here.passed + 1}"
    votes = here.gathering(name, here.run)
    votes.ask()
    votes.put(True)
    wait(votes, doing, world)
    here.heard.pop("asked", name, here.run)  # it has been answered
    here.passed += 1
    return all(votes.values)
