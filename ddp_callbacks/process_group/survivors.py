"""Form the default group, and form it anew from the processes that are left when others have died."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from ddp_callbacks._torch import forget_failed_group, set_timeout, timeout_of
from ddp_callbacks.cluster.environment import WorkerEnv
from ddp_callbacks.errors import PeerError, RendezvousError, say
from ddp_callbacks.process_group.members_file import Members
from ddp_callbacks.process_group.presence import Presence, found
from ddp_callbacks.process_group.rendezvous import meet
from ddp_callbacks.process_group.runs import backend_of, destroy_groups, form_group

_CONNECTING = timedelta(seconds=15)  # gloo waits for a process that died after all had met

_members: Members | None = None  # of the default group that this process has joined
_position = 0  # in the program's calls, also before this process has joined: 2n - 1 in the n-th one, 2n at its end


class MembersChanged(PeerError):
    """The launcher has other members for the group than it has."""


def form_group_of(members: Members, backend: str, timeout: timedelta) -> tuple[WorkerEnv, list[int]]:
    """Form the default group of the members. A collective of them.

    If a member dies meanwhile, and the job continues without it, the others form the group. RANK and WORLD_SIZE in the
    environment then have their numbers.

    Returns:
        This process's place in the group, and the positions of all of them in the program's calls.

    Raises:
        PeerError, RendezvousError: A member died or did not come, and the job does not continue without it.
    """
    global _members
    _members = members
    members.admits = _position <= 2
    while True:
        env = members.follow()
        try:
            env, store = meet(members, env, timeout)
            positions = form_group(backend, store, env.rank, env.world_size, time_to_connect(timeout), _position)
            break
        except (PeerError, RendezvousError, RuntimeError):  # gloo's are plain ones
            if members.is_new and members.ended():
                say("the job ends before this process could join it")
                raise SystemExit(0) from None
            if not (members.is_outdated() or members.await_change()):
                raise
            leave_failed_group()
    members.is_new = False
    if time_to_connect(timeout) < timeout:
        set_timeout(timeout)
    if members.generation:
        os.environ.update(RANK=str(env.rank), WORLD_SIZE=str(env.world_size))
    return env, positions


def time_to_connect(timeout: timedelta) -> timedelta:
    """Return the timeout while a group connects: a rank may have died after all had met. Local."""
    may_change = _members is not None and _members.may_change
    return min(timeout, _CONNECTING) if may_change else timeout


def note_call() -> None:
    """Note that this rank begins a call that can continue without processes that died, or another one like it.

    New processes can only join the first one of a program: they run the program from its beginning.
    """
    global _position
    _position = (_position + 1) // 2 * 2 + 1
    if _members is not None:
        _members.admits = _position == 1


def note_end_of_call() -> None:
    """Note that this rank has come to the end of its call. It then waits for the others."""
    global _position
    _position += 1


def have_members_changed() -> bool:
    """Whether the launcher has other members for the group than it has. Local."""
    return _members is not None and _members.have_changed()


def is_call_of_new_processes() -> bool:
    """Whether the first call of the program is run by new processes alone. Local."""
    return _position == 1 and _members is not None and _members.are_new()


def form_anew(cause: PeerError) -> bool:
    """Form the default group anew, after others have died or joined. A collective of the members.

    Groups made from the old one are gone.

    Args:
        cause: The error that has ended the run here.

    Returns:
        Whether the call is over here: no member is still in it.

    Raises:
        PeerError: ``cause``, if no process has died, or the job does not continue without it; or the launcher has given
            this process up.
    """
    here, world = found(), dist.group.WORLD
    if _members is None or here is None or world is None or _is_reported(here) or not _members.await_change():
        raise cause
    backend, timeout = backend_of(world), timeout_of(world)
    leave_failed_group()
    env, positions = form_group_of(_members, backend, timeout)
    if env.rank == 0:
        say(f"continues with {env.world_size} process{'' if env.world_size == 1 else 'es'}")
    return _is_over(positions)


def _is_over(positions: list[int]) -> bool:
    """Whether this rank's call is over. A rank returns from a call only once all have come to its end."""
    global _position
    if _position % 2:
        return False
    if min(positions) >= _position:
        return True
    _position -= 1  # again in the call
    return False


def leave_failed_group() -> None:
    """Leave the default group, if there is one, without waiting for pending collectives."""
    if (here := found()) is not None:
        here.failed = True
        here.leave()
        destroy_groups()
    forget_failed_group()


def _is_reported(here: Presence) -> bool:
    """Whether a rank has reported an exception, which is no death: every process would have it again."""
    end = here.end_of_run()
    return end is not None and end["kind"] != "gone"
