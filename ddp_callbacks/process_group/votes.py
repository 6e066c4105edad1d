"""Find out whether all ranks want something at the same moment. If no rank wants it, this sends no message.

Ranks that run the same program mostly want the same at the same moment. So a rank that wants nothing lets the moment
pass and sends nothing. A rank that wants something asks for a vote, and votes yes. A rank that has let the moment pass,
or does so later, votes no.
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

    A collective, with :func:`abstain` on the ranks that do not want it. Blocks until the last rank has reached this
    moment; takes a few milliseconds then.

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
    here.heard.pop("asked", name, here.run)  # this vote has answered it
    here.passed += 1
    return all(votes.values)
