"""SIGTERM, by which schedulers announce that a job will be killed, and Ctrl-C."""

import signal
from typing import Any

import torch
import torch.distributed as dist


class StopSignal:
    """Remembers SIGTERM and the first Ctrl-C, so that the step under way can end. The second Ctrl-C ends the process.

    Args:
        enabled: otherwise the signals end the process, as they do by default.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.received = enabled, False
        if enabled:
            signal.signal(signal.SIGTERM, self._receive)
            signal.signal(signal.SIGINT, self._receive)

    def on_any_rank(self) -> bool:
        """Returns True on all ranks if one has received a signal. Every rank calls this after the same step."""
        flag = torch.tensor(float(self.received))
        if self.enabled and dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _receive(self, *_: Any) -> None:
        self.received = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
