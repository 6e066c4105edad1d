"""A fit that is cut at any moment goes on at the next batch, on any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed import run_distributed
from resume_lightning_scenarios import LOCAL, SCENARIOS, comparable, joined

Request = tuple[str, int | None, str, dict[str, Any]]


def run_requests(requests: list[Request]) -> list[dict[str, Any]]:
    """On a rank: one fit after another."""
    return [(SCENARIOS | LOCAL)[name](cut, path, **options) for name, cut, path, options in requests]


def on(world_size: int, requests: list[Request]) -> list[dict[str, Any]]:
    """What rank 0 has; all ranks log the same."""
    if world_size == 1:
        return run_requests(requests)
    by_rank = run_distributed(run_requests, world_size, requests)
    for results in by_rank[1:]:
        for own, first in zip(results, by_rank[0], strict=True):
            assert own["logged"] == first["logged"]
    return by_rank[0]
