"""CUDA graphs: work on a card that is captured once and replayed."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

# Runs before a capture: they compile kernels and let libraries make their workspaces.
_NUM_WARM_UPS = 2


def capture(device: torch.device, compute: Callable[[], None], memory: Any) -> Callable[[], None]:
    """Captures work on a card after some runs of it. It must depend only on tensors, and nothing in it may wait.

    Args:
        memory: a graph pool; graphs that share one never run at the same time.

    Returns:
        Replays the work. What its last run made holds no values before the first replay.
    """
    with torch.cuda.device(device):
        current, stream = torch.cuda.current_stream(), _capture_stream(device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(_NUM_WARM_UPS):
                    compute()
        finally:
            # What a run that failed has launched still writes.
            current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Collecting an old graph during a capture would break the capture. It isn't collected before, either: with a
        # program's half a million objects that takes as long as many captures.
        gc.disable()
        try:
            # Other threads (files, another engine) may do what a capture forbids in this one.
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                compute()
        finally:
            gc.enable()
            # A failed capture doesn't leave its stream.
            torch.cuda.set_stream(current)
    return graph.replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures on a device. torch's default belongs to the first capture's device, and libraries
    keep a workspace per stream."""
    return torch.cuda.Stream(device)
