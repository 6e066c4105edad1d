"""Run what the page on other engines shows, with a function of training.py: `on_page.py "Ray Train" with_strategy`."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import training
from kit.pages import page_named

PAGE = page_named("docs/how_to/other_engines.md")


def shown(heading: str) -> str:
    """The Python under a heading of the page."""
    text = "\n".join(PAGE.lines).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (code,) = (block.text for block in PAGE.blocks if block.is_python and block.text.splitlines()[-1] in text)
    return code.replace('AutoExecutor("logs")', 'AutoExecutor("logs", cluster="local")')


def start_ray() -> None:
    """A cluster of this machine: each of two workers takes one of its CPUs."""
    import ray

    for attempts_left in reversed(range(8)):  # Ray gives its own processes 30 seconds, few where others compute
        try:
            ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
            return
        except Exception:  # Ray has no other class for it
            ray.shutdown()
            if not attempts_left:
                raise


if __name__ == "__main__":
    heading, name = sys.argv[1:]
    if heading == "Ray Train":
        start_ray()
    code: dict[str, Any] = {"__name__": "__main__", "train": getattr(training, name)}
    with contextlib.suppress(ImportError):
        import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    exec(compile(shown(heading), str(PAGE.path), "exec"), code)
