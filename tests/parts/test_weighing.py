"""What a cross entropy divides by, and what is refused; the numbers themselves are in test_gradients.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddp_callbacks import CrossEntropyWeight
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning.batches import Batches

CLASSES = 5
CRITERIA: dict[str, Any] = {
    "default": nn.CrossEntropyLoss(),
    "ignored": nn.CrossEntropyLoss(ignore_index=2),
    "class weights": nn.CrossEntropyLoss(torch.arange(1.0, CLASSES + 1, dtype=torch.float64), ignore_index=0),
    "likelihood": nn.NLLLoss(torch.arange(CLASSES, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("shape", [(11,), (4, 3, 2)])
def test_the_weight_is_what_a_cross_entropy_divides_by(name: str, shape: tuple[int, ...]) -> None:
    """`CrossEntropyWeight` is the divisor of the loss."""
    torch.manual_seed(0)
    criterion, target = CRITERIA[name], torch.randint(0, CLASSES, shape)
    scores = torch.randn(shape[0], CLASSES, *shape[1:], dtype=torch.float64).log_softmax(1)
    function = F.nll_loss if name == "likelihood" else F.cross_entropy
    summed = function(scores, target, criterion.weight, reduction="sum", ignore_index=criterion.ignore_index)
    weight = CrossEntropyWeight(criterion)((scores, target))
    torch.testing.assert_close(summed / weight, criterion(scores, target), rtol=1e-12, atol=0)


@pytest.mark.parametrize("key", ["labels", "label", "targets", "target", "y"])
def test_a_mapping_has_its_targets_under_a_usual_name(key: str) -> None:
    """It finds targets under their usual names."""
    batch = {"x": torch.zeros(3), key: torch.tensor([1, -100, 2])}
    assert CrossEntropyWeight()(batch) == 2


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((torch.zeros(2),), "a batch must be a tuple whose second entry is the targets, or a mapping .* got a tuple"),
        ({"x": torch.zeros(2)}, "got a mapping of x.* Give CrossEntropyWeight"),
        ((torch.zeros(2), torch.zeros(2, 3)), "must be a tensor of class indices, got torch.float32"),
        ((torch.zeros(2), [1, 2]), "must be a tensor of class indices, got list"),
    ],
)
def test_a_batch_without_targets_is_refused_with_the_remedy(batch: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        CrossEntropyWeight()(batch)


def test_a_module_without_one_criterion_is_refused_with_the_remedy() -> None:
    """Without a criterion, `weight="cross_entropy"` raises an error."""
    module = nn.Module()
    with pytest.raises(ConfigurationError, match=r"among the modules of Module, which has none. Give weight="):
        CrossEntropyWeight.of(module)
    module.first, module.second = nn.CrossEntropyLoss(), nn.NLLLoss()
    with pytest.raises(ConfigurationError, match="which has first, second"):
        CrossEntropyWeight.of(module)
    del module.second
    assert CrossEntropyWeight.of(module)((None, torch.tensor([1, -100]))) == 1


def test_another_criterion_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"must be nn.CrossEntropyLoss or nn.NLLLoss, got MSELoss"):
        CrossEntropyWeight(nn.MSELoss())


def test_a_step_that_draws_its_batches_cannot_be_weighed() -> None:
    batches = Batches(len, exchange=None)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError, match=r"weight= needs the batch of each step, but training_step.dataloader_iter."
    ):
        batches.let_draw([])
