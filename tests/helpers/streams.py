"""Streams of simulated devices."""

import torch

TOO_EARLY = "without having waited for it"


def stream_on(index=0):
    return torch.Stream(device=f"sim:{index}")
