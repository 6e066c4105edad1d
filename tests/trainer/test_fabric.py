"""Loops of Lightning Fabric: N processes give the numbers of one, and what else the strategy promises."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fabric_loops import (
    CLASSES,
    FEATURES,
    SCENARIOS,
    data,
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
from kit.commands import DEADLINE, TWO_PROCESSES, run, start
from kit.compare import assert_equal
from kit.paths import FOLDERS
from kit.ranks import HOSTNAME, Nursery, free_port, noting_errors, run_distributed
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import FSDPPrecision
from shared_worlds import TWO, World
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from ways import RELATIVE, Way, alone, in_each, prove, results

from ddp_callbacks import get_rank
from ddp_callbacks.data.shares import Share
from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.lightning import CallbackFabricStrategy

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

OURS = "ddp_callbacks"
WORLD = World(__name__, quiet)
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


def message_of(function: Callable[[], Any], kind: type[Exception] = ConfigurationError) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


@WORLD
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
    unlike = message_of(lambda: made.all_gather(torch.ones(rank + 2)), MismatchError)
    assert "all_gather needs tensors of the same shape, got [[2], [3]] by rank" in unlike
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


def train_by_a_method(strategy: str) -> Any:
    made = fabric(strategy)
    torch.manual_seed(1)
    module = Twice()
    model, optimizer = made.setup(module, sgd(module))
    for x, y in made.setup_dataloaders(loader()):
        made.backward(model.loss(x, y))
        optimizer.step()
        optimizer.zero_grad()
    bypassed = ""
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        bypassed = str(error)
    same = model.module is module and type(module) is Twice and list(model.state_dict()) == list(module.state_dict())
    return same, bypassed, values(module)


@WORLD.runs(TWO)
def a_method_of_the_model() -> Any:
    return train_by_a_method(OURS)


def test_the_model_is_not_wrapped_and_its_methods_train_it() -> None:
    """Fabric's unwrapped model trains by its own methods."""
    with quiet():
        _, _, expected = train_by_a_method("auto")
    for same, bypassed, found in WORLD.returned(a_method_of_the_model):
        assert same
        assert "requires you to call `fabric.backward(loss)` instead of `loss.backward()`" in bypassed
        assert_equal(found, expected, RELATIVE)


@WORLD
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


@WORLD.runs(TWO)
def losses_weighed() -> Any:
    return [
        weighed_by(CallbackFabricStrategy(weight=lambda batch: (batch[1] > 0).sum()), counted),
        weighed_by(CallbackFabricStrategy(reduction="sum"), summed),
        weighed_by(OURS, nn.functional.cross_entropy, use_distributed_sampler=False),
    ]


def test_a_loop_s_loss_is_weighed_by_what_it_is_the_mean_over() -> None:
    """`weight=` and `reduction="sum"` weigh a Fabric loop's loss."""
    with quiet():
        expected = [weighed_by("auto", loss) for loss in (counted, summed, nn.functional.cross_entropy)]
    for found in WORLD.returned(losses_weighed):
        assert_equal(found, expected, RELATIVE)


@WORLD.runs(TWO)
def whole_batches_in_turn() -> Any:
    made = fabric(CallbackFabricStrategy("per_process"))
    module = network()
    model, optimizer = made.setup(module, sgd(module))
    return train(made, made.setup_dataloaders(loader(29, 4)), model, optimizer)


def test_per_process_batches_of_a_loop_are_those_of_larger_ones() -> None:
    with quiet():
        made = fabric("auto")
        model = network()
        expected = train(made, made.setup_dataloaders(loader(29, 8)), *made.setup(model, sgd(model)))
    for found in WORLD.returned(whole_batches_in_turn):
        assert_equal(found, expected, RELATIVE)


@WORLD
def test_a_loss_of_batches_that_are_divided_unlike_is_refused_with_the_remedy() -> None:
    """A loss over unlike divided batches raises an error."""
    made = fabric(OURS)
    model: Any = made.setup_module(network())
    first, second = made.setup_dataloaders(loader(6, 3), loader(8, 4, 9))

    def joint() -> None:
        for (x, y), (other, labels) in zip(first, second, strict=True):
            loss = nn.functional.cross_entropy
            made.backward(loss(model(x), y) + loss(model(other), labels))

    said = message_of(joint)
    assert "the loss of this backward is of 2 batches, which the processes have divided in different" in said
    assert f"(here {2 - made.global_rank} of 3, 2 of 4)" in said
    assert "call fabric.backward, and only then draw the next; or choose batch sizes that are multiples" in said


@WORLD
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


@WORLD
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


def test_a_loop_draws_its_data_alike_and_its_dropout_apart() -> None:
    """Fabric's processes draw data alike and dropout apart."""
    first, second = WORLD.returned(random_states)
    assert first["after launch"] == second["after launch"] and first["afterwards"] == second["afterwards"]
    assert first["inside"] != second["inside"]
    torch.manual_seed(0)
    drawn = [torch.rand(1).item()]
    order = [x[:, 0] for x, _ in DataLoader(data(4), 4, shuffle=True)]
    drawn += [torch.rand(1).item(), torch.rand(1).item()]
    assert [first["after launch"], *first["inside"], first["afterwards"]] == drawn
    assert_equal(first["order"], order, 0.0)


@WORLD
def test_batch_norm_gets_two_samples_and_merged_statistics_without_padding() -> None:
    made = fabric(OURS)
    rank = made.global_rank
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)).double()
    batches, few = made.setup_dataloaders(loader(11, 8), loader(3, 3))  # set up before the model
    model, optimizer = made.setup(model, sgd(model))
    shares = []
    for x, y in batches:
        shares.append(made.strategy.share.local)
        made.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    assert shares == [[4, 3], [4, 0]][rank]
    before = model.module[1].running_mean.clone()
    assert torch.equal(*made.all_gather(before))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a batch of 3 samples has fewer than two for each of 2 processes")
        for x, _ in few:
            assert made.strategy.share.local == (0 if rank else 3)
            model(x)
    assert torch.equal(before, model.module[1].running_mean) == (rank == 1)  # of padding there are none
    model.eval()
    assert [len(x) for x, _ in few] == [[2], [1]][rank], "an evaluation needs no two"


def train_with_precision(strategy: str, precision: Any) -> Any:
    made = fabric(strategy, precision=precision)
    module = network().float()
    model, optimizer = made.setup(module, sgd(module))
    x, y = data(29).tensors
    batches = made.setup_dataloaders(DataLoader(TensorDataset(x.float(), y), 7))
    with made.autocast():
        kind = str(model.module(made.to_device(x.to(values(module)[0].dtype))).dtype)
    return kind, str(values(module)[0].dtype), train(made, batches, model, optimizer)


@WORLD.runs(TWO)
def precisions() -> Any:
    return {each: train_with_precision(OURS, each) for each in PRECISIONS}


PRECISIONS: dict[Any, tuple[str, str, float]] = {  # of what a layer returns, of parameters, and relative
    "32-true": ("torch.float32", "torch.float32", 1e-4),
    "64-true": ("torch.float64", "torch.float64", 1e-4),  # Fabric converts what a model returns to float32
    "bf16-mixed": ("torch.bfloat16", "torch.float32", 0.3),
    "bf16-true": ("torch.bfloat16", "torch.bfloat16", 1.0),
}


def test_precisions_of_a_loop_are_fabric_s() -> None:
    """Fabric's precisions work."""
    for precision, (inside, kept, relative) in PRECISIONS.items():
        with quiet():
            expected = train_with_precision("auto", precision)
        first, second = (found[precision] for found in WORLD.returned(precisions))
        assert first[:2] == second[:2] == expected[:2] == (inside, kept)
        assert_equal(first[2], second[2], 0.0)
        for one, other in zip(first[2][1], expected[2][1], strict=True):
            distance = (one.double() - other.double()).norm() / other.double().norm()
            assert distance < relative, (precision, distance)


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": "local"}, 'batch_size must be "global"'),
        ({"reduction": "sum", "weight": len}, "Use one of the two"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
        ({"find_unused_parameters": True}, "CallbackFabricStrategy has no find_unused_parameters: unused parameters"),
        ({"sync": "every_step"}, "CallbackFabricStrategy has no sync."),
    ],
)
def test_settings_of_a_loop_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    """Fabric's strategy refuses impossible settings by name."""
    assert says in message_of(lambda: CallbackFabricStrategy(**options))


def test_plugins_of_fabric_s_other_strategies_are_refused_by_name() -> None:
    def launch() -> None:
        with quiet():
            made = Fabric(accelerator="cpu", devices=1, strategy=OURS, plugins=FSDPPrecision("32-true"))
            made.launch()

    assert message_of(launch).startswith('strategy="ddp_callbacks" does not work with FSDPPrecision: FSDP divides the')


def save_and_resume(folder: str, of_one: str) -> Any:
    with quiet():
        made = fabric(OURS)
        save(made, str(Path(folder) / "of two.pt"))
        return resume(made, of_one)


def test_checkpoints_of_a_loop_move_between_one_process_and_two(tmp_path: Path) -> None:
    """A Fabric checkpoint moves between one process and two."""
    of_one, of_two = tmp_path / "of one.pt", tmp_path / "of two.pt"
    with quiet():
        made = fabric("auto")
        save(made, str(of_one))
        expected = resume(made, str(of_one))
    for found in run_distributed(save_and_resume, 2, str(tmp_path), str(of_one)):
        assert_equal(found, expected, RELATIVE)
    with quiet():
        assert_equal(resume(made, str(of_two)), expected, RELATIVE)


# --- failures ---------------------------------------------------------------------------------------------------------


def fail() -> None:
    with quiet(), noting_errors():
        made = fabric(OURS)
        model, optimizer = made.setup(module := network(), sgd(module))
        for index, (x, y) in enumerate(made.setup_dataloaders(loader())):
            if index == 2 and made.global_rank == 1:
                raise ZeroDivisionError("a bad sample")
            made.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()


def test_a_failure_of_a_loop_reaches_the_other_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """Failures in Fabric loops reach all processes."""
    ranks = nursery.run_watched(fail, 2, tmp_path)
    assert [rank.code for rank in ranks] == [1, 1]
    name, message = ranks[0].notes["error"]
    assert name == "PeerError"
    assert f"rank 1 (host {HOSTNAME}, pid {ranks[1].pid}) failed with ZeroDivisionError: a bad sample" in message
    assert ranks[0].noted_at["error"] - ranks[1].noted_at["error"] < 4 * ranks[0].slowness


@WORLD
def test_ranks_of_a_loop_that_differ_are_told_apart() -> None:
    def train_with(outputs: int = CLASSES, lr: float = 0.1, samples: int = 29) -> None:
        made = fabric(OURS)
        module = nn.Linear(FEATURES, outputs).double()
        model, optimizer = made.setup(module, sgd(module, lr))
        for x, y in made.setup_dataloaders(loader(samples)):
            made.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()

    rank = get_rank()
    for options, says in (
        ({"outputs": CLASSES + rank}, "the model:\n  parameter weight: [3, 6] float64 on rank 0; [4, 6] float64"),
        ({"lr": 0.1 + 0.1 * rank}, "the optimizers:\n  optimizer group 0: lr: 0.1 on rank 0; 0.2 on rank 1"),
        ({"samples": 29 + 8 * rank}, "the TensorDataset dataloader:\n  batches: 5 on rank 0; 6 on rank 1"),
    ):
        assert says in message_of(lambda options=options: train_with(**options), MismatchError)


# --- as scripts -------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
sys.path[:0] = {tests!r}
{imports}
from fabric_loops import loader, network, quiet, sgd, train, values

def work(fabric):
    model = network()
    model, optimizer = fabric.setup(model, sgd(model))
    train(fabric, fabric.setup_dataloaders(loader()), model, optimizer)
    if {fails} and fabric.global_rank == 1:
        raise ZeroDivisionError("a bad sample")
    fabric.barrier()
    total = sum(value.sum() for value in values(model)).item()
    # In one write: two processes share the pipe.
    print(f"rank {{fabric.global_rank}} of {{fabric.world_size}} sum {{total!r}}" + chr(10), end="", flush=True)

if __name__ == "__main__":
    with quiet():
        fabric = Fabric(accelerator="cpu", devices={devices}, strategy={strategy})
        {launch}
"""
LIGHTNING = "import ddp_callbacks.lightning\nfrom lightning.fabric import Fabric"
OTHER = """
import lightning_fabric
import ddp_callbacks.lightning
from ddp_callbacks.lightning import CallbackFabricStrategy
from lightning_fabric import Fabric
assert "lightning.fabric" not in sys.modules
assert issubclass(CallbackFabricStrategy, lightning_fabric.strategies.DDPStrategy)
assert isinstance(CallbackFabricStrategy(), lightning_fabric.strategies.DDPStrategy)
"""
LATER = "import ddp_callbacks.lightning\nimport lightning_fabric\nfrom lightning_fabric import Fabric"
OWN = "from ddp_callbacks.lightning import CallbackFabricStrategy\nfrom lightning.fabric import Fabric"


def write(folder: Path, imports: str, **options: Any) -> Path:
    script = folder / "script.py"
    defaults = {"devices": 1, "strategy": repr(OURS), "launch": "fabric.launch(); work(fabric)", "fails": False}
    script.write_text(SCRIPT.format(tests=list(map(str, FOLDERS)), imports=imports, **(defaults | options)))
    return script


def sum_of_one_process() -> float:
    with quiet():
        made, model = fabric("auto"), network()
        train(made, made.setup_dataloaders(loader()), *made.setup(model, sgd(model)))
    return sum(value.sum() for value in values(model)).item()


LAUNCHED = {"devices": 2, "launch": "fabric.launch(work)"}
FORKED = LAUNCHED | {"strategy": 'CallbackFabricStrategy(start_method="fork")'}
FABRIC_RUN = ["fabric", "run", "--accelerator", "cpu", "--devices", "2", "--main-port", "0"]


@pytest.mark.parametrize(
    ("command", "imports", "options"),
    [
        pytest.param(["python"], LIGHTNING, {"devices": 2}, id="python"),
        pytest.param(["python"], OWN, FORKED, id="python, forked"),
        pytest.param(TWO_PROCESSES, LATER, LAUNCHED, id="torchrun, imported later"),
        pytest.param(
            ["ddprun", "--nproc-per-node", "2"],
            OTHER,
            {"strategy": "'callbacks'"},
            id="ddprun, lightning_fabric",
            marks=[pytest.mark.cold, pytest.mark.night],
        ),
        pytest.param(
            FABRIC_RUN, LIGHTNING, {"devices": 2, "launch": "work(fabric)"}, id="fabric run", marks=pytest.mark.cold
        ),
    ],
)
def test_a_loop_runs_as_a_script(
    request: pytest.FixtureRequest, command: list[Any], imports: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """`ddprun`, `torchrun`, `fabric run` and `python` start Fabric loops."""
    if command[0] == "fabric":
        pytest.importorskip("click")
    script = write(tmp_path, imports, **options)
    command = [free_port() if part == "0" else part for part in command]
    output = run([*command, script], tmp_path, cold=request.node.get_closest_marker("cold") is not None)
    lines = sorted(re.findall(r"rank (\d) of (\d) sum (\S+)", output))
    expected = pytest.approx(sum_of_one_process(), rel=RELATIVE)
    assert [(rank, size) for rank, size, _ in lines] in ([("0", "2"), ("1", "2")], [("0", "2")]), output
    assert [float(total) for _, _, total in lines] == [expected] * len(lines)


@pytest.mark.parametrize("options", [{"devices": 2}, FORKED], ids=["started", "forked"])
def test_a_failure_in_a_process_that_fabric_has_started_ends_all(options: dict[str, Any], tmp_path: Path) -> None:
    script = write(tmp_path, OWN if options is FORKED else LIGHTNING, fails=True, **options)
    with start(["python", script], tmp_path) as process:
        output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0
    assert "ZeroDivisionError: a bad sample" in output
    if options is not FORKED:  # one of two that were forked ends both, before rank 0 can say anything
        assert re.search(r"PeerError: .*rank 1 \(host \S+, pid \d+\) failed with ZeroDivisionError", output)


@pytest.mark.cold
def test_the_command_line_of_fabric_refuses_the_strategy_which_a_script_names(tmp_path: Path) -> None:
    pytest.importorskip("click")
    with start(["fabric", "run", "--strategy", OURS, write(tmp_path, LIGHTNING)], tmp_path, cold=True) as process:
        output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2 and "'ddp_callbacks' is not one of 'ddp'" in output
