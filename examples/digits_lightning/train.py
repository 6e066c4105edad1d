"""Train the digits with Lightning, on one process or many.

    python train.py                                    one process
    ddprun --nproc-per-node 2 train.py                 two processes on this machine
    ddprun -H node1,node2 train.py                     on two machines: one per GPU or CPU socket

Two lines differ from the script for one process: the import, and the name of the strategy.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
from digits import DigitsData, DigitsModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import ddp_callbacks.lightning  # noqa: F401  <- the first added line


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=6, help="epochs at most (default 6)")
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better loss (default 3)")
    parser.add_argument("--logs", default="logs", metavar="DIR", help="for checkpoints and metrics.csv (default: logs)")
    parser.add_argument("--strategy", default="ddp_callbacks", help="another of Lightning's, to compare")
    arguments = parser.parse_args()

    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy=arguments.strategy,  # <- the second: strategy="ddp_callbacks"
        max_epochs=arguments.epochs,
        logger=CSVLogger(arguments.logs),
        log_every_n_steps=5,
        callbacks=[
            EarlyStopping("val_loss", patience=arguments.patience),
            ModelCheckpoint(monitor="val_accuracy", mode="max", save_last=True),
        ],
    )
    trainer.fit(DigitsModule(), DigitsData())

    if trainer.is_global_zero:
        accuracy, loss = (trainer.callback_metrics[name] for name in ("val_accuracy", "val_loss"))
        processes = f"{trainer.world_size} process{'es' if trainer.world_size > 1 else ''}"
        print(f"{processes}: accuracy {accuracy:.3f}, loss {loss:.4f} on 360 digits; {trainer.logger.log_dir}")


if __name__ == "__main__":
    main()
