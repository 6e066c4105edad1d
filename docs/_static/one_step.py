"""Measure what happens in one training step, and draw it.

    ddprun --nproc-per-node 2 docs/_static/one_step.py trial     in a Torchbearer Trial, on one host
    ddprun --nproc-per-node 2 docs/_static/one_step.py trainer   in a Lightning Trainer
    ddprun -H node1,node2 docs/_static/one_step.py trial         on two hosts
    python docs/_static/one_step.py draw                         one_step.svg, from what was measured

The moments of the step of median length go to one_step.json, in milliseconds from its begin on rank 0. The clocks of
two machines differ, so the hosts must be namespaces of one machine (tests/kit/hosts.py).
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ddp_callbacks import get_rank
from ddp_callbacks.comm import all_gather_object
from ddp_callbacks.comm.group_sums import ProcessGroupWork
from ddp_callbacks.comm.shared_memory import SharedMemoryAllReduce
from ddp_callbacks.gradients.bucket_sums import BucketSums
from ddp_callbacks.gradients.buckets import Bucket
from ddp_callbacks.gradients.reducer import Reducer

HERE = Path(__file__).parent
STEPS, BATCH, WIDTH, LAYERS = 40, 512, 512, 9
BUCKET_CAP_MB = 2.0  # five buckets


class Clock:
    """What happens in each step on this rank: on its main thread, and to its buckets."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def begin(self) -> None:
        self.steps.append({"begin": time.monotonic(), "moments": [], "launched": {}, "arrived": {}})

    def note(self, name: str) -> None:
        if self.steps:
            self.steps[-1]["moments"].append([name, time.monotonic()])

    def note_launch(self, _: BucketSums, bucket: Bucket, *of_last: Any) -> None:
        if self.steps:
            step, which = self.steps[-1], id(bucket.sum)
            step["launched"][which] = time.monotonic()
            if isinstance(bucket.sum, ProcessGroupWork):  # by the process group alone
                done = bucket.sum._work.get_future()
                done.add_done_callback(lambda _: step["arrived"].setdefault(which, time.monotonic()))

    def note_arrival(self, *of: Any) -> None:
        """``of`` ends with the sum that is through; some are not of gradients."""
        if self.steps:
            self.steps[-1]["arrived"].setdefault(id(of[-1]), time.monotonic())


def after(kind: Any, name: str, note: Callable[..., None]) -> None:
    """Call ``note`` with the arguments whenever this method has run."""
    method = getattr(kind, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        note(*args)
        return result

    setattr(kind, name, noting)


def listen(clock: Clock) -> None:
    """To what is the same in both hosts."""
    finish = Reducer.finish

    def finishing(reducer: Reducer) -> None:
        clock.note("backward")
        finish(reducer)
        clock.note("finish")

    Reducer.finish = finishing  # type: ignore[method-assign]
    after(BucketSums, "launch", clock.note_launch)
    after(SharedMemoryAllReduce, "all_gather", clock.note_arrival)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def make_loader() -> DataLoader[Any]:
    rows = BATCH * STEPS
    return DataLoader(TensorDataset(torch.randn(rows, WIDTH), torch.randint(10, (rows,))), BATCH, shuffle=True)


def make_optimizer(model: nn.Module, clock: Clock) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: clock.note("optimizer"))
    return optimizer


def measure_trial(clock: Clock) -> None:
    from torchbearer import Trial
    from torchbearer.callbacks import GradientNormClipping

    from ddp_callbacks.torchbearer import AllReduceGradients, DDPCallback

    # Not by a callback: after one that may stop the run, the ranks meet in each step.
    after(AllReduceGradients, "on_start_training", lambda *_: clock.begin())
    after(AllReduceGradients, "on_sample", lambda *_: clock.note("load"))
    after(AllReduceGradients, "on_criterion", lambda *_: clock.note("forward"))
    after(GradientNormClipping, "on_backward", lambda *_: clock.note("clip"))
    after(AllReduceGradients, "on_step_training", lambda *_: (clock.note("metrics"), clock.begin()))
    model = make_model()
    clip = GradientNormClipping(1.0, params=list(model.parameters()))
    trial = Trial(
        model,
        make_optimizer(model, clock),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[DDPCallback(bucket_cap_mb=BUCKET_CAP_MB), clip],
    )
    trial.with_train_generator(make_loader()).run(1, verbose=0)


def measure_trainer(clock: Clock) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from ddp_callbacks.lightning import CallbackStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def on_train_batch_start(self, *_: Any) -> None:
            clock.note("load")

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss)
            clock.note("forward")
            return loss

        def on_before_zero_grad(self, *_: Any) -> None:
            clock.note("logged values")

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(*args, **kwargs)
            clock.note("clip")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self, clock)

    trainer = Trainer(
        accelerator="cpu",
        strategy=CallbackStrategy(bucket_cap_mb=BUCKET_CAP_MB),
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # A step of the loop draws its batch, and ends when its last hook has run and what it has logged is joined.
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def advancing(*args: Any) -> None:
        clock.begin()
        advance(*args)
        clock.note("metrics")

    loop.advance = advancing  # type: ignore[method-assign]
    trainer.fit(Module(), make_loader())


def measure(kind: str) -> None:
    clock = Clock()
    listen(clock)
    {"trial": measure_trial, "trainer": measure_trainer}[kind](clock)
    hosts = len(set(all_gather_object(socket.gethostname(), "the hosts")))
    step = median_step(clock)
    if get_rank() == 0:
        file = HERE / "one_step.json"
        measured = json.loads(file.read_text()) if file.exists() else {}
        measured[f"{kind}, {hosts} host{'s' * (hosts > 1)}"] = step
        file.write_text(json.dumps(measured, indent=1) + "\n")
        print(f"{kind} on {hosts} host(s): the median of {step['steps']} steps took {step['milliseconds']:.1f} ms")


def median_step(clock: Clock) -> dict[str, Any]:
    """Of the steps after the first five, the one of median length on rank 0; every rank's moments of it."""
    whole = [step for step in clock.steps[5:] if step["moments"] and step["moments"][-1][0] == "metrics"]
    mine = [
        {
            "begin": step["begin"],
            "moments": step["moments"],
            "buckets": [[moment, step["arrived"][which]] for which, moment in step["launched"].items()],
        }
        for step in whole
    ]
    by_rank = all_gather_object(mine, "the moments of the steps")
    lengths = [step["moments"][-1][1] - step["begin"] for step in by_rank[0]]
    middle = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
    zero = by_rank[0][middle]["begin"]

    def since(moment: float) -> float:
        return round(1000 * (moment - zero), 3)

    ranks = [
        {
            "begin": since(step["begin"]),
            "moments": [[name, since(moment)] for name, moment in step["moments"]],
            "buckets": [[since(launched), since(arrived)] for launched, arrived in step["buckets"]],
        }
        for step in (steps[middle] for steps in by_rank)
    ]
    return {"steps": len(lengths), "milliseconds": round(1000 * lengths[middle], 3), "ranks": ranks}


# --- the drawing ------------------------------------------------------------------------------------------------------

TITLES = {
    "trial, 1 host": "Torchbearer Trial, two processes on one host (shared memory)",
    "trainer, 1 host": "Lightning Trainer, two processes on one host (shared memory)",
    "trial, 2 hosts": "Torchbearer Trial, two hosts with one process each, 1 Gbit/s between them",
}
COLOURS = {
    "load": "#8a8f98",
    "forward": "#4a90d9",
    "logged values": "#1fa29a",
    "backward": "#2f66b0",
    "finish": "#d9822b",
    "clip": "#9a6fc4",
    "optimizer": "#4d9e4d",
    "metrics": "#1fa29a",
}
SAYS = {
    "load": "the batch is loaded and divided",
    "forward": "forward and loss",
    "backward": "backward",
    "finish": "the end of backward waits for the sums",
    "clip": "clipping",
    "optimizer": "the optimizer's step",
    "metrics": "metrics, logged values",
    "bucket": "a bucket, from its launch until its sum is there",
}
TEXT, LINE, BUCKET = "#767c85", "#9aa0a8", "#d9822b"
SPANWIDTH, LEFT, BAR, THIN = 780, 100, 20, 6


def draw() -> None:
    measured = json.loads((HERE / "one_step.json").read_text())
    titles = {name: title for name, title in TITLES.items() if name in measured}
    longest = max(_end(measured[name]) for name in titles)
    scale = SPANWIDTH / longest
    shapes: list[str] = []
    y = 18.0
    for name, title in titles.items():
        shapes.append(_text(0, y, title, "font-weight='600'"))
        y += 12
        for rank, own in enumerate(measured[name]["ranks"]):
            shapes.append(_text(0, y + 14, f"rank {rank}"))
            shapes += _bars(own, y, scale)
            y += BAR + 4 + (THIN + 2) * len(own["buckets"]) + 6
        y += 18
    shapes += _axis(y - 14, longest, scale)
    y += 24
    shapes += _legend(y)
    height = y + 22 * ((len(SAYS) + 1) // 2)
    body = "\n".join(shapes)
    style = f"text {{ font: 12px system-ui, sans-serif; fill: {TEXT} }}"
    (HERE / "one_step.svg").write_text(
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {LEFT + SPANWIDTH + 20} {height:.0f}'>\n"
        f"<style>{style}</style>\n{body}\n</svg>\n"
    )


def _end(step: dict[str, Any]) -> float:
    return max(float(own["moments"][-1][1]) for own in step["ranks"])


def _bars(own: dict[str, Any], y: float, scale: float) -> list[str]:
    shapes, begin = [], own["begin"]
    for name, end in own["moments"]:
        shapes.append(_rect(begin, end, y, BAR, COLOURS[name], scale))
        begin = end
    for index, (launched, arrived) in enumerate(own["buckets"]):
        top = y + BAR + 4 + index * (THIN + 2)
        shapes.append(_rect(launched, arrived, top, THIN, BUCKET, scale, "fill-opacity='0.55'"))
    return shapes


def _rect(begin: float, end: float, y: float, height: float, colour: str, scale: float, more: str = "") -> str:
    x, width = LEFT + begin * scale, max((end - begin) * scale, 0.8)
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height}' fill='{colour}' {more}/>"


def _axis(y: float, longest: float, scale: float) -> list[str]:
    shapes = [f"<path d='M{LEFT} {y} H{LEFT + SPANWIDTH}' stroke='{LINE}' fill='none'/>"]
    for tick in range(0, int(longest) + 1, 50):
        x = LEFT + tick * scale
        shapes.append(f"<path d='M{x:.1f} {y} v5' stroke='{LINE}' fill='none'/>")
        shapes.append(_text(x, y + 18, f"{tick} ms" if tick == 0 else str(tick), "text-anchor='middle'"))
    return shapes


def _legend(y: float) -> list[str]:
    shapes = []
    for index, (name, says) in enumerate(SAYS.items()):
        x, top = (index % 2) * 420, y + index // 2 * 22
        height = THIN if name == "bucket" else 12
        colour = COLOURS.get(name, BUCKET)
        more = "fill-opacity='0.55'" if name == "bucket" else ""
        shapes.append(f"<rect x='{x}' y='{top - 10}' width='24' height='{height}' fill='{colour}' {more}/>")
        shapes.append(_text(x + 32, top, says))
    return shapes


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{text}</text>"


if __name__ == "__main__":
    draw() if sys.argv[1] == "draw" else measure(sys.argv[1])
