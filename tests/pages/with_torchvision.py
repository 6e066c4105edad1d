"""Run a script with torchvision, beside whatever build of torch: ``python with_torchvision.py SCRIPT [ARGUMENT ...]``.

torchvision is looked for in the folder TORCHVISION_PATH, too. Its compiled operators are tied to one build of torch;
where they cannot be loaded, the import fails for the lack of two of them, although datasets and transforms need none.
So these two are declared here, without a body.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

_declared: list[torch.library.Library] = []  # a library's declarations end with it


def make_importable() -> None:
    """Make ``import torchvision`` work, or raise what it raises."""
    sys.path.append(os.environ.get("TORCHVISION_PATH", ""))
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declared.append(torch.library.Library("torchvision", "DEF"))
        for operator in ("nms", "qnms"):
            _declared[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    make_importable()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
