"""Whatever a Trainer is given gives the numbers of one process on N, also the numbers that callbacks record."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from comparing import assert_equal
from distributed import run_distributed
from lightning.pytorch import callbacks, loggers, profilers
from lightning.pytorch.accelerators import MPSAccelerator, XLAAccelerator
from lightning.pytorch.plugins import LayerSync
from lightning_features import FEATURES, missing
from lightning_scenarios import SCENARIOS, fit, quiet
from torch import nn

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.usefixtures("variables_of_lightning"), pytest.mark.shares_results("world_size")]


@pytest.fixture
def variables_of_lightning(seed_variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Trainer(deterministic=True)`` sets one."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def run_all() -> dict[str, Any]:
    """Every feature on this rank, one after another in one process."""
    import ddp_callbacks.lightning  # noqa: F401

    with quiet():
        return {name: FEATURES[name]("ddp_callbacks") for name in FEATURES if missing(name) is None}


@functools.cache
def on_ranks(world_size: int) -> list[dict[str, Any]]:
    return run_distributed(run_all, world_size)


@functools.cache
def one_process(name: str) -> Any:
    with quiet():
        return FEATURES[name]("auto")


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.wide) for size in (3, 4))])
def test_what_a_trainer_is_given_does_on_n_processes_what_it_does_on_one(world_size: int, name: str) -> None:
    if missing(name) is not None:
        pytest.skip(f"{missing(name)} is not installed")
    for rank, results in enumerate(on_ranks(world_size)):
        assert_equal(results[name], one_process(name), 1e-10, f"rank {rank}")


@pytest.mark.parametrize("accelerator", [MPSAccelerator, XLAAccelerator])
def test_accelerators_other_than_cpus_and_cuda_gpus_are_refused(accelerator: type) -> None:
    strategy = CallbackStrategy(accelerator=object.__new__(accelerator))
    with pytest.raises(ConfigurationError, match=f"runs on CPUs and CUDA GPUs, not with {accelerator.__name__}"):
        strategy.setup_distributed()


class AppliesLayers(LayerSync):
    """A user's plugin."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def apply(self, model: nn.Module) -> nn.Module:
        self.done.append("applied")
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.done.append("reverted")
        return model


def test_a_plugin_for_the_layers_is_applied_in_a_fit_and_reverted_after_it() -> None:
    plugin = AppliesLayers()
    with quiet():
        fit("ddp_callbacks", plugins=[plugin])
    assert plugin.done == ["applied", "reverted"]


# --- the table of the page --------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "how_to" / "lightning.md"
HEADING = "## What you can give a Trainer"

FEATURE = "test_lightning_features.py::test_what_a_trainer_is_given_does_on_n_processes_what_it_does_on_one"
SCENARIO = "test_lightning_equivalence.py::test_n_processes_equal_one"
HOOKS = "test_lightning_hooks.py::test_a_hook_does_on_n_processes_what_it_does_on_one"
VALUES, LIGHTNING = "test_lightning_values.py::test_", "test_lightning.py::test_"
BY_TIME = f"{VALUES}validation_by_time_is_at_the_same_step_on_all_ranks"
REFUSED_PLUGINS = f"{LIGHTNING}plugins_of_other_strategies_are_refused_by_name"
WRITERS = f"{LIGHTNING}prediction_writers_get_each_row_once_with_its_index"

SHOWN_BY = {
    # Name in the table: features, scenarios, or tests in other files.
    "accelerator": ["test_lightning_features.py::test_accelerators_other_than_cpus_and_cuda_gpus_are_refused"],
    "strategy": ["plain", f"{LIGHTNING}the_other_name_of_the_strategy_is_the_same_strategy"],
    "devices": [f"{LIGHTNING}the_trainer_starts_processes_of_its_own"],
    "num_nodes": ["test_slurm.py::test_srun_starts_a_lightning_script"],
    "precision": [f"{LIGHTNING}precisions_are_lightning_s"],
    "logger": ["plain", "csv_and_tensorboard"],
    "callbacks": [HOOKS],
    "fast_dev_run": ["fast_dev_run"],
    "max_epochs": ["limits_of_a_run"],
    "min_epochs": ["timer"],
    "max_steps": ["limits_of_a_run", "overfit_and_limits"],
    "min_steps": ["timer", "limits_of_a_run"],
    "max_time": ["timer"],
    "limit_train_batches": ["parts_of_the_data", "overfit_and_limits"],
    "limit_val_batches": ["parts_of_the_data"],
    "limit_test_batches": ["parts_of_the_data"],
    "limit_predict_batches": ["parts_of_the_data"],
    "overfit_batches": ["parts_of_the_data", "overfit_and_limits"],
    "val_check_interval": ["val_check_interval", BY_TIME],
    "check_val_every_n_epoch": ["val_check_interval"],
    "num_sanity_val_steps": ["sanity_checks"],
    "log_every_n_steps": ["limits_of_a_run"],
    "enable_checkpointing": ["plugins", "checkpoints"],
    "enable_progress_bar": ["tqdm_progress_bar"],
    "enable_model_summary": ["model_summary"],
    "accumulate_grad_batches": ["accumulate_ragged"],
    "gradient_clip_val": ["clip_by_norm"],
    "gradient_clip_algorithm": ["clip_by_value"],
    "deterministic": ["reproducible_settings"],
    "benchmark": ["reproducible_settings"],
    "inference_mode": ["without_inference_mode"],
    "use_distributed_sampler": [f"{LIGHTNING}loaders_are_left_alone_where_the_user_says_so"],
    "profiler": ["simple_profiler"],
    "detect_anomaly": ["detect_anomaly"],
    "barebones": ["barebones"],
    "plugins": ["plugins"],
    "sync_batchnorm": ["synchronized_batchnorm"],
    "reload_dataloaders_every_n_epochs": ["reload_dataloaders_every_n_epochs"],
    "default_root_dir": ["plugins"],
    "enable_autolog_hparams": ["reproducible_settings"],
    # Callbacks
    "Callback": [HOOKS],
    "LambdaCallback": ["lambda_callback"],
    "ModelCheckpoint": ["checkpoints"],
    "Checkpoint": ["checkpoints"],
    "EarlyStopping": [
        "early_stopping",
        f"{VALUES}early_stopping_and_checkpoints_see_what_on_train_epoch_end_has_logged",
    ],
    "LearningRateMonitor": ["learning_rate_monitor"],
    "ProgressBar": ["tqdm_progress_bar"],
    "TQDMProgressBar": ["tqdm_progress_bar"],
    "RichProgressBar": ["rich_progress_bar"],
    "ModelSummary": ["model_summary"],
    "RichModelSummary": ["rich_model_summary"],
    "ThroughputMonitor": ["throughput_monitor"],
    "DeviceStatsMonitor": ["device_stats_monitor"],
    "Timer": ["timer"],
    "SpikeDetection": ["spike_detection"],
    "BackboneFinetuning": ["backbone_finetuning"],
    "BaseFinetuning": ["backbone_finetuning"],
    "GradientAccumulationScheduler": ["gradient_accumulation_scheduler"],
    "ModelPruning": ["model_pruning", "parameters_changed_at_random_in_hooks"],
    "StochasticWeightAveraging": ["averaged_weights", "averaged_weights_with_batchnorm"],
    "WeightAveraging": ["weight_averaging"],
    "EMAWeightAveraging": ["averaged_weights"],
    "BasePredictionWriter": [WRITERS],
    # Loggers and profilers
    "Logger": ["plain"],
    "CSVLogger": ["csv_and_tensorboard", f"{LIGHTNING}files_and_bars_come_from_rank_zero_alone"],
    "TensorBoardLogger": ["csv_and_tensorboard", "model_summary"],
    "Profiler": ["simple_profiler"],
    "PassThroughProfiler": ["plain"],
    "SimpleProfiler": ["simple_profiler"],
    "AdvancedProfiler": ["advanced_profiler"],
    "PyTorchProfiler": ["pytorch_profiler"],
    # Plugins
    "CheckpointIO": ["plugins"],
    "Precision": ["plugins", REFUSED_PLUGINS],
    "FSDPPrecision": [REFUSED_PLUGINS],
    "LayerSync": ["test_lightning_features.py::test_a_plugin_for_the_layers_is_applied_in_a_fit_and_reverted_after_it"],
    "ClusterEnvironment": ["test_slurm.py::test_srun_starts_a_lightning_script"],
    # Modules and data
    "configure_model": ["configure_model"],
    "load_from_checkpoint": ["load_from_checkpoint"],
    "prepare_data": [HOOKS],
    "training_step": [HOOKS],
    "estimated_stepping_batches": [
        HOOKS,
        f"{VALUES}the_number_of_steps_is_known_in_setup_and_the_loader_divided_all_the_same",
    ],
    "should_stop": [HOOKS, f"{LIGHTNING}a_stop_on_one_rank_stops_all_after_the_next_step"],
    "save_checkpoint": [HOOKS],
    "CombinedLoader": ["several_loaders"],
    "dataloader_iter": ["dataloader_iter"],
}

TUNER = "test_lightning_tuner.py::test_the_tuner_finds_what_it_finds_on_one_process"
CHECKPOINTS = "test_lightning_checkpoints.py::test_"
CLI = "test_lightning_cli.py::test_"

SHOWN_ELSEWHERE = {
    "ckpt_path": [
        f"{CHECKPOINTS}what_rank_zero_alone_has_saved_resumes_all_as_on_one_process",
        f"{LIGHTNING}checkpoints_move_between_one_process_ddp_and_ours",
        "weight_averaging",
    ],
    "OnExceptionCheckpoint": [f"{LIGHTNING}a_checkpoint_that_is_saved_on_an_exception_does_not_wait_for_the_others"],
    "LightningCLI": [
        "test_lightning_cli.py::test_a_script_trains_by_its_yaml_and_by_the_one_that_is_saved_as_on_one_process"
    ],
    "LearningRateFinder": [TUNER],
    "Tuner.lr_find": [TUNER, f"{VALUES}the_learning_rate_finder_suggests_what_it_suggests_on_one_process"],
    "BatchSizeFinder": [TUNER],
    "Tuner.scale_batch_size": [TUNER],
    "StatefulDataLoader": ["test_lightning_loaders.py::test_a_loader_with_a_state_goes_on_in_the_middle_of_an_epoch"],
    "return None": [
        f"{VALUES}a_step_that_all_ranks_skip_is_skipped_as_on_one_process",
        "test_skip_batch.py::test_batches_that_are_bad_on_one_process_are_skipped_by_all_as_on_one",
    ],
    "WandbLogger": ["apps/test_wandb.py::test_wandb_gets_the_values_of_one_process_in_one_run"],
    "MLFlowLogger": ["apps/test_mlflow.py::test_mlflow_gets_the_values_of_one_process_in_one_run"],
    "AsyncCheckpointIO": [f"{CHECKPOINTS}a_strategy_takes_an_io_that_saves_in_a_thread"],
    "Fabric": ["test_fabric.py::test_n_processes_of_a_loop_equal_one"],
}
"""Rows about which other tests say more."""

SHOWN_NOWHERE = {"CometLogger", "LitLogger", "XLAProfiler", "model_registry"}
"""They need accounts, services or devices that no machine of the tests has; the page says "not tested"."""


def rows() -> dict[str, str]:
    """What the page says of each name in the first column of its tables."""
    text = PAGE.read_text()
    section = text[text.index(HEADING) + len(HEADING) :].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {name.partition("=")[0]: row[-1] for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


def there_are(evidence: str) -> bool:
    """Whether this feature, scenario or test exists."""
    if "::" not in evidence:
        return evidence in FEATURES or evidence in SCENARIOS
    file, _, name = evidence.partition("::")
    return f"def {name}(" in (Path(__file__).parent / file).read_text()


def test_each_row_of_the_page_names_something_that_a_test_shows() -> None:
    shown = {**SHOWN_BY, **SHOWN_ELSEWHERE}
    assert set(rows()) == {*shown, *SHOWN_NOWHERE}
    assert not [(name, each) for name, found in shown.items() for each in found if not there_are(each)]
    assert [name for name in SHOWN_NOWHERE if "not tested" not in rows()[name]] == []


def test_a_message_that_a_row_quotes_is_one_that_its_test_expects() -> None:
    quoted = {name: re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`", "", row)) for name, row in rows().items()}
    refused = {name: messages for name, messages in quoted.items() if messages}
    assert set(refused) == {"accelerator", "FSDPPrecision", "prepare_data"}
    for name, messages in refused.items():
        files = {each.partition("::")[0] for each in SHOWN_BY[name]}
        texts = "".join((Path(__file__).parent / file).read_text() for file in files)
        assert [message for message in messages if message.rstrip(". ") not in texts] == []


def test_the_page_has_a_row_for_each_argument_of_a_trainer_and_each_class_that_it_takes() -> None:
    arguments = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    classes = {name for package in (callbacks, loggers, profilers) for name in package.__all__}
    assert not (arguments | classes) - set(rows())


def test_each_feature_is_named_in_the_table() -> None:
    assert not set(FEATURES) - {each for found in SHOWN_BY.values() for each in found}
