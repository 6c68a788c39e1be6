"""Loading: a checkpoint folder's tensors, checked against the table of names and streamed straight into place.

The headers of all shards are checked before the model is allocated or any data read, so that a wrong or damaged
checkpoint is refused at once. Peak memory is the weights themselves and one buffer of 16 MiB.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from qwen35mm.checkpoints.safetensors_files import (
    StoredTensor,
    find_shards,
    open_shard,
    read_headers,
    read_into,
    same_bytes,
    some,
)
from qwen35mm.checkpoints.tensor_names import EMBEDDING, IGNORED_PREFIXES, LM_HEAD, Target, checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.errors import CheckpointError
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.devices import DeviceRequest, place

logger = logging.getLogger(__name__)

MODEL_DTYPES = (torch.float32, torch.bfloat16)
_FLOAT_DTYPES = ("F32", "BF16", "F16")


def load_model(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Qwen35Model:
    """Makes the model that `config` describes and fills it from the safetensors files in `folder`.

    Args:
        dtype: float32 or bfloat16; A_log and dt_bias are kept in float32 in both.
        device: as in `DeviceRequest.parse`.
        progress: called with (bytes read, bytes in all) after each tensor.

    Raises:
        CheckpointError: tensors are missing, unexpected, misshapen or of a dtype that isn't supported, a file is
            truncated, or there are no safetensors files.
        ConfigError: there is no such device, or the weights don't fit into the GPUs' free memory.
    """
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype must be torch.float32 or torch.bfloat16; got {dtype}.")
    stored = read_headers(find_shards(Path(folder)))
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith(IGNORED_PREFIXES)}
    separate_head = _has_separate_head(config, stored)
    split_experts = config.text.moe is not None and any(".experts.0." in name for name in stored)
    targets = checkpoint_targets(config, separate_head=separate_head, split_experts=split_experts)
    _check(targets, stored)
    make = partial(Qwen35Model, config, dtype=dtype, tie_word_embeddings=not separate_head)
    num_bytes = sum(math.prod(tensor.shape) for tensor in stored.values()) * dtype.itemsize
    skeleton = partial(make, device=torch.device("meta"))
    request = DeviceRequest.parse(device)
    model = make(device=place(Path(folder).name, num_bytes, config.text.num_layers, skeleton, request))
    _fill(model, targets, stored, progress)
    return model


def _has_separate_head(config: ModelConfig, stored: dict[str, StoredTensor]) -> bool:
    """Whether the output head has weights of its own; drops a stored head that only repeats the embeddings.

    As transformers' tie_weights: where the config ties them but both are stored, equal ones are tied, and
    different ones are not.
    """
    if not config.tie_word_embeddings:
        return True
    if LM_HEAD not in stored:
        return False
    if EMBEDDING in stored and not same_bytes(stored[EMBEDDING], stored[LM_HEAD]):
        logger.warning("config.json ties %s to %s, but they differ: both are used.", LM_HEAD, EMBEDDING)
        return True
    del stored[LM_HEAD]
    return False


def _check(targets: list[Target], stored: dict[str, StoredTensor]) -> None:
    wanted = {target.name: target for target in targets}
    problems = []
    if missing := sorted(wanted.keys() - stored.keys()):
        problems.append(f"missing: {some(missing)}")
    if unexpected := sorted(stored.keys() - wanted.keys()):
        problems.append(f"unexpected: {some([f'{name} ({stored[name].file.name})' for name in unexpected])}")
    both = sorted(wanted.keys() & stored.keys())
    misshapen = [
        f"{name} in {stored[name].file.name} is {list(stored[name].shape)}, expected {list(wanted[name].shape)}"
        for name in both
        if stored[name].shape != wanted[name].shape
    ]
    if misshapen:
        problems.append(f"wrong shape: {some(misshapen)}")
    foreign = [
        f"{name} in {stored[name].file.name} is {stored[name].dtype}"
        for name in both
        if stored[name].dtype not in _FLOAT_DTYPES
    ]
    if foreign:
        problems.append(f"wrong dtype (expected {', '.join(_FLOAT_DTYPES)}): {some(foreign)}")
    if problems:
        raise CheckpointError(f"The checkpoint's tensors don't fit its config.json. {'; '.join(problems)}.")


def _fill(
    model: Qwen35Model,
    targets: list[Target],
    stored: dict[str, StoredTensor],
    progress: Callable[[int, int], None] | None,
) -> None:
    parameters = {name: parameter.detach().view(-1) for name, parameter in model.named_parameters()}
    filled: dict[str, int] = defaultdict(int)
    by_file: dict[Path, list[Target]] = defaultdict(list)
    for target in targets:
        filled[target.parameter] += target.numel
        by_file[stored[target.name].file].append(target)
    assert dict(filled) == {name: flat.numel() for name, flat in parameters.items()}, "a parameter isn't filled whole"
    total, done = sum(stored[target.name].num_bytes for target in targets), 0
    for path, group in by_file.items():
        with open_shard(path) as file:
            for target in sorted(group, key=lambda target: stored[target.name].start):
                flat = parameters[target.parameter]
                read_into(file, stored[target.name], flat[target.offset : target.offset + target.numel])
                done += stored[target.name].num_bytes
                if progress is not None:
                    progress(done, total)
