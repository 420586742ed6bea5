"""SIGTERM, by which schedulers announce that a job will be killed."""

import signal
from typing import Any

import torch
import torch.distributed as dist


class StopSignal:
    """Remembers SIGTERM, so that the step under way can end.

    Args:
        enabled: otherwise the signal ends the process, as it does by default.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.received = enabled, False
        if enabled:
            signal.signal(signal.SIGTERM, self._receive)

    def on_any_rank(self) -> bool:
        """Returns True on all ranks if one has received the signal. Every rank calls this after the same step."""
        flag = torch.tensor(float(self.received))
        if self.enabled and dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _receive(self, *_: Any) -> None:
        self.received = True
