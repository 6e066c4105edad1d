"""Settings of a Trainer that cannot be: each is refused before anything starts, with the rule or the remedy."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision
from trainers import Net, fit, quiet

from ddp_callbacks import DiLoCo, LocalSGD, PowerSGD
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import CallbackStrategy, DDPCallback

pytestmark = pytest.mark.usefixtures("seed_variables")

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": "local"}, 'batch_size must be "global"'),
    ({"weight": 3}, 'weight must be a function of a batch, or "cross_entropy", got 3'),
    ({"reduction": "none"}, 'reduction must be "mean" or "sum", got \'none\''),
    ({"reduction": "sum", "weight": len}, "Use one of the two"),
    ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive"),
    ({"find_unused_parameters": True}, "CallbackStrategy has no find_unused_parameters: unused parameters are found"),
    ({"ddp_comm_hook": print}, "CallbackStrategy has no ddp_comm_hook: it is called comm_hook here"),
    ({"batchsize": 3}, "CallbackStrategy has no batchsize."),
    ({"compress": "bf17"}, 'compress must be "bf16", "fp16", PowerSGD(...) or None'),
    ({"sync": "often"}, 'sync must be "every_step", LocalSGD'),
    ({"sync": DiLoCo(50), "comm_hook": print}, "a comm_hook sums gradients"),
    ({"sync": LocalSGD(8), "compress": PowerSGD()}, "is for gradients, but sync"),
    ({"verify": True}, 'must be None or "first_batch"'),
    ({"verify": "first_batch", "sync": LocalSGD(8)}, "compares synchronized gradients, but sync="),
    ({"skip_batch": "none"}, 'skip_batch must be None, "no_loss" (training_step returned None)'),
    ({"skip_batch": "any", "sync": LocalSGD(8)}, "they do not meet in each step"),
]


@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=[" ".join(options) for options, _ in OPTIONS])
def test_an_option_of_the_strategy_that_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    """`CallbackStrategy` refuses impossible options when you make it."""
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        CallbackStrategy(**options)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def lbfgs(module: Any) -> Any:
    return torch.optim.LBFGS(module.parameters(), 0.1)


skipping = functools.partial(CallbackStrategy, skip_batch="any")
FITS: dict[str, tuple[Callable[[], Any], str]] = {
    "a precision of FSDP": (
        lambda: fit("ddp_callbacks", plugins=[FSDPPrecision("32-true")]),
        "does not work with FSDPPrecision: FSDP divides the parameters",
    ),
    "skip_batch with manual optimization": (
        lambda: fit(skipping(), Manual()),
        'skip_batch="any" needs automatic optimization: Manual optimizes manually',
    ),
    "skip_batch with LBFGS": (
        lambda: fit(skipping(), Net(optimizer=lbfgs)),
        'skip_batch="any" does not work with LBFGS',
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_a_trainer_is_refused_by_the_name_of_what_does_not_fit(name: str) -> None:
    """A Trainer refuses FSDP's precision plugin by name."""
    run, says = FITS[name]
    with quiet(), pytest.raises(ConfigurationError, match=re.escape(says)):
        run()


def test_the_callback_alone_refuses_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's `DDPCallback` alone refuses several processes."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody gets so far as to use it
    says = (
        'DDPCallback needs strategy="ddp_callbacks" for these 2 processes: Trainer(strategy="ddp_callbacks"). This '
        "Trainer has SingleDeviceStrategy. A callback comes too late to tell Lightning which process this is."
    )
    with quiet(), pytest.raises(ConfigurationError, match=re.escape(says)):
        fit("auto", callbacks=[DDPCallback()])
