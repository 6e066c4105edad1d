"""The processes of a job: how they meet, join and leave, and how one learns that another has failed."""

from ddp_callbacks.process_group.membership import (
    DEFAULT_TIMEOUT,
    MPI4PY,
    get_rank,
    get_world_size,
    join_process_group,
    leave_process_group,
    resolve_group,
)

__all__ = [
    "DEFAULT_TIMEOUT",
    "MPI4PY",
    "get_rank",
    "get_world_size",
    "join_process_group",
    "leave_process_group",
    "resolve_group",
]
