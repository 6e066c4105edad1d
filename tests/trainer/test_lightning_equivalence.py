"""A Trainer of N processes has the numbers of one: parameters, logged values, evaluations, predictions, in float64."""

from __future__ import annotations

import pytest
from kit.compare import assert_equal
from trainer_features import names
from ways import Way, alone, in_each, names_in, prove, results

from ddp_callbacks import LocalSGD

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

TABLE = "trainer_features"
EVERY = (("every", 2),)
ASYNCHRONOUS = (("async_save", True), ("on_signal", False))
CALLBACK = Way(by_callback=True, part=(0, 20))
WAYS = {
    "two": Way(),
    "two, local windows of one step": Way(options=(("sync", LocalSGD(1)),)),
    "one, resumed on two": Way(1, resumed_on=2, part=(0, 4)),
    "two, resumed on one": Way(resumed_on=1, resume=EVERY, part=(2, 4), tier="wide"),
    "three on two hosts, behind a failure": Way(3, layout=(2, 1), after_failure=True, part=(0, 4), tier="wide"),
    "four": Way(4, tier="night"),
    "all on three, behind a failure": Way(3, layout=(2, 1), after_failure=True, tier="night"),
    "two, resumed on three on two hosts": Way(2, layout=(2, 1), resumed_on=3, part=(1, 4), tier="wide"),
    "one, resumed on two by gloo": Way(1, gloo=True, resumed_on=2, resume=ASYNCHRONOUS, part=(3, 4), tier="wide"),
}
APART = {
    "two, resumed on two": Way(resumed_on=2, resume=EVERY, tier="wide"),
    "two on two hosts": Way(layout=(1, 1), resumed_on=2, resume=ASYNCHRONOUS, tier="night"),
}


@in_each(TABLE, WAYS)
def test_a_trainer_in_any_way_has_the_numbers_of_one_process(way: Way, name: str) -> None:
    """A Trainer gives one process's numbers, cut or not."""
    prove(TABLE, way, name)


@pytest.mark.parametrize("name", [name for name in names_in(TABLE, CALLBACK) if name != "simple_profiler"])
def test_a_callback_trains_bit_for_bit_as_the_strategy(name: str) -> None:
    """A Trainer's `DDPCallback` trains as the strategy does."""
    for by_callback, by_strategy in zip(results(TABLE, CALLBACK), results(TABLE, WAYS["two"]), strict=True):
        assert_equal(by_callback[name], by_strategy[name], relative=0.0)


@in_each("trainers_apart", APART)
def test_a_fit_goes_on_bit_for_bit_on_as_many_processes(way: Way, name: str) -> None:
    """Cut fits keep every bit on as many processes."""
    prove("trainers_apart", way, name)


@pytest.mark.parametrize("name", names(Way(1)))
def test_a_world_of_one_is_bit_for_bit_the_trainer_without_us(name: str) -> None:
    """On one process the strategy changes no bit."""
    assert_equal(results(TABLE, Way(1))[0][name], alone(TABLE, name)[0], relative=0.0)
