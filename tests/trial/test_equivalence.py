"""A Trial of N processes has the numbers of one: history, parameters, evaluations and predictions, in float64."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import assert_equal
from kit.ranks import run_distributed
from torch.utils.data import DataLoader
from torchbearer import Trial
from trials import SCENARIOS, data, outcome, trial
from ways import RELATIVE, Way, alone, in_each, prove, results

from ddp_callbacks import DiLoCo, LocalSGD
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = pytest.mark.shares_results()

ASYNCHRONOUS = (("async_save", True), ("on_signal", False))
WAYS = {
    "two": Way(),
    "two, local windows of one step": Way(options=(("sync", LocalSGD(1)),)),
    "one, resumed on two": Way(1, resumed_on=2, part=(0, 3)),
    "two, resumed on one": Way(resumed_on=1, part=(1, 3)),
    "two, resumed on two": Way(resumed_on=2, part=(2, 3)),
    "three on two hosts, behind a failure": Way(3, layout=(2, 1), after_failure=True, part=(2, 3), tier="wide"),
    "four": Way(4, tier="night"),
    "two by gloo": Way(gloo=True, tier="night"),
    "all on three, behind a failure": Way(3, layout=(2, 1), after_failure=True, tier="night"),
    "two, resumed on three on two hosts": Way(2, layout=(2, 1), resumed_on=3, part=(0, 3), tier="wide"),
    "one, resumed by gloo": Way(1, gloo=True, resumed_on=2, resume=ASYNCHRONOUS, part=(1, 3), tier="wide"),
}


@in_each("trials", WAYS)
def test_a_trial_in_any_way_has_the_numbers_of_one_process(way: Way, name: str) -> None:
    """On N processes a Trial gives one process's numbers, also of models and optimizers under keys of your own."""
    prove("trials", way, name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_world_of_one_is_bit_for_bit_the_trial_without_us(name: str) -> None:
    """On one process the added line changes no bit."""
    assert_equal(results("trials", Way(1))[0][name], alone("trials", name)[0], relative=0.0)


# --- checkpoints of the user's own ------------------------------------------------------------------------------------


def resumable(sync: Any) -> Trial:
    made = trial([DDPCallback(sync=sync)])
    return made.with_generators(DataLoader(data(30), 8), DataLoader(data(13, 9), 4))


def resume(sync: Any, checkpoint: bytes | None) -> Any:
    made = resumable(sync)
    if checkpoint is not None:
        made.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=False))
    found = outcome(made, made.run(4))
    # Torchbearer's checkpoints have no running means, which go on from epoch to epoch.
    history = [{key: value for key, value in epoch.items() if "running_" not in key} for epoch in found["history"]]
    return history, found["parameters"]


def save(sync: Any) -> bytes:
    """A checkpoint of two epochs."""
    made, file = resumable(sync), io.BytesIO()
    made.run(2)
    torch.save(made.state_dict(), file)
    return file.getvalue()


def save_and_resume(sync: Any, of_one: bytes) -> tuple[bytes, Any, Any, Any, Any]:
    """A checkpoint; the result without a stop, resumed on all ranks, loaded only on rank 0, and from one process's."""
    checkpoint = save(sync)
    only_here = checkpoint if dist.get_rank() == 0 else None
    return checkpoint, resume(sync, None), *(resume(sync, given) for given in (checkpoint, only_here, of_one))


@pytest.mark.parametrize(("sync", "relative"), [("every_step", RELATIVE), (DiLoCo(1), 0.0)])
def test_a_checkpoint_of_a_trial_resumes_on_another_number_of_processes(sync: Any, relative: float) -> None:
    """A Trial's checkpoint resumes on any number of processes."""
    for checkpoint, whole, on_all, on_rank_0, from_one in run_distributed(save_and_resume, 2, sync, save(sync)):
        assert_equal(on_all, whole, relative)
        assert_equal(on_rank_0, whole, relative)
        # Windows of one step of SGD are those of one process, and so is the momentum of DiLoCo.
        assert_equal(from_one, whole, RELATIVE)
        assert_equal(resume(sync, checkpoint), whole, RELATIVE)
