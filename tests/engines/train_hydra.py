"""A script of Hydra's: each of its settings is a file of results."""

from __future__ import annotations

import os
from typing import Any

import hydra
import training


@hydra.main(version_base=None)
def main(settings: Any) -> None:
    os.environ["RESULT"] = os.path.join(os.environ["FOLDER"], f"seed {settings.seed}")
    training.with_strategy()


if __name__ == "__main__":
    main()
