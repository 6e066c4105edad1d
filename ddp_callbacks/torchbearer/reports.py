"""Tell the other ranks why this one failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchbearer

from ddp_callbacks.process_group.failures import report_failure
from ddp_callbacks.process_group.runs import begin_run
from ddp_callbacks.torchbearer.base import DistributedCallback, State, wrap_methods


class ReportFailures(DistributedCallback):
    """Publish an exception that ends ``run``, ``evaluate`` or ``predict`` on this rank.

    The other ranks raise :class:`ddp_callbacks.errors.PeerError` with its text within about two seconds, instead of
    waiting for this rank. If all ranks catch it, they can call these methods again.

    Args:
        process_group: ``None`` is the default group.
    """

    def on_init(self, state: State) -> None:
        super().on_init(state)
        if self.world_size > 1:
            wrap_methods(state[torchbearer.SELF], ("run", "evaluate", "predict"), self._reporting)

    def on_start(self, state: State) -> None:
        begin_run(self.process_group)

    def _reporting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def reporting(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except BaseException as exception:
                report_failure(exception)
                raise

        return reporting
