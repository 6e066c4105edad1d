"""Programs that nobody wrote, with a Trainer or a Trial: N processes have the numbers of one, or refuse by name."""

from __future__ import annotations

import os
from datetime import date

import pytest
from kit.once import once
from programs import Program, Verdicts, draw, has_failed, prove, script_of, shrink
from ways import Way

pytestmark = pytest.mark.shares_results()

OF_A_CHECK, OF_A_NIGHT = 10, 250
TONIGHT = int(os.environ.get("SEED", date.today().strftime("%Y%m%d")))
WAYS = [Way(2, resumed_on=3), Way(3, resumed_on=1), Way(2, layout=(1, 1), resumed_on=2)]


FOUND = {  # programs that once differed, and said nothing or the wrong thing
    "a draw that cannot be told in a hook of a Trial's batch": Program("trial", 0, ("noise_in_batches=rrelu",)),
    "a draw that cannot be told in a hook of a Trainer's batch": Program("trainer", 0, ("noise_in_batches=rrelu",)),
    "a draw that cannot be told in a hook, before a comparison tells it": Program(
        "trainer", 6, ("noise_in_batches=rsample_of_several",)
    ),
    "noise in gradients of a step by hand": Program("trainer", 0, ("by_hand", "noise_in_gradients=torch")),
    "a criterion that is no module, and has one": Program(
        "trial", 420054, ("criterion_with_a_buffer", "criterion_is_an_object"), cut=0.4
    ),
    "an average of the model in an object, beside a metric": Program(
        "trainer", 0, ("metric_logged_as_object=mean", "average_in_an_object=module"), cut=0.4
    ),
    "tensors of an average in an object": Program("trainer", 0, ("average_in_an_object=tensors",), cut=0.4),
    "attention in an evaluation": Program("trainer", 3, ("drops_inside=MultiheadAttention_without_weights",)),
    "samples of which few draw": Program("trainer", 200490, ("augments=sometimes",)),
    "a hook of a Trial's batch, in which the first batch is compared": Program("trial", 0, ("noise_in_batches=rand",)),
    "a callback that computes the model, which draws": Program(
        "trainer", 200797, ("callback_trains", "drops=recomputed")
    ),
    "an iterable that takes turns with a model that draws": Program(
        "trainer", 1, ("iterable_that_draws=torch", "noise_in_training=randn_like")
    ),
    "an iterable that counts its samples, after a cut": Program("trainer", 1, ("iterable_that_counts",), 0.2),
    "a batch sampler that takes turns with a model that draws": Program(
        "trial", 1, ("batch_sampler_that_draws=numpy", "noise_in_training=numpy_beta")
    ),
    "samples that draw in each pass": Program("trainer", 200008, ("augments=numpy",)),
    "samples of a validation after a cut between epochs": Program("trainer", 2501027408, ("augments=torch",), 0.475),
    "gradients that averaging uses once more, after a cut": Program(
        "trainer", 2501022467, ("no_validation", "batchnorm", "averages=swa"), 0.66
    ),
    "a callback that trains, in an epoch without a backward": Program(
        "trainer", 91037, ("averages=swa", "batchnorm", "callback_trains")
    ),
    "averaging after a cut while gradients accumulate": Program(
        "trainer", 320872, ("accumulates=always", "averages=swa"), 0.15
    ),
    "a callback that trains, in a fit whose optimizers a hook makes anew": Program(
        "trainer", 310562, ("new_parameters=replaced", "callback_trains")
    ),
    "a metric in an epoch that ends before a batch of which a rank has no sample": Program(
        "trainer", 310439, ("batch_sampler_with_epochs", "ends_epochs_early", "metric_logged_as_object=max")
    ),
    "a metric of the last batches, of which a rank has no sample": Program(
        "trainer", 300088, ("metric=running", "several_validations")
    ),
}
REFUSED = [name for name in FOUND if name.startswith("a draw that cannot be told")]


def programs(first: int, count: int) -> list[Program]:
    return [draw(host, seed) for seed in range(first, first + count) for host in ("trainer", "trial")]


@once
def verdicts(way: Way) -> Verdicts:
    return prove([*programs(0, OF_A_CHECK), *FOUND.values()], way)


@pytest.mark.wide
@pytest.mark.parametrize("program", programs(0, OF_A_CHECK), ids=lambda each: f"{each.host} {each.seed}")
def test_a_program_that_nobody_wrote_has_the_numbers_of_one_process(program: Program) -> None:
    """Programs of parts drawn at random give one process's numbers, cut or not."""
    verdict = verdicts(WAYS[0])[program]
    assert not has_failed(verdict), "\n".join([script_of(program, WAYS[0]), *verdict])


@pytest.mark.wide
@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_once_differed_holds_or_is_refused(name: str) -> None:
    verdict = verdicts(WAYS[0])[FOUND[name]]
    assert verdict[0] == ("refused" if name in REFUSED else "holds"), "\n".join(verdict)


@pytest.mark.night
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.size} resumed on {way.resumed_on}")
def test_many_programs_that_nobody_wrote_have_the_numbers_of_one_process(way: Way) -> None:
    """A failing program is made smaller and printed."""
    found = prove(programs(TONIGHT, OF_A_NIGHT), way)
    smaller = shrink({program: verdict for program, verdict in found.items() if has_failed(verdict)}, way)
    assert not smaller, "\n\n".join(f"{script_of(each, way)}\n{verdict}" for each, verdict in smaller.items())
