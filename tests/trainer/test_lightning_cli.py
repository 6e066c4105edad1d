"""LightningCLI and type checkers read the strategy's options: from a YAML, from the command line, from a script."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from kit.compare import assert_equal
from kit.paths import ROOT
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from trainer_cases import RELATIVE, Bodies, quiet
from trainers import Net, loader

from ddp_callbacks import CrossEntropyWeight, DiLoCo, LocalSGD
from ddp_callbacks.lightning import CallbackStrategy

pytest.importorskip("jsonargparse")

from lightning.pytorch.cli import LightningCLI

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
OURS = "ddp_callbacks.lightning.CallbackStrategy"
CALLBACK = "ddp_callbacks.lightning.DDPCallback"


def weigh(batch: Any) -> float:
    return float(len(batch[0]))


def strategy_of(*args: str) -> Any:
    """What a program with these arguments trains by."""
    with quiet():
        return LightningCLI(Net, args=["--trainer.accelerator=cpu", "--trainer.logger=false", *args], run=False)


def described(strategy: Any) -> str:
    """All that it has, but for where in memory its objects are."""
    return re.sub(r" at 0x\w+", "", str(vars(strategy)))


# Of each option: what a YAML and the command line have, and what it means.
WORDS: dict[str, tuple[str, Any]] = {
    "batch_size": ("per_process", "per_process"),
    "weight": ("test_lightning_cli.weigh", weigh),
    "weight=cross_entropy": ("cross_entropy", "cross_entropy"),
    "reduction": ("sum", "sum"),
    "randomness": ("by_sample", "by_sample"),
    "verify": ("first_batch", "first_batch"),
    "skip_batch": ("any", "any"),
    "on_divergence": ("repair", "repair"),
    "bucket_cap_mb": ("3", 3.0),
    "comm_hook": (f"{HOOKS}.bf16_compress_hook", bf16_compress_hook),
    "comm_state": ("7", 7),
    "compress": ("bf16", "bf16"),
    "process_group_backend": ("gloo", "gloo"),
    "timeout": ("0:05:00", timedelta(minutes=5)),
    "start_method": ("spawn", "spawn"),
}
# Of each object: its class, one argument, and what it is.
OBJECTS: dict[str, tuple[str, str, Any]] = {
    "sync=LocalSGD": ("ddp_callbacks.LocalSGD", "every=4", LocalSGD(4)),
    "sync=DiLoCo": ("ddp_callbacks.DiLoCo", "every=50", DiLoCo(50)),
    "checkpoint_io": ("lightning.pytorch.plugins.AsyncCheckpointIO", "", AsyncCheckpointIO()),
}
SETTINGS = WORDS | OBJECTS


def in_yaml(setting: str) -> str:
    name, (word, *others, _) = setting.partition("=")[0], SETTINGS[setting]
    if not others:
        return f"{name}: {word}"
    return f"{name}: {{class_path: {word}, init_args: {{{others[0].replace('=', ': ')}}}}}"


def spoken(setting: str) -> list[str]:
    option, (word, *others, _) = f"--trainer.strategy.{setting.partition('=')[0]}", SETTINGS[setting]
    return [f"{option}={word}", *(f"{option}.{argument}" for argument in others if argument)]


TOGETHER = [  # what goes together
    ["batch_size", "weight", "verify", "skip_batch", "bucket_cap_mb", "comm_hook", "comm_state", "timeout"],
    ["on_divergence", "sync=LocalSGD", "process_group_backend", "start_method", "checkpoint_io"],
    ["weight=cross_entropy", "randomness", "compress"],
    ["reduction"],
    ["sync=DiLoCo"],
]


def test_each_option_has_a_setting() -> None:
    assert {setting for together in TOGETHER for setting in together} == set(SETTINGS)
    of_lightning = {"accelerator", "parallel_devices", "cluster_environment", "precision_plugin"}
    options = set(inspect.signature(CallbackStrategy).parameters) - of_lightning
    assert {setting.partition("=")[0] for setting in SETTINGS} == options


@pytest.mark.parametrize("settings", TOGETHER, ids=" ".join)
def test_options_are_set_by_a_yaml_and_on_the_command_line_and_their_dump_loads_again(
    settings: list[str], tmp_path: Path
) -> None:
    """LightningCLI sets each option, of strategy and callback; its dump loads again."""
    file, dumped = tmp_path / "config.yaml", tmp_path / "dumped.yaml"
    file.write_text(
        f"trainer: {{strategy: {{class_path: {OURS}, init_args: {{{', '.join(map(in_yaml, settings))}}}}}}}"
    )
    words = [word for setting in settings for word in spoken(setting)]
    made = [strategy_of("--config", str(file)), strategy_of("--trainer.strategy=CallbackStrategy", *words)]
    dumped.write_text(made[0].parser.dump(made[0].config))
    made.append(strategy_of("--config", str(dumped)))
    made.append(
        strategy_of(f"--trainer.callbacks+={CALLBACK}", *(each.replace("strategy", "callbacks") for each in words))
    )
    del made[-1].trainer.strategy.chosen_by
    wanted: Any = CallbackStrategy(**{setting.partition("=")[0]: SETTINGS[setting][-1] for setting in settings})
    expected, default = (described(in_a_trainer(each)) for each in (wanted, CallbackStrategy()))
    assert expected != default
    assert [described(cli.trainer.strategy) for cli in made] == [expected] * 4


@pytest.mark.parametrize("name", ["ddp_callbacks", "callbacks"])
def test_a_yaml_names_the_strategy_as_a_script_does_and_its_weight_by_a_class(name: str) -> None:
    """LightningCLI knows the strategy by its names."""
    assert type(strategy_of(f"--trainer.strategy={name}").trainer.strategy) is CallbackStrategy
    cli = strategy_of(f"--trainer.strategy={OURS}", "--trainer.strategy.weight=ddp_callbacks.CrossEntropyWeight")
    assert type(cli.trainer.strategy._weight) is CrossEntropyWeight


def in_a_trainer(strategy: Any) -> Any:
    with quiet():
        return pl.Trainer(strategy=strategy, accelerator="cpu", logger=False).strategy


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("batch_size=32", "Expected a typing.Literal['global', 'per_process']. Got value: 32"),
        ("weight=nonsense", "Expected a dot import path string: nonsense"),
        ("comm_hook=no.such.hook", 'Parser key "comm_hook"'),
        ("timeout=abc", 'Expected a string with form "h:m:s" or "d days, h:m:s" but got "abc"'),
        (
            "sync={class_path: ddp_callbacks.LocalSGD, init_args: {every: 0}}",
            "every must be a positive number of steps",
        ),
        ("bucket_cap_mb=-1", "bucket_cap_mb must be positive"),
        ("find_unused_parameters=true", "Option 'find_unused_parameters' is not accepted"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it_before_anything_starts(
    wrong: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """LightningCLI names a wrong option before anything starts."""
    with pytest.raises((SystemExit, ValueError)) as raised:
        strategy_of(f"--trainer.strategy={OURS}", f"--trainer.strategy.{wrong}")
    assert says in f"{raised.value} {capsys.readouterr().err}"
    assert not torch.distributed.is_initialized()


def test_the_help_of_the_command_line_shows_each_option_with_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    """The help explains each option."""
    with pytest.raises(SystemExit) as ended:
        strategy_of("--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert OURS in re.sub(r"\s+", "", shown)
    with pytest.raises(SystemExit):
        strategy_of(f"--trainer.strategy.help={OURS}")
    entries = re.split(r"\n  --trainer\.strategy\.", capsys.readouterr().out)
    words = {entry.split()[0].rstrip(","): " ".join(entry.split()[2:]) for entry in entries[1:]}
    for name in inspect.signature(CallbackStrategy).parameters:
        assert re.match(r"(?!\(type)\S+ .*\(type: .*default: ", words[name]), words[name]
        assert "Unvalidated" not in words[name]
    assert "DiLoCo" in words["sync"] and "AsyncCheckpointIO" in words["checkpoint_io"]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(29, 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(13, 5, 9)


CONFIG = """
seed_everything: 7
trainer:
  accelerator: cpu
  max_epochs: 2
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: .}}
  strategy:
    class_path: ddp_callbacks.lightning.CallbackStrategy
    init_args: {timeout: 0:05:00, weight: test_lightning_cli.weigh, sync: every_step}
model: {lr: 0.05}
"""


def train_by(*args: str) -> Any:
    return dict(LightningCLI(Net, Data, args=["fit", *args]).model.state_dict())


@WORLD
def trained_by_yaml() -> Any:
    """By one that is given, and by the one that is saved beside the log."""
    Path(f"given-{dist.get_rank()}.yaml").write_text(CONFIG)
    found = [train_by("-c", f"given-{dist.get_rank()}.yaml")]
    dist.barrier()
    (saved,) = Path("lightning_logs").glob("*/config.yaml")
    assert "test_lightning_cli.weigh" in saved.read_text()
    return [*found, train_by("-c", str(saved))]


@pytest.mark.slow
def test_a_program_trains_by_its_yaml_and_by_the_one_that_is_saved_as_on_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given.yaml").write_text(CONFIG)
    with quiet():
        expected = train_by("-c", "given.yaml", "--trainer.strategy=auto", "--trainer.logger=false")
    for found in WORLD.returned(trained_by_yaml):
        assert_equal(found, [expected, expected], RELATIVE)


# --- type checkers ----------------------------------------------------------------------------------------------------

TYPED = """
from datetime import timedelta
import {package} as pl
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from ddp_callbacks import LocalSGD
from ddp_callbacks.{ours} import CallbackStrategy, DDPCallback

def weigh(batch: dict[str, int]) -> float:
    return 1.0

good = CallbackStrategy("per_process", weight=weigh, compress="bf16", timeout=timedelta(minutes=1))
CallbackStrategy(sync=LocalSGD(every=4), weight="cross_entropy", comm_hook=bf16_compress_hook)
pl.Trainer(strategy=good)
pl.Trainer(callbacks=[DDPCallback()])
CallbackStrategy(compress="bf17")  # refused
CallbackStrategy(find_unused_parameters=True)  # refused
CallbackStrategy("globally")  # refused
CallbackStrategy(timeout=3)  # refused
CallbackStrategy(weight="tokens")  # refused
DDPCallback("per_process", weight=weigh)
DDPCallback(compress="bf17")  # refused
"""


@pytest.mark.night
@pytest.mark.cold
def test_mypy_sees_the_options_and_refuses_wrong_ones(tmp_path: Path) -> None:
    """Editors and mypy see the strategy's options."""
    for name, package in (("one", "lightning.pytorch"), ("other", "pytorch_lightning")):
        (tmp_path / f"{name}.py").write_text(TYPED.format(package=package, ours=package.partition(".")[0]))
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "c")]
    environ = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "one.py", "other.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
    )
    lines = TYPED.splitlines()
    expected = {index for index, line in enumerate(lines, 1) if line.endswith("# refused")}
    for name in ("one", "other"):
        found = {int(found[1]) for found in re.finditer(rf"^{name}\.py:(\d+): error", done.stdout, re.M)}
        assert found == expected, done.stdout + done.stderr
