"""The memory that a model would take on this machine, from its small files alone: reads and downloads no weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from qwen35mm.cache import MemoryPlan
from qwen35mm.cache.kv_types import AUTO
from qwen35mm.cache.planner import STARTED_BYTES, host_memory_bytes
from qwen35mm.checkpoints.shards import model_name
from qwen35mm.checkpoints.sources import Source
from qwen35mm.checkpoints.tensor_names import Target
from qwen35mm.config import ModelConfig
from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm.model import DeviceRequest
from qwen35mm.model.load import choose_dtype, weights_name
from qwen35mm.model.weight_formats import INTEGER_FORMATS
from qwen35mm.model.weights import weights_bytes
from qwen35mm.model_library.catalogue import HUB_MODELS, config_tensors
from qwen35mm.model_library.fit import FormatOffer, asked_format, named_adapters, offered_formats, read_shapes
from qwen35mm.model_library.hub import download_config, missing
from qwen35mm.model_library.installed import find_model, is_hub_id
from qwen35mm.model_library.memory import (
    available_bytes,
    longest_that_fits,
    plan_model,
    resident_bytes,
    running_alone,
    running_with_others,
    tokenizer_bytes,
)
from qwen35mm.model_library.options import BackendOptions
from qwen35mm_preprocess import MediaBudgetError, MediaProcessor, family_processing, read_processing
from qwen35mm_preprocess.video_probe import VideoInfo

# Height and width.
PICTURES = ((480, 640), (1080, 1920), (3024, 4032))
_VIDEO, _VIDEO_FPS, _VIDEO_S = (1080, 1920), 30, 60
_SHORTEST = 1024
# Tried beside the model's own type, unless the user chose one.
SMALLER_KV = ("int8", "int4")


@dataclass(frozen=True)
class FormatPlan:
    """A model with one format of weights and one of keys and values.

    Attributes:
        weights: bf16, float32, int8, int4, or stored: a quantised checkpoint's own integers.
        kv_dtype: see `CacheSettings`.
        needed: plan for one context, keeping nothing else: its `total_bytes` have to fit. Its keys and values are in a
            file if memory doesn't hold them and `BackendOptions.kv_directory` allows one.
        fits: whether they do.
        least_bytes: what it takes among several models, with the smallest useful cache; on a card without the host's.
        most: plan with the most memory that it would take, including finished requests that are kept; None if it
            doesn't fit.
        largest_context: tokens of the longest context that fits; None if none does.
    """

    weights: str
    kv_dtype: str
    needed: MemoryPlan
    fits: bool
    least_bytes: int
    most: MemoryPlan | None
    largest_context: int | None


@dataclass(frozen=True)
class MediumCost:
    """The cost of a picture or a video in a prompt.

    Attributes:
        num_tokens: at most, with marks and timestamps.
        kv_bytes, embedding_bytes: of those tokens in the KV cache, and of the vision tower's output.
    """

    kind: str
    size: tuple[int, int]
    num_tokens: int
    kv_bytes: int
    embedding_bytes: int


@dataclass(frozen=True)
class Forecast:
    """Everything that `qwen35mm plan` shows.

    Attributes:
        memory_bytes: available for the model, including the program's own memory where that counts.
        num_positions: most tokens of a context, whatever the memory.
        weights_from: "headers" of the weights' files, or by shapes: "config.json" or "the catalogue".
        download_bytes: of its files that are still to download; None if it is on this machine.
        state_bytes: one sequence's recurrent and conv states.
        recurrent_bytes: the recurrent part of them, always float32.
        formats: each format of weights with each of keys and values; the requested one comes first.
        offers: the weight formats offered on a processor.
        adapter_bytes: of adapters with a name, in the first format; the formats' weights include them.
    """

    name: str
    device: str
    memory_bytes: int
    num_positions: int
    weights_from: str
    download_bytes: int | None
    state_bytes: int
    recurrent_bytes: int
    formats: tuple[FormatPlan, ...]
    offers: tuple[FormatOffer, ...]
    media: tuple[MediumCost, ...]
    adapter_bytes: int

    @property
    def taken(self) -> FormatPlan:
        """What a start takes: the first format that fits with the requested KV type, else the smallest."""
        asked = [each for each in self.formats if each.kv_dtype == self.formats[0].kv_dtype]
        return next((each for each in asked if each.fits), asked[-1])

    @property
    def suggestion(self) -> FormatPlan | None:
        """The fitting format that changes least, weights before KV; else the one with the longest context, if any."""
        fitting = [each for each in self.formats if each.fits]
        kv_types = [each.kv_dtype for each in self.formats]
        if fitting:
            return min(fitting, key=lambda each: kv_types.index(each.kv_dtype))
        return max(
            (each for each in self.formats if each.largest_context is not None),
            key=lambda each: each.largest_context or 0,
            default=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, including `MemoryPlan`'s sums."""
        found = asdict(self)
        for told, made in zip(found["formats"], self.formats, strict=True):
            for key in ("needed", "most"):
                if (plan := getattr(made, key)) is not None:
                    told[key]["total_bytes"] = plan.total_bytes
        return found


def forecast(source: str | Path, options: BackendOptions, *, room_bytes: int | None = None) -> Forecast:
    """The memory of a model in each format that `options` allow, and what fits.

    Args:
        source: a folder, a GGUF file, an installed model, or a Hub id; if the catalogue doesn't know it, its
            config.json is fetched.
        room_bytes: memory available to it in this running process; None plans a new process on this machine.

    Raises:
        CheckpointError, ConfigError: the model or a setting can't be used.
    """
    # Measured before any reading: a start imports what this process has imported by now.
    own_bytes = resident_bytes() + STARTED_BYTES if room_bytes is None else 0
    devices = DeviceRequest.parse(options.device).devices
    on_cpu = all(device.type == "cpu" for device in devices)
    folder, config, stored, weights_from, download_bytes = _find_shapes(source, options)
    dtype = choose_dtype(options.dtype)
    asked = asked_format(options, stored, devices)
    is_open = on_cpu and options.weights == "auto"
    kv_types = [options.cache.kv_dtype, *(SMALLER_KV if options.cache.kv_dtype == AUTO else ())]
    memory_bytes = options.max_memory if room_bytes is None else room_bytes
    if memory_bytes is None:
        memory_bytes = sum(map(available_bytes, devices)) + (resident_bytes() if on_cpu else 0)
    runtime_bytes = own_bytes + tokenizer_bytes(config)
    named = named_adapters(options)
    plain_bytes = weights_bytes(stored, dtype, asked, devices)
    formats = []
    details = {"name": model_name(source), "dtype": dtype, "device": devices[0], "runtime_bytes": runtime_bytes}
    if on_cpu:
        # Measured once: each format is planned many times.
        details["available_bytes"] = host_memory_bytes()
    for integers in dict.fromkeys((asked, *(INTEGER_FORMATS if is_open else ()))):
        size = weights_bytes(stored, dtype, integers, devices, named)
        weights = integers or weights_name(dtype)
        for kv_dtype in kv_types:
            wanted = replace(options, cache=replace(options.cache, kv_dtype=kv_dtype))
            with contextlib.suppress(ConfigError) if kv_dtype in SMALLER_KV else contextlib.nullcontext():
                formats.append(_memory_or_file(weights, config, size, wanted, memory_bytes, on_cpu, details))
    return Forecast(
        name=model_name(source),
        device=", ".join(map(str, devices)),
        memory_bytes=memory_bytes,
        num_positions=config.text.max_position_embeddings,
        weights_from=weights_from,
        download_bytes=download_bytes,
        state_bytes=config.state_bytes(dtype),
        recurrent_bytes=config.recurrent_bytes,
        formats=tuple(formats),
        offers=offered_formats(config, stored, dtype, devices),
        media=_media(folder, config, dtype, options, devices[0]),
        adapter_bytes=weights_bytes(stored, dtype, asked, devices, named) - plain_bytes,
    )


def room_for_models(options: BackendOptions) -> int:
    """The memory for several models in a new process, without the program itself."""
    devices = DeviceRequest.parse(options.device).devices
    on_cpu = all(device.type == "cpu" for device in devices)
    if options.max_memory is not None:
        return max(options.max_memory - resident_bytes() - STARTED_BYTES, 0)
    return max(sum(map(available_bytes, devices)) - (STARTED_BYTES if on_cpu else 0), 0)


def _memory_or_file(
    weights: str, config: ModelConfig, size: int, options: BackendOptions, memory_bytes: int, on_cpu: bool, *how: Any
) -> FormatPlan:
    """A plan with keys and values in memory; in a file if one is allowed and only that fits."""

    def planned(options: BackendOptions) -> FormatPlan:
        return _format(weights, config, size, options, memory_bytes, on_cpu, *how)

    if options.kv_directory is None or not on_cpu:
        return planned(options)
    try:
        made = planned(options)
    except ConfigError:
        return planned(options.in_file())
    with contextlib.suppress(ConfigError):
        if not made.fits and (in_file := planned(options.in_file())).fits:
            return in_file
    return made


def _format(
    weights: str,
    config: ModelConfig,
    size: int,
    options: BackendOptions,
    memory_bytes: int,
    on_cpu: bool,
    details: Mapping[str, Any],
) -> FormatPlan:
    def planned(
        options: BackendOptions, *, alone: bool, has_others: bool = False, limit_bytes: int | None = None
    ) -> MemoryPlan:
        # On a card that is what the weights leave: the program's own memory isn't there.
        how = {"available_bytes": max(memory_bytes - size, 0), **details, "limit_bytes": limit_bytes}
        most = plan_model(config, size, options, cache=replace(options.cache, kv_bytes=None), **how)
        cache = running_alone(options.cache, most) if alone else options.cache
        if has_others:
            cache = running_with_others(options.cache, most, config.state_bytes(details["dtype"]))
        return plan_model(config, size, options, cache=cache, **how)

    def fits(context_length: int) -> bool:
        try:
            plan = planned(options.with_context(context_length), alone=True)
        except ConfigError:
            return False
        return (plan.total_bytes if on_cpu else plan.device_bytes) <= memory_bytes

    needed = planned(replace(options, max_memory=None), alone=True)
    least = planned(replace(options, max_memory=None), alone=True, has_others=True)
    least_bytes = least.total_bytes if on_cpu else least.device_bytes
    here = fits(needed.context_length)
    most = planned(options, alone=False, limit_bytes=memory_bytes if on_cpu else None) if here else None
    longest = longest_that_fits(_SHORTEST, config.text.max_position_embeddings, fits)
    return FormatPlan(weights, options.cache.kv_dtype, needed, here, least_bytes, most, longest)


class _Shapes(NamedTuple):
    """What a plan needs of a model. Attributes: see `Forecast`; `folder` is None if only the catalogue knows it."""

    folder: Path | None
    config: ModelConfig
    stored: Mapping[str, Source | Target]
    weights_from: str
    download_bytes: int | None


def _find_shapes(source: str | Path, options: BackendOptions) -> _Shapes:
    """Reads no weights, and asks the network only about models that the catalogue doesn't know.

    Raises:
        CheckpointError: there is no such model, or its config.json can't be downloaded.
    """
    path, missing_bytes = Path(source).expanduser(), None
    try:
        folder = path.resolve() if (path / "config.json").is_file() else find_model(source).folder
    except CheckpointError:
        hub_id = str(source)
        if path.exists() or not is_hub_id(hub_id):
            raise
        for model in HUB_MODELS:
            if model.hub_id == hub_id:
                config = model.config_with(options.rope_scaling, mtp=options.mtp)
                left = missing(hub_id, model.download_bytes)
                return _Shapes(None, config, config_tensors(config), "the catalogue", left)
        folder, num_bytes = download_config(hub_id)
        missing_bytes = missing(hub_id, num_bytes)
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf*")):
        return _Shapes(folder, *read_shapes(folder, options), "headers", None)
    config = ModelConfig.from_pretrained(folder, rope_scaling=options.rope_scaling)
    if options.mtp and config.text.num_mtp_layers == 1:
        config = config.with_mtp()
    return _Shapes(folder, config, config_tensors(config), "config.json", missing_bytes)


def _media(
    folder: Path | None, config: ModelConfig, dtype: torch.dtype, options: BackendOptions, device: torch.device
) -> tuple[MediumCost, ...]:
    if config.tower is None:
        return ()
    own = folder if folder is not None and any(folder.glob("*processor_config.json")) else None
    processing = family_processing() if own is None else read_processing(own)
    # Once the medium's segment has ended.
    token_bytes = int(config.kv_bytes_per_token(*options.cache.kv_formats(dtype)) * options.cache.keep.media)
    processor = MediaProcessor(*processing, budget=options.media_budget(device), cache_bytes_per_token=token_bytes)
    plans = []
    for height, width in PICTURES:
        # A medium that no budget allows has no cost.
        with contextlib.suppress(MediaBudgetError):
            plans.append(processor.plan(Image.new("L", (width, height))))
    count = _VIDEO_FPS * _VIDEO_S
    pts = np.arange(count)
    nothing = np.zeros(count, dtype=bool)
    minute = VideoInfo(_VIDEO, None, pts, nothing, pts / _VIDEO_FPS, _VIDEO_FPS, True, _VIDEO_S, True, ())
    with contextlib.suppress(MediaBudgetError):
        plans.append(processor.plan_frames(minute))
    row_bytes = config.text.hidden_size * dtype.itemsize
    return tuple(
        MediumCost(x.kind, x.source_size, x.num_prompt_tokens, x.cache_bytes, x.num_tokens * row_bytes) for x in plans
    )
