"""Who takes part in a job, by the launcher's list in a store; and calls that are entered again without others."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_callbacks.checkpoints import recovery
from ddp_callbacks.checkpoints.recovery import Recovery
from ddp_callbacks.environment import ENDED, KEEP_GOING, MEMBERS, WorkerEnv
from ddp_callbacks.errors import PeerError
from ddp_callbacks.process_group import survivors
from ddp_callbacks.process_group.members import Members

SIZE = 4


@pytest.fixture(autouse=True)
def keeps_going(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEP_GOING, "1")


def members(store: dist.Store, rank: int) -> Members:
    return Members(store, WorkerEnv(rank, SIZE, rank, "h1", 29500))


def list_of(store: dist.Store, generation: int, *ranks: int, **replaced: dict[int, int]) -> None:
    """As the launcher notes it."""
    store.set(MEMBERS, json.dumps({"generation": generation, "ranks": ranks, **replaced}))


def test_the_ranks_that_are_left_are_numbered_anew_by_the_newest_list() -> None:
    """Survivors get new ranks."""
    store = dist.HashStore()
    last = members(store, 3)
    assert last.follow() == WorkerEnv(3, SIZE, 3, "h1", 29500) and not last.have_changed()
    list_of(store, 1, 0, 2, 3)
    list_of(store, 2, 2, 3)
    assert last.have_changed() and last.await_change() and last.generation == 0
    assert last.follow() == WorkerEnv(1, 2, 3, "h1", 29500)
    assert last.generation == 2 and not last.have_changed()


def test_a_replaced_process_is_another_one_though_nobody_has_seen_its_rank_missing() -> None:
    store = dist.HashStore()
    one, busy = members(store, 0), members(store, 1)
    busy.admits = False  # it is in a call that a new process cannot join
    list_of(store, 2, 0, 1, 2, 3, replaced={3: 1})
    assert one.await_change() and one.follow().world_size == SIZE
    assert busy.await_change() and busy.follow().world_size == SIZE - 1


def test_generations_share_no_key() -> None:
    store = dist.HashStore()
    list_of(store, 1, 0, 3)
    before, after = members(store, 0), members(store, 3)
    after.follow()
    before.store.set("address", "old")
    assert not after.store.check(["address"])
    after.store.set("address", "new")
    assert (before.store.get("address"), after.store.get("address")) == (b"old", b"new")


def test_a_process_that_the_launcher_has_given_up_is_told_so() -> None:
    store = dist.HashStore()
    list_of(store, 1, 0, 2, 3)
    with pytest.raises(PeerError, match="the launcher has given up this process, which was started as rank 1, and"):
        members(store, 1).follow()


def test_ranks_that_have_exited_have_the_numbers_of_the_list() -> None:
    store = dist.HashStore()
    one = members(store, 0)
    assert one.ended() == set()
    store.set(ENDED, "1 3")
    assert one.ended() == {1, 3}
    list_of(store, 1, 0, 2, 3)
    one.follow()
    assert one.ended() == {2}


def test_without_the_option_the_list_counts_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEEP_GOING)
    store = dist.HashStore()
    list_of(store, 1, 0, 2)
    one = members(store, 1)
    assert not one.await_change() and one.follow().world_size == SIZE


def test_a_member_that_dies_while_gloo_connects_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    store, errors = dist.HashStore(), [RuntimeError("Gloo connectFullMesh failed with Connect timeout [none]")]
    one = members(store, 1)

    def form_group(*_: Any) -> list[int]:
        if errors:
            list_of(store, 1, 1, 2)
            raise errors.pop()
        return [0, 0]

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", str(SIZE))
    monkeypatch.setattr(survivors, "_members", None)
    monkeypatch.setattr(survivors, "meet", lambda *_: store)
    monkeypatch.setattr(survivors, "form_group", form_group)
    monkeypatch.setattr(survivors, "set_timeout", lambda _: None)
    env, _ = survivors.form_group_of(one, "gloo", timedelta(seconds=60))
    assert (env.rank, env.world_size, one.generation) == (0, 2, 1)


# --- entering a call again --------------------------------------------------------------------------------------------


@pytest.fixture
def survivals(monkeypatch: pytest.MonkeyPatch) -> list[PeerError]:
    """The errors after which the ranks that are left, one here, have met."""
    found: list[PeerError] = []
    monkeypatch.setattr(recovery, "form_anew", found.append)
    return found


class Host:
    """Its method fails so often before it returns, by whatever error."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.recovery, self.begun_again, self.followed = list(errors), Recovery(), 0, 0

    def run(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    def begin_again(self) -> None:
        self.begun_again += 1

    def follow(self) -> None:
        self.followed += 1

    def call(self, method: Any = None) -> str:
        return self.recovery.call(method or self.run, self)  # type: ignore[no-any-return]


def test_the_outermost_call_is_entered_again_as_often_as_others_die(survivals: list[PeerError]) -> None:
    first, second = PeerError("rank 1"), PeerError("rank 0")
    host = Host(first, second)
    assert host.call(host.call) == "done"
    assert (survivals, host.begun_again, host.followed) == ([first, second], 2, 2)


def test_a_call_of_another_object_inside_is_left_to_the_outermost_one(survivals: list[PeerError]) -> None:
    error = PeerError("rank 1")
    outer, inner = Host(), Host(error)
    assert outer.call(inner.call) == "done"
    assert (survivals, outer.begun_again, inner.begun_again) == ([error], 1, 0)


def test_another_error_ends_the_call(survivals: list[PeerError]) -> None:
    with pytest.raises(KeyError, match="mine"):
        Host(KeyError("mine")).call()
    assert survivals == []


def test_a_call_that_is_entered_again_begins_with_the_attributes_of_its_first_begin(survivals: list[PeerError]) -> None:
    attributes: dict[str, Any] = {"seen": [1], "mean": torch.zeros(2)}
    host, begins, drawn = Host(PeerError("rank 1")), list[Any](), list[float]()

    def run() -> str:
        begins.append(host.recovery.at_start({"callback": attributes}, "cpu").get("callback"))
        attributes["seen"].append(2)
        drawn.append(torch.rand(()).item())
        attributes["mean"] += 1
        return host.run()

    host.call(run)
    assert begins[0] is None
    assert (begins[1]["seen"], begins[1]["mean"].tolist()) == ([1], [0, 0])
    assert drawn[1] == drawn[0], "the random state is that of the begin, too"
    host.errors.append(PeerError("rank 2"))
    host.call(run)
    assert begins[3]["seen"] == [1, 2, 2], "a later call has a begin of its own"


def test_a_call_that_is_over_everywhere_returns_although_a_process_has_died_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(flag: bool, doing: str) -> None:
        raise PeerError(doing)

    monkeypatch.setattr(recovery, "any_rank", lose)
    monkeypatch.setattr(recovery, "form_anew", lambda error: True)
    host = Host()
    assert host.call() == "done"
    assert (host.begun_again, host.followed) == (0, 1)


@pytest.mark.parametrize(
    ("own", "others", "is_over"),
    [
        (2, [2], True),
        (2, [1], False),
        (2, [2, 1], False),
        (2, [3], True),  # it has returned, so all had come to the end
        (2, [2, 0], False),  # a new process has the call before it
        (1, [1], False),
        (3, [2], False),
        (4, [4, 5], True),
    ],
)
def test_a_call_is_over_if_nobody_is_in_it(
    monkeypatch: pytest.MonkeyPatch, own: int, others: list[int], is_over: bool
) -> None:
    monkeypatch.setattr(survivors, "_position", own)
    assert survivors._is_over([own, *others]) == is_over
    assert survivors._position == (own if is_over or own % 2 else own - 1)
