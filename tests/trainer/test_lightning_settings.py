"""Settings of a Trainer and of the strategy that change the numbers, or how they are exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.compare import assert_equal
from kit.ranks import live_on_hosts, run_distributed
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader
from trainer_cases import OURS, RELATIVE, Bodies, assert_as_on_one, on_one, quiet
from trainers import Net, Normalized, data, fit, loader

from ddp_callbacks import PowerSGD
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.process_group import resolve_group

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


def floats(precision: str, strategy: str) -> dict[str, torch.Tensor]:
    rows = DataLoader([(x.float(), y) for x, y in data(16)], 8)
    return fit(strategy, Net().float(), rows, precision=precision)["parameters"]


@WORLD
def precisions(strategy: str = OURS) -> Any:
    return {name: floats(name, strategy) for name in ("64-true", "32-true", "bf16-mixed")}


def test_precisions_are_lightning_s() -> None:
    """`32-true`, `64-true` and `bf16-mixed` work as in Lightning."""
    expected = on_one(precisions)["64-true"]
    first, second = WORLD.returned(precisions)
    assert_equal(second, first, 0.0)
    assert_equal(first["64-true"], expected, RELATIVE)
    for name, rtol in (("bf16-mixed", 0.05), ("32-true", 1e-5)):
        for key, value in first[name].items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), expected[key], rtol=rtol, atol=0.01)


class Accumulates(Net):
    """By hand: two backwards without an exchange, a third with one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % 3 < 2:
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(batch) / 3)
        else:
            self.manual_backward(self.loss(batch) / 3)
            optimizer.step()
            optimizer.zero_grad()


@WORLD
def accumulation_by_hand(strategy: str = OURS) -> Any:
    return fit(strategy, Accumulates(), loader(29, 5))["parameters"]


def test_gradients_are_accumulated_by_hand_without_an_exchange() -> None:
    """By hand you accumulate with `toggle_model(sync_grad=False)`."""
    assert_as_on_one(accumulation_by_hand)


@WORLD
def a_divided_optimizer(strategy: str = OURS) -> Any:
    def zero(net: Any) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.05)

    def whole(net: Any) -> Any:
        return torch.optim.Adam(net.parameters(), lr=0.05)

    return fit(strategy, Net(optimizer=zero if strategy == OURS else whole))["parameters"]


def test_an_optimizer_that_divides_its_state_works_as_under_ddp() -> None:
    """`ZeroRedundancyOptimizer` works as under `ddp`."""
    assert_as_on_one(a_divided_optimizer)


@WORLD
def running_statistics() -> Any:
    parameters = fit(OURS, Normalized(), loader(32, 8), max_epochs=1)["parameters"]
    averaged = Normalized()
    fit(OURS, averaged, callbacks=[EMAWeightAveraging(decay=0.7)], max_epochs=2)
    return parameters["layers.0.running_mean"], parameters["layers.0.num_batches_tracked"], averaged.state_dict()


def test_running_statistics_are_those_of_the_whole_data() -> None:
    """Running statistics cover all data, in averaged models, too."""
    (*_, first), (*_, second) = found = WORLD.returned(running_statistics)
    for mean, batches, _ in found:
        torch.testing.assert_close(mean, data(32).tensors[0].mean(0))
        assert batches == 4
    assert any("running_mean" in name for name in first)
    assert_equal(second, first, 0.0)


# --- what is sent -----------------------------------------------------------------------------------------------------


def trained(**options: Any) -> Any:
    torch.manual_seed(0)
    strategy: Any = CallbackStrategy(**options) if options else "auto"
    return fit(strategy, None, loader(32, 8))["parameters"]


SENT: dict[str, dict[str, Any]] = {
    "a hook": {"comm_hook": bf16_compress_hook},
    "bf16": {"compress": "bf16"},
    "PowerSGD": {"compress": PowerSGD(rank=2, start=2)},
}


def on_one_host_and_two() -> Any:
    """What each setting trains on one host, and then on two."""
    with quiet():
        here = {name: trained(**options) for name, options in SENT.items()}
        live_on_hosts((1, 1), resolve_group())
        return here, {name: trained(**options) for name, options in SENT.items()}


def test_a_comm_hook_is_used_and_compression_only_between_hosts() -> None:
    """A Trainer takes `comm_hook=`, and `compress=` between hosts."""
    with quiet():
        exact = trained()
    for here, apart in run_distributed(on_one_host_and_two, 2):
        assert_equal([here["bf16"], here["PowerSGD"]], [exact, exact], RELATIVE)
        for parameters in (here["a hook"], *apart.values()):
            for name, value in parameters.items():
                assert 0 < (value - exact[name]).abs().max() < 0.02, name
