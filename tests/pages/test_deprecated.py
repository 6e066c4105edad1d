"""Names and modules of before still work, and name what stands for them."""

from __future__ import annotations

import importlib

import pytest
from torch import nn

import ddp_callbacks
from ddp_callbacks import LocalSGD, ParameterAverager

# By module and name of before: where it is now.
OF_MODULES = {
    ("agreement", "require_agreement"): "ddp_callbacks",
    ("broadcast", "broadcast_parameters"): "ddp_callbacks",
    ("collectives", "all_gather_json"): "ddp_callbacks.comm",
    ("comm_hooks", "GradBucket"): "ddp_callbacks",
    ("compression", "PowerSGD"): "ddp_callbacks",
    ("random_state", "RunRandomState"): "ddp_callbacks",
    ("sharding", "shard_loader"): "ddp_callbacks",
}
RENAMED = {
    "make_distinct": "seed_by_rank",
    "make_equal": "broadcast_rng_state",
    "two_level_hook": "hierarchical_allreduce_hook",
}


@pytest.mark.parametrize(("module", "name"), OF_MODULES)
def test_a_module_of_before_gives_the_same_and_says_where_it_is(module: str, name: str) -> None:
    """Old names still work and name their replacement."""
    home = OF_MODULES[module, name]
    text = f"ddp_callbacks.{module}.{name} is deprecated: import {name} from {home}."
    with pytest.warns(DeprecationWarning, match=f"^{text}$") as caught:
        found = getattr(importlib.import_module(f"ddp_callbacks.{module}"), name)
    assert found is getattr(importlib.import_module(home), name)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_name_of_before_gives_the_same_and_says_what_it_is_called(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^{old} is deprecated: it is called {new} now.$"):
        assert getattr(ddp_callbacks, old) is getattr(ddp_callbacks, new)


def test_close_window_is_outer_step_and_others_are_attribute_errors() -> None:
    with pytest.warns(DeprecationWarning, match="it is called outer_step now"):
        ParameterAverager(nn.Linear(1, 1), LocalSGD(1)).close_window()
    with pytest.raises(AttributeError, match="module 'ddp_callbacks' has no attribute 'sharded'"):
        _ = ddp_callbacks.sharded
