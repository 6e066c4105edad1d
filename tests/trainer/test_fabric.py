"""Loops of Lightning Fabric: N processes give the numbers of one, and what else the strategy promises."""

from __future__ import annotations

import ast
import contextlib
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fabric_loops import (
    CLASSES,
    FEATURES,
    SCENARIOS,
    ahead,
    data,
    evaluate,
    fabric,
    loader,
    network,
    quiet,
    resume,
    save,
    sgd,
    train,
    values,
)
from kit.compare import assert_equal
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from trainer_cases import OURS, TWO, Bodies, message_of, on_one
from ways import RELATIVE, Way, alone, in_each, prove, results

from ddp_callbacks import get_rank
from ddp_callbacks.data import loop_variables
from ddp_callbacks.data.gathered import comprehensions_in, gathered_in
from ddp_callbacks.data.shares import Share
from ddp_callbacks.lightning import CallbackFabricStrategy

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)
WAYS = {
    "two": Way(),
    "gloo": Way(gloo=True, tier="wide"),
    "three on two hosts": Way(3, layout=(2, 1), tier="wide"),
}


@in_each("fabric_loops", WAYS)
def test_a_loop_of_fabric_in_any_way_has_the_numbers_of_one_process(way: Way, name: str) -> None:
    """A Fabric loop on N processes gives one process's numbers."""
    prove("fabric_loops", way, name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_world_of_one_is_bit_for_bit_fabric_without_us(name: str) -> None:
    """On one process Fabric's loop keeps every bit."""
    assert_equal(results("fabric_loops", Way(1))[0][name], alone("fabric_loops", name)[0], relative=0.0)


# --- what two processes see, each case on both ------------------------------------------------------------------------


@WORLD.on(TWO)
def test_what_a_loop_asks_the_processes_is_exact() -> None:
    """Fabric's collectives, decisions and `rank_zero_first` are exact."""
    made = fabric(OURS)
    rank = made.global_rank
    own = torch.tensor([rank + 3, 1])
    floats = torch.tensor([rank + 1.0])
    assert made.all_reduce(own.clone()).tolist() == [3.5, 1.0]
    assert made.all_reduce(own.clone(), reduce_op="sum").tolist() == [7, 2]
    assert made.all_reduce(own.clone(), reduce_op="max").tolist() == [4, 1]
    assert made.all_reduce(floats) is not None and floats.tolist() == [1.5], "in place"
    gathered = made.all_gather({"rank": rank, "own": own})
    assert (gathered["rank"].tolist(), gathered["own"].tolist()) == ([0, 1], [[3, 1], [4, 1]])
    assert made.broadcast([rank, "text"], src=1) == [1, "text"]
    assert not made.strategy.reduce_boolean_decision(rank == 0)
    assert made.strategy.reduce_boolean_decision(rank == 0, all=False)
    unlike = message_of(lambda: made.all_gather(torch.ones(rank + 2)))
    assert "MismatchError: all_gather needs tensors of the same shape, got [[2], [3]] by rank" in unlike
    first = torch.ones(1, requires_grad=True)
    made.all_gather(first * (rank + 1), sync_grads=True).sum().backward()
    assert first.grad.item() == 2 * (rank + 1)
    with made.rank_zero_first():
        now = torch.tensor([time.monotonic()], dtype=torch.float64)
    before, after = made.all_gather(now).flatten().tolist()
    assert before < after


class Twice(nn.Module):
    """Has a method of its own, and a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(x), y)


@WORLD.as_on_one()
def test_the_model_is_not_wrapped_and_its_methods_train_it(strategy: str) -> Any:
    """Fabric's unwrapped model trains by its own methods."""
    made = fabric(strategy)
    torch.manual_seed(1)
    module = Twice()
    model, optimizer = made.setup(module, sgd(module))
    for x, y in made.setup_dataloaders(loader()):
        made.backward(model.loss(x, y))
        optimizer.step()
        optimizer.zero_grad()
    assert model.module is module and type(module) is Twice and list(model.state_dict()) == list(module.state_dict())
    bypassed = message_of(model(x).sum().backward)
    assert strategy != OURS or "requires you to call `fabric.backward(loss)` instead of `loss.backward()`" in bypassed
    return values(module)


class KeepsOutputs(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES, dtype=torch.float64)
        self.outputs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outputs.append(super().forward(x).detach())
        return super().forward(x)


@WORLD.on(TWO)
def test_a_module_s_list_has_no_batch_of_which_a_rank_has_no_sample() -> None:
    made, model = fabric(OURS), KeepsOutputs()
    wrapped, optimizer = made.setup(model, sgd(model))
    train(made, made.setup_dataloaders(loader(15, 7)), wrapped, optimizer, epochs=1)
    assert [len(each) for each in model.outputs] == ([3, 3] if get_rank() else [4, 4, 1])


@WORLD.on(TWO)
def test_a_loop_that_divides_the_batch_size_itself_is_named() -> None:
    made = fabric(OURS)
    batches = loader(10, 4 // made.world_size)
    with pytest.warns(
        UserWarning, match="divides_the_batch_size_itself_is_named .* reads world_size before the loaders"
    ):
        made.setup_dataloaders(batches)
    made.setup_dataloaders(batches)


def summed_by_hand(rows: int = 13) -> tuple[float, int]:
    made, total, batches, seen = fabric(OURS), 0.0, 0, 0
    for x, _ in made.setup_dataloaders(loader(rows, 4)):
        total += x.sum()
        batches += 1
        seen += len(x)
    return float(total) / batches, seen


def gathering(*names: str) -> Any:
    """In place of what finds the variables that a program gathers, and its comprehensions: those of this file."""
    made = comprehensions_in([ast.parse(Path(__file__).read_text())])
    return lambda: SimpleNamespace(has=lambda name, code: name in names, comprehensions=made)


@WORLD.on(TWO)
def test_a_sum_that_a_loop_keeps_is_named_if_nothing_gathers_it_or_it_has_a_padding_batch() -> None:
    texts = []
    for gathered, asks in (([], False), (["other"], False), (["total", "seen"], False), (["total", "seen"], True)):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setattr(loop_variables, "Gathered", gathering(*gathered))
            patch.setattr(loop_variables, "_asks_for_shares", lambda asks=asks: asks)
            summed_by_hand()
        texts.append([str(each.message).partition(",")[0] for each in caught if "itself" in str(each.message)])
    named = "each process collects in summed_by_hand.seen"
    padded = "rank 1 had no sample of a batch in the loop of summed_by_hand"
    assert texts == ([[named], [named], [padded], []] if get_rank() == 0 else [[], [], [], []])


@WORLD.on(TWO)
def test_a_count_of_samples_is_named_where_all_processes_have_as_many() -> None:
    # A learning rate that followed it had other values than on one process, and nothing told.
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(loop_variables, "Gathered", gathering("total"))
        summed_by_hand(16)
    texts = [str(each.message).partition(" what")[0] for each in caught if "collects" in str(each.message)]
    assert texts == (["each process collects in summed_by_hand.seen"] if get_rank() == 0 else [])


class CountsSamples:
    def __init__(self) -> None:
        self.rows, self.found = 0, {"numbers": 0}

    def run(self, most: int) -> None:
        for x, _ in fabric(OURS).setup_dataloaders(loader(16, 4)):
            self.rows += x.size(0)
            self.found["numbers"] += x.numel()
            if self.rows >= most:
                return


@WORLD.on(TWO)
def test_a_count_in_an_attribute_is_named_also_if_its_loop_ends_early() -> None:
    texts = []
    for most in (100, 4):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setattr(loop_variables, "Gathered", gathering())
            CountsSamples().run(most)
        texts.append([str(each.message).partition(" what")[0] for each in caught if "collects" in str(each.message)])
    named = ["each process collects in run.self.rows, run.self.found"]
    assert texts == ([[], []] if get_rank() else [named, named])


@WORLD.on(TWO)
def test_what_a_comprehension_over_a_loader_makes_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(loop_variables, "Gathered", gathering())
        batches = fabric(OURS).setup_dataloaders(loader(13, 4))
        sum(float(x.sum()) for x, _ in batches)
        for _ in (x for x, _ in batches):
            pass
    texts = [re.sub(r"\d+", "N", str(each.message))[:52] for each in caught if "collects" in str(each.message)]
    assert texts == ([] if get_rank() else ["each process collects in test_fabric.py, line N what"])


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.sum += value
        self.count += count


class Runner:
    """Collects in all that a loop may collect in, and has what is equal on all processes, a time, or of one batch."""

    def __init__(self) -> None:
        self.total, self.batches, self.meter = 0.0, 0, Meter()

    def run(self) -> None:
        made, losses, row, shown = fabric(OURS), list[float](), {"of": {"sum": 0.0}}, [0.0, 0.0]
        table, inner = torch.zeros(3), 0.0

        def add(number: float) -> None:
            nonlocal inner
            inner += number

        meter, batch_time, kept = Meter(), Meter(), torch.zeros(4)
        batches = made.setup_dataloaders(loader(13, 4))
        for number, (x, _) in enumerate(batches):
            of_batch = x.sum()
            parts = [float(each) for each in x[:, 0]]
            self.batches += 1
            shown[1] = float(number)
            losses.append(float(of_batch))
            row["of"]["sum"] += losses[-1]
            table = table + of_batch
            add(losses[-1])
            kept[number] = of_batch
            self.total += parts[0]
            self.meter.update(losses[-1], len(x))
            meter.update(losses[-1], len(x))
            batch_time.update(losses[-1], 1)


@WORLD.on(TWO)
def test_what_a_loop_collects_in_meters_lists_and_arrays_is_named() -> None:
    # Only plain variables were: the usual AverageMeter, and a list of losses, were silent.
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(loop_variables, "Gathered", gathering())
        Runner().run()
    names = [set(re.findall(r"run\.([\w.]+)", str(each.message))) for each in caught if "itself" in str(each.message)]
    expected = {"losses", "row", "kept", "meter", "self.total", "self.meter", "table", "inner"}
    assert names == ([expected] if get_rank() == 0 else [])


def decayed_by_a_part(**options: Any) -> Any:
    """The learning rate follows a loss of each process's own."""
    made, module = fabric(OURS), network()
    model, optimizer = made.setup(module, sgd(module))
    for _ in range(2):
        train(made, made.setup_dataloaders(loader(13, 4)), model, optimizer, epochs=1)
        optimizer.param_groups[0]["lr"] *= 1 + get_rank() * options["by_part"]
    return values(module)


@WORLD.on(TWO)
def test_models_that_differ_between_the_processes_are_named_after_a_loop() -> None:
    # A scheduler that read a part's loss made two models, and nothing told.
    decayed_by_a_part(by_part=0.0)
    text = message_of(lambda: decayed_by_a_part(by_part=0.5))
    says = "the ranks hold different models after a loop over a loader:\n  optimizer group 0: lr: "
    assert re.search(rf"{says}[\d.]+ on rank 0; [\d.]+ on rank 1\n  parameter 0.weight: rank 1", text), text


GATHERS = """
def meet(value):
    return fabric.all_reduce(value)

def validate(loader):
    total = count = 0
    for x, y in loader:
        total += loss(x, y).item()
        count += len(x)
    return total, count

shown = meet(loss.detach())
found, number = validate(loader)
fabric.print(other / shown)
row = {"found": found}
parts.append(number)
dist.all_gather_object(out, [row, *parts])

def train(meter, loader):
    losses = []
    for x, y in loader:
        losses.append(loss(x, y))
        meter.update(len(x))

def evaluate():
    losses = [1.0]
    return fabric.all_reduce(losses)

train(watch, loader)
fabric.all_reduce(watch.sum)

def count(loader):
    seen = rows = 0
    for x, y in loader:
        labels = fabric.all_reduce(y).flatten()
        seen += len(labels)
        rows += len(y)
"""


def test_variables_that_a_program_gathers_are_found_through_functions_and_lists() -> None:
    found = gathered_in([ast.parse(GATHERS)], {"all_reduce", "all_gather_object"}, {"all_reduce"})
    in_functions = {"meet.value", "validate.total", "validate.count"}
    assert {"loss", "found", "number", "row", "parts"} | in_functions <= found
    assert {"evaluate.losses", "watch", "train.meter"} <= found
    assert {"shown", "count.labels", "count.seen"} <= found
    assert found.isdisjoint({"other", "count.rows", "train.losses"})


@WORLD.on(TWO)
def test_a_loader_is_divided_unless_the_user_says_otherwise() -> None:
    """The strategy divides Fabric's loaders unless you forbid it."""
    made = fabric(OURS)
    batches = loader(10, 4)
    alone = made.setup_dataloaders(batches, use_distributed_sampler=False)
    divided = made.setup_dataloaders(batches)
    sampled = DataLoader(data(10), 4, sampler=DistributedSampler(data(10), shuffle=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = made.setup_dataloaders(sampled)
    assert [[len(x) for x, _ in each] for each in (alone, divided, own)] == [[4, 4, 2], [2, 2, 1], [4, 1]]
    assert [made.strategy.share for _ in divided] == [Share(2, 4), Share(2, 4), Share(1, 2)]
    assert len(divided) == 3 and divided.dataset is batches.dataset
    texts = [str(each.message) for each in caught]
    warned = [text.startswith("The loader of TensorDataset has a DistributedSampler") for text in texts]
    assert warned == ([True] if made.global_rank == 0 else [])


def weighed_by(strategy: Any, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], **options: Any) -> Any:
    made = fabric(strategy)
    module = network()
    model, optimizer = made.setup(module, sgd(module))
    for x, y in made.setup_dataloaders(loader(shuffle=True), **options):
        made.backward(loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return values(module)


def counted(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean over the targets that count, which may be none."""
    return nn.functional.cross_entropy(logits, y.where(y > 0, -100))


def summed(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, y, reduction="sum") / 7


@WORLD.as_on_one()
def test_a_loop_s_loss_is_weighed_by_what_it_is_the_mean_over(strategy: str) -> Any:
    """`weight=` and `reduction="sum"` weigh a Fabric loop's loss."""

    def given(**options: Any) -> Any:
        return CallbackFabricStrategy(**options) if strategy == OURS else strategy

    return [
        weighed_by(given(weight=lambda batch: (batch[1] > 0).sum()), counted),
        weighed_by(given(reduction="sum"), summed),
        weighed_by(strategy, nn.functional.cross_entropy, use_distributed_sampler=False),
    ]


@WORLD.as_on_one()
def test_per_process_batches_of_a_loop_are_those_of_larger_ones(strategy: str) -> Any:
    chosen, size = (CallbackFabricStrategy("per_process"), 4) if strategy == OURS else (strategy, 8)
    made = fabric(chosen)
    module = network()
    return train(made, made.setup_dataloaders(loader(29, size)), *made.setup(module, sgd(module)))


@WORLD.as_on_one()
def test_a_loop_may_skip_batches_that_are_divided_unlike_the_next(strategy: str) -> Any:
    made = fabric(strategy)
    module = network()
    model, optimizer = made.setup(module, sgd(module))
    for number, (x, y) in enumerate(made.setup_dataloaders(loader(13, 4))):
        if number in (0, 2):
            continue
        made.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return values(module)


def left_out(leaves_out: Callable[[int, int], bool], last: int = 3) -> str:
    """What is said of a loop that leaves out batches by the size of a part, or their number."""
    made = fabric(OURS)
    model = made.setup(network())
    batches = made.setup_dataloaders(loader(20, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for number, (x, y) in enumerate(batches):
                if number == last:
                    break
                if not leaves_out(len(x), number):
                    made.backward(nn.functional.cross_entropy(model(x), y))
    text = "".join(str(each.message) for each in caught if "has computed no gradient" in str(each.message))
    return re.sub(r".*\((.*) samples\), (\w+).*", r"\1 \2", text)


@WORLD.on(TWO)
def test_parts_that_a_loop_leaves_out_because_they_are_small_are_named() -> None:
    small, first = left_out(lambda samples, _: samples < 3), left_out(lambda _, number: number == 1)
    ended, whole = left_out(lambda *_: False, last=2), left_out(lambda samples, _: samples < 8)
    assert [small, first, ended, whole] == (["2 of 4 but", "", "", "4 of 8 nor"] if get_rank() == 0 else [""] * 4)


def zipped(made: Fabric, model: Any) -> None:
    first, second = made.setup_dataloaders(loader(6, 3), loader(8, 4, 9))
    for (x, y), (other, labels) in zip(first, second, strict=True):
        loss = nn.functional.cross_entropy
        made.backward(loss(model(x), y) + loss(model(other), labels))


def changed_and_drawn_ahead(made: Fabric, model: Any) -> None:
    for x, y in ahead(made.setup_dataloaders(loader(11, 4)), 1):
        made.backward(nn.functional.cross_entropy(model(x + 1), y))


def validated_with_gradients(made: Fabric, model: Any) -> None:
    batches, few = made.setup_dataloaders(loader(8, 4), loader(6, 3, 9))
    for x, y in batches:
        evaluate(model, few)
        made.backward(nn.functional.cross_entropy(model(x), y))


@WORLD.on(TWO)
def test_a_loss_of_batches_that_are_divided_unlike_is_refused_with_the_remedy() -> None:
    """A loss that may be of unlike divided batches raises an error."""
    rank = get_rank()
    shares = {
        zipped: f"2 batches, which the processes have divided in different proportions (here {2 - rank} of 3, 2 of 4)",
        changed_and_drawn_ahead: f"3 batches, which the processes have divided in different proportions (here 2 of 4, "
        f"2 of 4, {2 - rank} of 3)",
        validated_with_gradients: f"3 batches, which the processes have divided in different proportions (here 2 of 4, "
        f"{2 - rank} of 3, {2 - rank} of 3)",
    }
    for loop, text in shares.items():
        made = fabric(OURS)
        model: Any = made.setup_module(network())
        said = message_of(lambda loop=loop, made=made, model=model: loop(made, model))
        assert f"ConfigurationError: the loss of this backward may be of {text}" in said
    assert "call fabric.backward, and only then draw the next; or give the model the batch's own tensors" in said
    assert "drop_last=True. Draw batches that are only evaluated inside torch.no_grad()" in said


@WORLD.on(TWO)
def test_gradients_stay_on_the_process_where_all_models_are_named() -> None:
    """`no_backward_sync` keeps gradients of named models local."""
    made = fabric(OURS)
    first, second = (made.setup_module(network(seed)) for seed in (1, 2))
    for names, are_equal in (([first], True), ([first, second], False), ([], True)):
        for x, y in made.setup_dataloaders(loader(8, 8)):
            with contextlib.ExitStack() as stack:
                for model in names:
                    stack.enter_context(made.no_backward_sync(model))
                made.backward(nn.functional.cross_entropy(first(x) + second(x), y))
        gradients = [made.all_gather(next(model.parameters()).grad) for model in (first, second)]
        assert [torch.equal(*each) for each in gradients] == [are_equal] * 2


@WORLD.on(TWO)
def test_a_model_in_two_fabrics_is_refused_until_the_first_lets_it_go() -> None:
    """A model trains in one `Fabric` at a time."""
    first, second, module = fabric(OURS), fabric(OURS), network()
    first.setup(module, sgd(module))
    said = message_of(lambda: second.setup_module(module))
    assert "has a hook of register_post_accumulate_grad_hook" in said and "close" in said
    first.strategy.teardown()
    model: Any = second.setup_module(module)
    second.backward(model(data(4).tensors[0]).sum())


@WORLD.runs(TWO)
def random_states() -> Any:
    made = Fabric(accelerator="cpu", devices=1, strategy=OURS)
    torch.manual_seed(made.global_rank)  # before the processes meet, as without a seed
    made.launch()
    found = {"after launch": torch.rand(1).item(), "inside": [], "order": []}
    for x, _ in made.setup_dataloaders(loader(4, 4, shuffle=True)):
        found["inside"].append(torch.rand(1).item())
        found["order"].append(made.all_gather(x).flatten(0, 1)[:, 0])
    return found | {"afterwards": torch.rand(1).item()}


def test_all_processes_draw_what_one_draws_whatever_their_seeds_were_before_they_met() -> None:
    """Fabric's processes draw one process's numbers, from rank 0's random state."""
    first, second = WORLD.returned(random_states)
    torch.manual_seed(0)
    expected: dict[str, Any] = {"after launch": torch.rand(1).item()}
    expected["order"] = [x[:, 0] for x, _ in DataLoader(data(4), 4, shuffle=True)]
    expected |= {"inside": [torch.rand(1).item()], "afterwards": torch.rand(1).item()}
    assert_equal(first, {name: expected[name] for name in first}, 0.0)
    assert_equal(second, {name: expected[name] for name in second}, 0.0)


@WORLD.on(TWO)
def test_batch_norm_gets_two_samples_and_merged_statistics() -> None:
    made = fabric(OURS)
    rank = made.global_rank
    module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)).double()
    batches = made.setup_dataloaders(loader(11, 8))  # set up before the model
    model, _ = made.setup(module, sgd(module))
    shares = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, _ in batches:
            shares.append(made.strategy.share.local)
            made.backward(model(x).sum())
    says = (
        "layer 0 normalizes by each process's part of the batch (BatchNorm), not as one process: BatchNormSynchronizer("
    )
    texts = [str(each.message) for each in caught if "BatchNorm" in str(each.message)]
    assert [text.startswith(says) for text in texts] == [[True], []][rank]
    assert shares == [[4, 3], [4, 0]][rank]
    assert torch.equal(*made.all_gather(module[0].running_mean))
    before = module[0].running_mean.clone()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a batch of 3 samples has fewer than two for each of 2 processes")
        for x, _ in made.setup_dataloaders(loader(3, 3)):
            model(x)
    assert torch.equal(before, module[0].running_mean) == (rank == 1), "padding does not count"
    model.eval()
    assert [len(x) for x, _ in made.setup_dataloaders(loader(3, 3))] == [[2], [1]][rank], "an evaluation needs no two"


@WORLD.on(TWO)
def test_a_cross_entropy_whose_divisor_does_not_follow_the_samples_is_named_once() -> None:
    def said_of(ignored: int, **options: Any) -> list[str]:
        made = Fabric(accelerator="cpu", strategy=CallbackFabricStrategy(**options))
        made.launch()
        module = network()
        model, optimizer = made.setup(module, sgd(module))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x, y in made.setup_dataloaders(loader(24, 8)):
                made.backward(nn.functional.cross_entropy(model(x), y, ignore_index=ignored) / 2 + model(x).mean())
                optimizer.step()
        return [str(each.message) for each in caught if "cross entropy" in str(each.message)]

    texts = said_of(1)
    says = r"the cross entropy of backward [124] is a mean .*: \d for 4 samples here, \d for 4 on rank 1"
    assert len(texts) == (get_rank() == 0) and all(re.match(says, text) for text in texts)
    assert said_of(-100) == said_of(1, weight=lambda batch: (batch[1] != 1).sum()) == []


PRECISIONS: dict[Any, float] = {"32-true": 1e-4, "64-true": 1e-4, "bf16-mixed": 0.3, "bf16-true": 1.0}


@WORLD
def in_each_precision(strategy: str = OURS) -> Any:
    found = {}
    x, y = data(29).tensors
    for precision in PRECISIONS:
        made, module = fabric(strategy, precision=precision), network().float()
        model, optimizer = made.setup(module, sgd(module))
        train(made, made.setup_dataloaders(DataLoader(TensorDataset(x.float(), y), 7)), model, optimizer)
        found[precision] = nn.utils.parameters_to_vector(module.parameters()).detach()
    return found


def test_precisions_of_a_loop_are_fabric_s() -> None:
    """Fabric's precisions work."""
    expected, (first, second) = on_one(in_each_precision), WORLD.returned(in_each_precision)
    for precision, relative in PRECISIONS.items():
        found, right = first[precision], expected[precision]
        assert found.dtype == right.dtype and torch.equal(found, second[precision])
        assert (found.double() - right.double()).norm() < relative * right.double().norm(), precision


@WORLD.runs(TWO)
def with_a_comm_hook() -> Any:
    return weighed_by(CallbackFabricStrategy(comm_hook=bf16_compress_hook), nn.functional.cross_entropy)


def test_a_comm_hook_is_used_in_a_loop() -> None:
    """Fabric's strategy takes `comm_hook=`."""
    with quiet():
        expected = weighed_by("auto", nn.functional.cross_entropy)
    for found in WORLD.returned(with_a_comm_hook):
        error = max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))
        assert 1e-8 < error < 1e-2


@WORLD.runs(TWO)
def saved_and_resumed() -> Any:
    of_one = fabric("auto")
    save(of_one, path := f"of one {get_rank()}.pt")
    made = fabric(OURS)
    save(made, "of two.pt")
    made.barrier()
    return resume(made, path), Path("of two.pt").read_bytes()


def test_checkpoints_of_a_loop_move_between_one_process_and_two(tmp_path: Path) -> None:
    """A Fabric checkpoint moves between one process and two."""
    (first, saved), (second, _) = WORLD.returned(saved_and_resumed)
    of_one, of_two = tmp_path / "of one.pt", tmp_path / "of two.pt"
    of_two.write_bytes(saved)
    with quiet():
        made = fabric("auto")
        save(made, str(of_one))
        expected = resume(made, str(of_one))
        assert_equal([first, second, resume(made, str(of_two))], [expected] * 3, RELATIVE)
