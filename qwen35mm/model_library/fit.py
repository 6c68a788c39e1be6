"""Chooses the weights' format and the cache's budgets from the available memory."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qwen35mm.cache.kv_types import AUTO
from qwen35mm.cache.planner import STARTED_BYTES
from qwen35mm.checkpoints.adapters import with_adapters
from qwen35mm.checkpoints.peft_folders import Adapter, read_adapter
from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.sources import Source
from qwen35mm.checkpoints.tensor_names import Target
from qwen35mm.config import ModelConfig
from qwen35mm.cpu import usable_cores
from qwen35mm.engine.memory import pixel_bytes
from qwen35mm.errors import ConfigError
from qwen35mm.model import DeviceRequest
from qwen35mm.model.devices import gib
from qwen35mm.model.load import choose_dtype, choose_integers, find_checkpoint, read_config, weights_name
from qwen35mm.model.weight_formats import AS_STORED, INTEGER_FORMATS, ROUNDED_FORMATS
from qwen35mm.model.weights import as_stored, bytes_read_per_token, check_integers, weights_bytes
from qwen35mm.model_library.memory import (
    Available,
    MemoryNeed,
    NoRoomError,
    available_bytes,
    available_within,
    first_in_memory,
    longest_that_fits,
    memory_need,
    tokenizer_bytes,
)
from qwen35mm.model_library.options import BackendOptions
from qwen35mm_kernels.backend import multiplies_integers
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_preprocess.say import said_of, say

logger = logging.getLogger(__name__)

# The shortest useful conversation.
_SHORTEST_CONTEXT = 2_048
# For one program with many requests that nobody reads live: one slot for each core, or all of these on a card.
_MOST_SLOTS = 16
# Share of the memory left by weights for running states and media, and each slot's media (two of the three wait).
_SLOTS_SHARE = 1 / 8
_MEDIA_A_SLOT = 3
# A step that reads less takes so little that the work around a draft is as much.
_LEAST_STEP_BYTES = 128 << 20


def fit(
    options: BackendOptions, folder: Path, name: str, *, devices: Sequence[torch.device], memory_bytes: int
) -> tuple[BackendOptions, MemoryNeed]:
    """The options to load and start a checkpoint with, and the memory that they need.

    `auto` weights are the checkpoint's own on a GPU, and wherever these fit; else int8, else int4. The log says which.

    Args:
        name: the model's name for messages.
        devices: the devices that it may use, all together.
        memory_bytes: the memory that it may use on them.

    Raises:
        NoRoomError: it doesn't fit, with the numbers and what would help.
        CheckpointError, ConfigError: its files or a setting can't be used.
    """
    config, stored = read_shapes(folder, options)
    how = {"devices": devices, "memory_bytes": memory_bytes, "runtime_bytes": tokenizer_bytes(config)}
    fitted, need = fit_tensors(options, config, stored, name, **how)
    if fitted.weights != options.weights:
        dtype = choose_dtype(options.dtype)
        asked = asked_format(options, stored, devices)
        text = "%s has %s weights: %s instead of %s of %s, which don't fit into %s of memory beside a context of %s."
        plain, room = asked or weights_name(dtype), gib(memory_bytes)
        sizes = gib(need.plan.weights_bytes), gib(weights_bytes(stored, dtype, asked, devices, named_adapters(options)))
        logger.warning(text, name, fitted.weights, *sizes, plain, room, f"{need.plan.context_length:,} tokens")
    return _with_layer(fitted, need, config, stored, folder, name, **how)


def _with_layer(
    options: BackendOptions,
    need: MemoryNeed,
    config: ModelConfig,
    stored: Mapping[str, Source | Target],
    folder: Path,
    name: str,
    *,
    devices: Sequence[torch.device],
    memory_bytes: int,
    runtime_bytes: int,
) -> tuple[BackendOptions, MemoryNeed]:
    """`auto` speculation with the checkpoint's layer of multi-token prediction, if nothing else shrinks for it.

    Args:
        options, need: as they fit without the layer.
    """
    settings = options.settings
    if settings.speculate != "auto" or not settings.num_drafts_on(devices[0]) or config.text.num_mtp_layers != 1:
        return options, need
    dtype = choose_dtype(options.dtype)
    step_bytes = bytes_read_per_token(config, stored, dtype, asked_format(options, stored, devices), devices)
    if step_bytes < _LEAST_STEP_BYTES:
        logger.info("%s drafts nothing by its own layer: a step is so short that it wouldn't pay", name)
        return options, need
    wanted = replace(options, settings=replace(settings, speculate="mtp"))
    config, tensors = read_shapes(folder, wanted)
    if not config.text.runs_mtp:
        return options, need
    how = {"devices": devices, "memory_bytes": memory_bytes, "runtime_bytes": runtime_bytes}
    try:
        fitted, with_layer = fit_tensors(wanted, config, tensors, name, **how)
    except ConfigError as error:
        logger.info("%s drafts nothing by its own layer, which doesn't fit beside the rest: %s", name, error)
        return options, need
    if fitted != wanted:
        logger.info("%s drafts nothing by its own layer: less of earlier prompts could be kept beside it", name)
        return options, need
    logger.info("%s also drafts by its own layer; --speculate ngram leaves it out", name)
    return fitted, with_layer


def read_shapes(folder: Path, options: BackendOptions) -> tuple[ModelConfig, dict[str, Source]]:
    """A checkpoint's config and tensors, as `options` load them.

    Raises:
        CheckpointError, ConfigError: its files or a setting can't be used.
    """
    config = read_config(folder, rope_scaling=options.rope_scaling, mtp=options.mtp)
    stored = read_checkpoint(folder, config.quantization, with_mtp=config.text.runs_mtp)
    return config, with_adapters(stored, [read_adapter(each) for each in options.lora if each.name is None])


def named_adapters(options: BackendOptions) -> list[Adapter]:
    """The adapters that requests choose, which take memory beside the weights. Raises CheckpointError."""
    return [read_adapter(each) for each in options.lora if each.name is not None]


def fit_tensors(
    options: BackendOptions,
    config: ModelConfig,
    stored: Mapping[str, Source | Target],
    name: str,
    *,
    devices: Sequence[torch.device],
    memory_bytes: int,
    runtime_bytes: int,
    size_of: Callable[[str | None], int] | None = None,
) -> tuple[BackendOptions, MemoryNeed]:
    """`fit` from a config and its tensors, without a download; logs nothing.

    Args:
        size_of: returns the bytes of the weights in a format, if the caller keeps them.
    """
    dtype = choose_dtype(options.dtype)
    asked = asked_format(options, stored, devices)
    on_cpu = all(device.type == "cpu" for device in devices)
    # On a card a smaller format is only suggested: the user has to ask for it.
    is_open = on_cpu and options.weights == "auto"
    can_round = on_cpu or all(map(multiplies_integers, devices))
    if size_of is None:
        named = named_adapters(options)
        size_of = functools.cache(lambda integers: weights_bytes(stored, dtype, integers, devices, named))
    how = {"dtype": dtype, "devices": devices, "memory_bytes": memory_bytes, "runtime_bytes": runtime_bytes}
    refused = None
    for integers in (asked, *(INTEGER_FORMATS if can_round else ())):
        if refused is not None and size_of(integers) >= size_of(asked):
            continue
        chosen = integers if integers in ROUNDED_FORMATS else None
        try:
            need = memory_need(name, config, size_of(integers), options, integers=chosen, **how)
        except NoRoomError as error:
            # With `auto` report the smallest format's error, else the requested one's.
            refused = error if refused is None or is_open else refused
            continue
        if refused is not None and not is_open:
            raise NoRoomError(
                say(
                    "{refused} With --weights {integers} it fits: {size} of weights.",
                    refused=said_of(refused),
                    integers=str(integers),
                    size=gib(size_of(integers)),
                )
            )
        return replace(options, weights=chosen or options.weights, cache=need.settings), need
    assert refused is not None
    raise refused


def asked_format(
    options: BackendOptions, stored: Mapping[str, Source | Target], devices: Sequence[torch.device]
) -> str | None:
    """The weights' format that `options` ask for if everything fits, as `weights_bytes` takes it."""
    dtype = choose_dtype(options.dtype)
    asked = choose_integers(options.weights, dtype)
    check_integers(asked, devices)
    return as_stored(stored, dtype, devices) if asked == AS_STORED else asked


@dataclass(frozen=True)
class FormatOffer:
    """A weight format offered for a model.

    Attributes:
        weights: the value for `BackendOptions`.
        num_bytes: of the weights.
        speedup: upper bound of the speedup over the checkpoint's own format, by the bytes that a token reads; None for
            that format itself, on a card, and without the compiled part, where integers are no faster.
    """

    weights: str
    num_bytes: int
    speedup: float | None


def offered_formats(
    config: ModelConfig, stored: Mapping[str, Source | Target], dtype: torch.dtype, devices: Sequence[torch.device]
) -> tuple[FormatOffer, ...]:
    """The checkpoint's own precision, then the smaller ones; none on cards without kernels for these."""
    on_cpu = all(device.type == "cpu" for device in devices)
    if not on_cpu and not all(map(multiplies_integers, devices)):
        return ()
    own = bytes_read_per_token(config, stored, dtype, None)
    offers = [FormatOffer(weights_name(dtype), weights_bytes(stored, dtype, None), None)]
    for integers in INTEGER_FORMATS:
        is_told = on_cpu and find_library() is not None
        speedup = own / bytes_read_per_token(config, stored, dtype, integers) if is_told else None
        offers.append(FormatOffer(integers, weights_bytes(stored, dtype, integers, devices), speedup))
    return tuple(offers)


def fit_source(
    options: BackendOptions, source: str | Path, name: str, *, available: Available = available_bytes
) -> tuple[BackendOptions, Path]:
    """`fit` for the first model. Refuses nothing without `max_memory`: the system may find more memory than we see.

    Args:
        source: a folder, or a Hub id, which is downloaded once.
        name: the model's name for messages.
        available: returns a device's free memory in bytes.

    Returns:
        the options to load and start it with, and the checkpoint's folder.

    Raises:
        CheckpointError, ConfigError: its files or a setting can't be used.
        NoRoomError: nothing fits into `max_memory`.
    """
    devices = DeviceRequest.parse(options.device).devices  # before anything is downloaded
    choose_integers(options.weights, choose_dtype(options.dtype))
    on_cpu = all(device.type == "cpu" for device in devices)
    if options.max_memory is not None and not on_cpu:
        raise ConfigError(say("--max-memory is for the CPU's memory. On a GPU, use --kv-memory and --context-length."))
    folder = find_checkpoint(source)
    if not on_cpu:
        return options, folder
    if options.max_memory is not None:
        return first_in_memory(options, lambda tried: _fit_within(tried, folder, name)), folder
    try:
        how = {"devices": devices, "memory_bytes": sum(map(available, devices))}
        fitted, _ = first_in_memory(options, lambda tried: fit(tried, folder, name, **how))
    except NoRoomError as error:
        logger.warning("%s", error)
        fitted = replace(options, weights="int4") if options.weights == "auto" else options
    return fitted, folder


def with_slots_for_many(
    options: BackendOptions, folder: Path, name: str, *, available: Available = available_bytes
) -> BackendOptions:
    """`fit_source`'s options with as many slots as keep the machine busy, unless the user chose their number.

    Halves the slots until their running states and waiting media take at most an eighth of the memory that the weights
    leave, and nothing else shrinks for them. `available` is the memory before the model is loaded.
    """
    devices = DeviceRequest.parse(options.device).devices
    on_cpu = all(device.type == "cpu" for device in devices)
    slots, fewest = min(_MOST_SLOTS, usable_cores()) if on_cpu else _MOST_SLOTS, options.settings.slots
    # `fit_source` chose a single slot because memory allows no more.
    if options.fixed_slots or fewest == 1:
        return options
    config, stored = read_shapes(folder, options)
    available = available if options.max_memory is None else available_within(options)
    memory_bytes = sum(map(available, devices))
    how = {"devices": devices, "memory_bytes": memory_bytes, "runtime_bytes": tokenizer_bytes(config)}
    waiting_bytes = _MEDIA_A_SLOT * pixel_bytes(config, options.media_budget(devices[0]))
    while slots > fewest:
        wanted = replace(options, settings=replace(options.settings, slots=slots))
        with contextlib.suppress(NoRoomError):
            fitted, need = fit_tensors(wanted, config, stored, name, **how)
            most_bytes = (memory_bytes - need.plan.weights_bytes) * _SLOTS_SHARE
            if fitted == wanted and need.plan.slot_bytes + slots * waiting_bytes <= most_bytes:
                return wanted
        slots //= 2
    return options


def _fit_within(options: BackendOptions, folder: Path, name: str) -> BackendOptions:
    """The first that fits `max_memory`: as asked, with one slot, with int8 KV, with the longest context that fits.

    Logs the choice. Nothing that the user set is changed.

    Raises:
        NoRoomError: none fits.
    """
    most, cpu = options.max_memory, torch.device("cpu")
    assert most is not None
    memory_bytes = available_within(options)(cpu) - STARTED_BYTES
    config, stored = read_shapes(folder, options)
    how = {"devices": [cpu], "memory_bytes": memory_bytes, "runtime_bytes": tokenizer_bytes(config)}

    def tried(options: BackendOptions) -> tuple[BackendOptions, MemoryNeed]:
        return fit_tensors(options, config, stored, name, **how)

    def fits(context_length: int) -> bool:
        try:
            tried(smallest.with_context(context_length))
        except NoRoomError:
            return False
        return True

    candidates = [options]
    if not options.fixed_slots:
        candidates.append(replace(options, settings=replace(options.settings, slots=1)))
    if options.cache.kv_dtype == AUTO:
        candidates.append(replace(candidates[-1], cache=replace(options.cache, kv_dtype="int8")))
    smallest = candidates[-1]
    for candidate in candidates:
        try:
            fitted, need = tried(candidate)
            break
        except NoRoomError as error:
            refused = error
    else:
        longest = options.settings.context_length_of(config.text, name)
        length = None
        if options.settings.context_length is None:
            length = longest_that_fits(min(_SHORTEST_CONTEXT, longest), longest, fits)
        if length is None:
            raise NoRoomError(
                say(
                    "--max-memory {most}, {own} of it for the program: {refused}",
                    most=gib(most),
                    own=gib(most - memory_bytes),
                    refused=said_of(refused),
                )
            )
        fitted, need = tried(smallest.with_context(length))
    fitted, need = _with_layer(fitted, need, config, stored, folder, name, **how)
    weights = fitted.weights if fitted.weights != "auto" else weights_name(choose_dtype(options.dtype))
    plan = need.plan
    logger.warning(
        "Within %s: %s weights (%s), a context of %s tokens with KV as %s, %d slots; %s for them, %s for the program, "
        "%s for what is kept.",
        gib(most),
        weights,
        gib(plan.weights_bytes),
        f"{plan.context_length:,}",
        fitted.cache.kv_dtype,
        plan.num_slots,
        gib(plan.device_bytes),
        gib(most - memory_bytes + plan.runtime_bytes),
        gib(plan.state_bytes + plan.vision_bytes),
    )
    return fitted
