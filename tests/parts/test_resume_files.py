"""What of a module a file of Resume has beside its parameters, and when one is written."""

from __future__ import annotations

import copy
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.checkpoints.resume import Every, Interval
from ddp_callbacks.checkpoints.saved_attributes import attributes_of, load_attributes
from ddp_callbacks.data.attributes import changed, checksums_of

CPU = torch.device("cpu")


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.outputs: list[torch.Tensor] = []
        self.scores: dict[str, list[Any]] = {"all": []}
        self.seen = 0


def changed_by(changes: dict[str, Any]) -> dict[str, Any]:
    module = Collecting()
    before = checksums_of(attributes_of(module))
    vars(module).update(changes)
    return changed(attributes_of(module), before)


def load(module: nn.Module, of_ranks: list[Any], world_size: int, rank: int = 0) -> None:
    load_attributes(module, LocalStates(of_ranks, rank, world_size), CPU)


def containers() -> list[Any]:
    of_lists = defaultdict(list, {"a": [torch.ones(2)[0].item()]})
    return [deque([5], 2), of_lists, Counter("aab"), OrderedDict(z=1, a=2), {"set", "of"}, frozenset({1, (2, 3)})]


def test_only_plain_attributes_that_have_changed_are_saved() -> None:
    """Plain attributes that a fit changes go on."""
    module = Collecting()
    module.steps, module.weights, module.same = [1, (2.0, "text"), *containers()], [module.layer.weight], 3
    module.layer.more = nn.Module()
    before = checksums_of(attributes_of(module))
    assert changed(attributes_of(module), before) == {}
    with torch.no_grad():
        module.layer.weight.add_(1.0)  # of a list that a copy would part from the module
    module.steps.append(None)
    module.lock, module.seen = object(), 7
    file, steps = io.BytesIO(), list(module.steps)
    torch.save(changed(attributes_of(module), before), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved.keys() == {"steps", "seen"} and saved["seen"] == 7
    module.steps.clear()
    load(module, [saved], 1)
    assert module.steps == steps and list(map(type, module.steps)) == list(map(type, steps))
    assert module.steps[2].maxlen == 2 and module.steps[3]["new"] == []


class Average:
    """An average of a model, as a module and as tensors; keeps the model, too."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow = model, copy.deepcopy(model)
        self.shadow.register_buffer("steps", torch.zeros(()))
        self.tensors = {name: each.detach().clone() for name, each in model.named_parameters()}

    def move(self) -> None:
        with torch.no_grad():
            for each in [*self.shadow.parameters(), *self.shadow.buffers(), *self.tensors.values()]:
                each.add_(1.0)

    def content(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in [*self.shadow.state_dict().values(), *self.tensors.values()]]


@pytest.mark.parametrize("owner", [Average, lambda model: nn.Sequential(model)], ids=["an object", "a module"])
def test_an_average_of_the_model_in_an_object_goes_on(owner: Callable[[nn.Module], Any]) -> None:
    models = [nn.Linear(120, 100) for _ in range(2)]  # more than an object that is no model's may keep
    owners, averages = [owner(model) for model in models], []
    for each, model in zip(owners, models, strict=True):
        if isinstance(each, nn.Module):
            each.average = Average(model)
        averages.append(getattr(each, "average", each))
    before = checksums_of(attributes_of(owners[0]))
    averages[0].move()
    averages[0].tensors = averages[0].tensors if isinstance(owners[0], nn.Module) else {}
    saved = changed(attributes_of(owners[0]), before)
    assert not any(name.startswith(("model", "average.model")) for name in saved)
    load(owners[1], [saved], 1)
    assert all(map(torch.equal, averages[0].content(), averages[1].content()))


@pytest.mark.parametrize("saved_on", [1, 2])
def test_a_generator_of_a_module_draws_on_after_a_cut_on_another_number_of_processes(saved_on: int) -> None:
    module, torchs, pythons = Collecting(), torch.Generator(), random.Random(1)
    module.torchs, module.pythons = torchs, pythons
    before = checksums_of(attributes_of(module))
    torch.rand(3, generator=torchs), pythons.random()
    saved, expected = changed(attributes_of(module), before), (torch.rand(1, generator=torchs), pythons.random())
    torch.rand(5, generator=torchs), pythons.random()
    load(module, [saved] * saved_on, 3)
    assert (torch.rand(1, generator=torchs), pythons.random()) == expected
    assert (module.torchs, module.pythons) == (torchs, pythons)


def test_a_generator_that_is_not_there_when_a_run_resumes_is_named() -> None:
    saved = changed_by({"own": torch.Generator()})
    with pytest.warns(UserWarning, match=r"Collecting\.own: the generator starts again\. Make it in __init__"):
        load(Collecting(), [saved], 1)


def test_what_a_single_process_had_is_kept_on_several_and_named() -> None:
    module = Collecting()
    with pytest.warns(UserWarning, match=r"^Collecting\.ratio: each process has now what the only process"):
        load(module, [changed_by({"ratio": 0.5, "seen": 3})], 2)
    assert (module.ratio, module.seen) == (0.5, 3)


def test_attributes_that_another_number_of_processes_cannot_have_are_named() -> None:
    """A warning names attributes that another number can't have."""
    module = Collecting()
    module.seen = 3
    two = [changed_by({"seen": 3, "scores": {"all": [1]}, "ratio": 0.5}), changed_by({"seen": 4, "ratio": 0.5})]
    with pytest.warns(UserWarning, match=r"^Collecting\.scores, Collecting\.seen: each of the 2 processes") as caught:
        load(module, two, 3)
        load(module, two, 3, rank=1)  # rank 0 alone says so
    assert len(caught) == 1
    assert (module.seen, module.ratio) == (3, 0.5)


@pytest.mark.parametrize(
    ("every", "expected"), [(timedelta(seconds=10), [20, 40]), (15, [15, 30]), (None, [10, 20, 30, 40])]
)
def test_a_checkpoint_is_written_when_it_is_due(
    every: Every, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`every=` counts batches, epochs or minutes."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    interval, written = Interval(every), []
    for batch in range(1, 41):  # of half a second; an epoch has ten
        now[0] += 0.5
        if interval.is_due(is_batch=True, is_epoch_end=batch % 10 == 0):
            written.append(batch)
            interval.note_written()
    assert written == expected


@pytest.mark.parametrize("first", [1e-7, 1e-3, 0.5])
def test_a_checkpoint_is_on_time_also_if_the_first_batch_takes_another_time(
    first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    interval = Interval(timedelta(seconds=1))
    now[0] += first
    while not interval.is_due(is_batch=True, is_epoch_end=False):
        now[0] += 0.03
    assert 1 <= now[0] < 1.04
