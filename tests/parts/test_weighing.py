"""What a cross entropy divides by, and what is refused; the numbers themselves are in test_gradients.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddp_callbacks import CrossEntropyWeight
from ddp_callbacks.data.shares import Share, loss_weight
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients.weighing import Weighing

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


def of(**criteria: nn.Module) -> CrossEntropyWeight:
    """Of a module with these."""
    module = nn.Module()
    for name, criterion in criteria.items():
        setattr(module, name, criterion)
    return CrossEntropyWeight.of(module)


of_batch = CrossEntropyWeight()
REFUSED: dict[str, Any] = {
    r"a tuple whose second entry is the targets, or a mapping .* got a tuple": lambda: of_batch((torch.zeros(2),)),
    r"got a mapping of x.* Give CrossEntropyWeight": lambda: of_batch({"x": torch.zeros(2)}),
    r"must be a tensor of class indices, got torch.float32": lambda: of_batch((torch.zeros(2), torch.zeros(2, 3))),
    r"must be a tensor of class indices, got list": lambda: of_batch((torch.zeros(2), [1, 2])),
    r"among the modules of Module, which has none. Give weight=": of,
    r"which has first, second": lambda: of(first=nn.CrossEntropyLoss(), second=nn.NLLLoss()),
    r"must be nn.CrossEntropyLoss or nn.NLLLoss, got MSELoss": lambda: CrossEntropyWeight(nn.MSELoss()),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_has_no_such_weight_is_refused_with_the_remedy(says: str) -> None:
    """Without a criterion, `weight="cross_entropy"` raises an error."""
    with pytest.raises(ConfigurationError, match=says):
        REFUSED[says]()
    assert of(only=nn.CrossEntropyLoss())((None, torch.tensor([1, -100]))) == 1


def test_a_padding_batch_has_no_weight_and_the_mean_over_nothing_no_gradient() -> None:
    assert loss_weight(Share(0, 5), "mean", 3.0) == (0.0, None)
    parameter = nn.Parameter(torch.ones(1))
    weighing = Weighing([parameter], [False], 2)
    weighing.set(0.0, 4.0)
    (parameter * float("nan")).sum().backward()
    weighing.close()
    assert parameter.grad is not None and parameter.grad.item() == 0.0
