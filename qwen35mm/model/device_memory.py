"""A device's memory in words: whether a model fits, and what was missing when something didn't."""

from __future__ import annotations

import re

import torch

from qwen35mm.errors import ConfigError

# What torch's message says of the size that it couldn't get.
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
# Kernels, CUDA's own context and a first piece of prefill need some of it, whatever the model.
_RESERVE_BYTES = 1 << 30


def check_fits(name: str, num_bytes: int, device: torch.device) -> None:
    """Checks that a model's weights fit into what is free on a GPU; anything else is left to the system.

    Raises:
        ConfigError: they don't.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes + _RESERVE_BYTES <= free:
        return
    roomy = [
        f"cuda:{index}"
        for index in range(torch.cuda.device_count())
        if torch.cuda.mem_get_info(index)[0] >= num_bytes + _RESERVE_BYTES
    ]
    room = f" There is room on {roomy[0]} (--device {roomy[0]})." if roomy else ""
    raise ConfigError(
        f"{name} takes {_gib(num_bytes)} of weights and about {_gib(_RESERVE_BYTES)} to work with, and {device} has "
        f"{_gib(free)} free of {_gib(total)}.{room} Close what else uses the card, choose a smaller model, or run on "
        "the processor (--device cpu), which is slower."
    )


def shortage(error: torch.OutOfMemoryError, device: torch.device) -> str:
    """What a person is told when memory ran out in the middle of work; the cache torch keeps is given back first."""
    advice = "Use smaller pictures, fewer frames or a shorter chat; or start with a shorter context or fewer slots."
    if device.type != "cuda":
        return f"Memory ran out while this was computed. {advice}"
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    asked = _ASKED.search(str(error))
    what = f"{asked[1]} {asked[2]} were asked for" if asked else "more was asked for than there was"
    return f"The GPU's memory ran out while this was computed: {what}, {_gib(free)} are free of {_gib(total)}. {advice}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
