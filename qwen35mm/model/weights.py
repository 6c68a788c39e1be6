"""Loading: checks a checkpoint's tensors against the table of names and streams them straight into place.

All shards' headers are checked before the model is allocated or any data read, so that a wrong or damaged checkpoint is
refused at once. Peak memory is the weights in their final format and one buffer of 16 MiB.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from qwen35mm.checkpoints.adapters import AdaptedSource, with_adapters
from qwen35mm.checkpoints.peft_folders import Adapter
from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.safetensors_files import new_buffer
from qwen35mm.checkpoints.shards import some
from qwen35mm.checkpoints.sources import PlainSource, Source, described
from qwen35mm.checkpoints.tensor_names import (
    EMBEDDING,
    LM_HEAD,
    MTP_PREFIX,
    TEXT_PREFIX,
    VISION_PREFIX,
    Target,
    checkpoint_targets,
    has_split_experts,
    mtp_targets,
)
from qwen35mm.config import ModelConfig
from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm.model.attach import attach, beside_bytes
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.devices import DeviceRequest, place
from qwen35mm.model.mtp import draft_head_format, num_draft_ids
from qwen35mm.model.weight_formats import (
    AS_STORED,
    FP8,
    INTEGER_FORMATS,
    ROUNDED_FORMATS,
    ROUNDED_FP8,
    StackedWeight,
    Weight,
)
from qwen35mm.model.weights_cache import WeightsCache
from qwen35mm_kernels.backend import multiplies_fp8, multiplies_integers, why_not_triton
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_kernels.cpu.native.products import Groups
from qwen35mm_kernels.reference.fp8 import Blocks

logger = logging.getLogger(__name__)

# Gets the bytes of a checkpoint that were read, and all of them.
OnRead = Callable[[int, int], None]
MODEL_DTYPES = (torch.float32, torch.bfloat16)
_FLOAT_DTYPES = ("F32", "BF16", "F16")
# Computed values that some programs save. Any other surplus tensor may be part of the model's arithmetic.
_EXPERTS = ".experts."
_COMPUTED = (".inv_freq", ".position_ids", "._extra_state", ".num_batches_tracked")


def load_model(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    integers: str | None = None,
    cache: WeightsCache | None = None,
    adapters: Sequence[Adapter] = (),
    named: Sequence[Adapter] = (),
    progress: OnRead | None = None,
) -> Qwen35Model:
    """Makes the model that `config` describes and fills it from the safetensors files in `folder`.

    Args:
        dtype: float32 or bfloat16; A_log and dt_bias are float32 in both.
        device: as in `DeviceRequest.parse`.
        integers: `int8` or `int4` for matrices, or `AS_STORED` where possible; see `Qwen35Model`.
        cache: keeps a processor's integers for the next start; bfloat16 isn't kept.
        adapters: merged into the tensors before they are rounded to their format, or beside a quantised checkpoint's.
        named: beside the weights, for the rows of a batch that choose one by its number, from 1 on.
        progress: called after each tensor; not at all where the weights come from `cache`.

    Raises:
        CheckpointError: tensors are missing, unexpected, misshapen or of an unsupported dtype, a file is truncated, or
            there are no safetensors files.
        ConfigError: there is no such device, the weights don't fit into the GPUs' free memory, or the device has no
            kernels for the requested integers.
    """
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype must be torch.float32 or torch.bfloat16; got {dtype}.")
    stored = read_checkpoint(Path(folder), config.quantization, with_mtp=config.text.runs_mtp)
    separate_head = _has_separate_head(config, stored)
    split_experts = has_split_experts(stored, TEXT_PREFIX)
    targets = checkpoint_targets(config, separate_head=separate_head, split_experts=split_experts)
    if config.text.runs_mtp:
        targets += mtp_targets(config.text, split_experts=has_split_experts(stored, MTP_PREFIX))
    _check(targets, stored)
    if adapters:
        stored = with_adapters(stored, adapters)
        if LM_HEAD in stored and not separate_head:
            separate_head = True
            targets.append(Target(LM_HEAD, stored[LM_HEAD].shape, "lm_head.weight"))
    request = DeviceRequest.parse(device)
    check_integers(integers, request.devices)
    if integers == AS_STORED:
        integers = as_stored(stored, dtype, request.devices)
    make = partial(Qwen35Model, config, dtype=dtype, tie_word_embeddings=not separate_head, integers=integers)
    num_bytes = weights_bytes(stored, dtype, integers, request.devices, named)

    def skeleton() -> Qwen35Model:
        model = make(device=torch.device("meta"))
        _lay_out(model, targets, stored)
        return model

    places = place(Path(folder).name, num_bytes, config.text.num_layers, skeleton, request)
    is_kept = integers in INTEGER_FORMATS and not _on_cards(request.devices)
    kept = None
    if integers and is_kept and cache is not None:
        digests = tuple(each.digest for each in adapters)
        kept = cache.find(Path(folder), integers, dtype, with_mtp=config.text.runs_mtp, adapters=digests)
    if kept is not None and kept.exists() and kept.read_into(model := make(device=places, is_mapped=True)):
        attach(model, targets, stored, {}, named)
        return model
    model = make(device=places)
    held = _fill(model, targets, stored, progress)
    changed = {name: source for name in held if isinstance(source := stored[name], AdaptedSource)}
    became = integers or str(dtype).removeprefix("torch.")
    if integers in (AS_STORED, FP8):
        num_held = len(held)
        what = "FP8" if integers == FP8 else "their integers"
        became = f"stored: {num_held} matrices as {what}, the rest as {str(dtype).removeprefix('torch.')}"
    logger.info("Read %s; kept as %s, %.2f GB.", described(stored.values()), became, loaded_bytes(model) / 1e9)
    if kept is not None:
        kept.write(model)
    attach(model, targets, stored, {name: source.changes for name, source in changed.items()}, named)
    return model


def find_mtp(folder: str | Path, config: ModelConfig) -> ModelConfig:
    """The config with the checkpoint's layer of multi-token prediction running, if all of it is there.

    Many quantised checkpoints announce the layer and don't have it.

    Raises:
        CheckpointError: the checkpoint's files can't be read.
        ConfigError: its quantisation isn't supported.
    """
    if config.text.num_mtp_layers != 1:
        return config
    try:
        stored = read_checkpoint(Path(folder), config.quantization, with_mtp=True)
        own = {name: source for name, source in stored.items() if name.startswith(MTP_PREFIX)}
        _check(mtp_targets(config.text, split_experts=has_split_experts(own, MTP_PREFIX)), own)
    except (CheckpointError, ConfigError) as error:
        # Without the layer they may be fine.
        logger.info("No tokens are drafted by the checkpoint's own layer: %s", error)
        return config
    return config.with_mtp()


def check_integers(integers: str | None, devices: Sequence[torch.device]) -> None:
    """Raises ConfigError for a format on a GPU that has no kernels for it. A processor takes all, fp8 slowly."""
    for kind in {device.type for device in devices if device.type != "cpu"}:
        if integers in ROUNDED_FORMATS and (why := why_not_triton(kind)) is not None:
            raise ConfigError(
                f"{integers} weights need Triton's kernels on {kind}. {why}. Use --device cpu or --weights bf16."
            )
    if integers != ROUNDED_FP8:
        return
    for device in devices:
        if device.type == "cpu":
            logger.warning("fp8 weights are for cards: a processor multiplies them slowly. Use int8 there.")
        elif not multiplies_fp8(device):
            raise ConfigError(
                f"fp8 weights need a card that multiplies them, of compute capability 8.9 or newer; {device} doesn't. "
                "Use --weights int8."
            )


def as_stored(stored: Mapping[str, Source | Target], dtype: torch.dtype, devices: Sequence[torch.device]) -> str | None:
    """`FP8` or `AS_STORED` where all of the devices can keep some matrix in that format; else None."""
    if all(device.type == "cpu" for device in devices) and find_library() is not None:
        kinds = [AS_STORED]
    else:
        kinds = [FP8] * all(map(multiplies_fp8, devices)) + [AS_STORED] * all(map(multiplies_integers, devices))
    for kind in kinds:
        if held_formats(stored, dtype, kind, devices):
            return kind
    return None


def held_formats(
    stored: Mapping[str, Source | Target],
    dtype: torch.dtype,
    integers: str | None,
    devices: Sequence[torch.device] = (),
) -> dict[str, Groups | Blocks]:
    """The tensors that `AS_STORED` or `FP8` keeps in their own format, which gets them smaller, and that format."""
    if integers not in (AS_STORED, FP8) or dtype != torch.bfloat16:
        return {}
    found: dict[str, Groups | Blocks] = {}
    for name, source in stored.items():
        if not isinstance(source, Source) or _integer_bits(name, "int8") is None:
            continue
        groups = source.groups
        if groups is None or isinstance(groups, Blocks) != (integers == FP8):
            continue
        if groups.bits_per_value < 8 * dtype.itemsize:
            found[name] = groups
    uneven = _uneven_experts(stored, found) if integers == FP8 or _on_cards(devices) else frozenset()
    return {name: groups for name, groups in found.items() if name.partition(_EXPERTS)[0] not in uneven}


def _uneven_experts(stored: Mapping[str, object], held: Mapping[str, Groups | Blocks]) -> frozenset[str]:
    """Layers whose experts become floats: a card multiplies all of a layer's at once, which takes one format for gates
    and ups and one for downs."""
    formats: dict[tuple[str, bool], set[Groups | Blocks | None]] = defaultdict(set)
    for name in stored:
        layer, mark, rest = name.partition(_EXPERTS)
        if mark:
            formats[layer, "down" in rest].add(held.get(name))
    return frozenset(layer for (layer, _), kinds in formats.items() if len(kinds) > 1 or None in kinds)


def weights_bytes(
    stored: Mapping[str, Source | Target],
    dtype: torch.dtype,
    integers: str | None,
    devices: Sequence[torch.device] = (),
    named: Sequence[Adapter] = (),
) -> int:
    """Bytes of a checkpoint's tensors in their final format, without padding, and of what adapters put beside them.

    A head that repeats the embeddings counts, though it isn't loaded: only its numbers show that it does.

    Args:
        stored: by name, from the files' headers.
        integers: as for `load_model`.
        devices: where the tensors lie; by default a processor.
        named: adapters that requests choose.
    """
    num_bytes, held = _bytes_of(stored, dtype, integers, devices), held_formats(stored, dtype, integers, devices)
    own = sum(num_bytes(name) for name in stored)
    # Each named adapter repeats what couldn't be merged.
    beside = [
        change.low_rank
        for name, tensor in stored.items()
        if isinstance(tensor, AdaptedSource) and name in held
        for change in tensor.changes * (1 + len(named))
    ]
    beside += [each for adapter in named for several in adapter.low_rank.values() for each in several]
    on_cpu = not _on_cards(devices)
    own += sum(beside_bytes(each, dtype, on_cpu=on_cpu) for each in beside if each is not None)
    return math.ceil(own) + _draft_head_bytes(stored, dtype, integers, devices)


def _draft_head_bytes(
    stored: Mapping[str, Source | Target],
    dtype: torch.dtype,
    integers: str | None,
    devices: Sequence[torch.device],
) -> int:
    """Bytes of the rows of the output head that `MultiTokenPrediction.cut_head` copies."""
    vocab_size, width = stored[EMBEDDING].shape if EMBEDDING in stored else (0, 0)
    count = num_draft_ids(vocab_size)
    if count is None or not any(name.startswith(MTP_PREFIX) for name in stored):
        return 0
    format = draft_head_format(integers, on_cpu=not _on_cards(devices))
    bits = 8 * dtype.itemsize if format is None else INTEGER_FORMATS[format]
    return math.ceil(count * (width * bits / 8 + torch.int64.itemsize))


def loaded_bytes(model: Qwen35Model) -> int:
    """Bytes of a loaded model's weights, padding included."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def bytes_read_per_token(
    config: ModelConfig,
    stored: Mapping[str, Source | Target],
    dtype: torch.dtype,
    integers: str | None,
    devices: Sequence[torch.device] = (),
) -> float:
    """Bytes of weights that decoding one token reads; arguments as for `weights_bytes`."""
    has_head, num_bytes = LM_HEAD in stored, _bytes_of(stored, dtype, integers, devices)
    return sum(share_read(config, name, has_head) * num_bytes(name) for name in stored)


def share_read(config: ModelConfig, name: str, has_head: bool) -> float:
    """The share of a tensor that a decoded token reads: one row of embeddings beside a head; the chosen experts."""
    if name.startswith((VISION_PREFIX, MTP_PREFIX)) or (name == EMBEDDING and has_head):
        return 0.0
    moe = config.text.moe
    return moe.num_experts_per_tok / moe.num_experts if moe is not None and ".experts." in name else 1.0


def _bytes_of(
    stored: Mapping[str, Source | Target], dtype: torch.dtype, integers: str | None, devices: Sequence[torch.device]
) -> Callable[[str], float]:
    """The bytes of a tensor by its name."""
    held = held_formats(stored, dtype, integers, devices)

    def num_bytes(name: str) -> float:
        if integers in ROUNDED_FORMATS:
            bits = _integer_bits(name, integers)
        else:
            bits = held[name].bits_per_value if name in held else None
        return math.prod(stored[name].shape) * (dtype.itemsize if bits is None else bits / 8)

    return num_bytes


def _integer_bits(name: str, integers: str) -> float | None:
    """Bits of a value in an integer format; None for a tensor that stays a float."""
    if name in (EMBEDDING, LM_HEAD) or (_EXPERTS in name and integers == ROUNDED_FP8):
        return INTEGER_FORMATS["int8"]
    last = name.removesuffix(".weight").rpartition(".")[2]
    is_matrix = last.endswith("_proj") or last in ("in_proj_qkv", "in_proj_z", "fc")
    return ROUNDED_FORMATS[integers] if name.startswith((TEXT_PREFIX, MTP_PREFIX)) and is_matrix else None


def _on_cards(devices: Sequence[torch.device]) -> bool:
    return any(device.type != "cpu" for device in devices)


def _has_separate_head(config: ModelConfig, stored: dict[str, Source]) -> bool:
    """Whether the output head has its own weights; drops a stored head that only repeats the embeddings.

    As in transformers' tie_weights: where the config ties them but both are stored, they are tied only if equal.
    """
    if not config.tie_word_embeddings:
        return True
    if LM_HEAD not in stored:
        return False
    if EMBEDDING in stored and not stored[EMBEDDING].same_bytes(stored[LM_HEAD]):
        logger.warning("config.json ties %s to %s, but they differ: both are used.", LM_HEAD, EMBEDDING)
        return True
    del stored[LM_HEAD]
    return False


def _check(targets: list[Target], stored: dict[str, Source]) -> None:
    wanted = {target.name: target for target in targets}
    problems = []
    if missing := sorted(wanted.keys() - stored.keys()):
        problems.append(f"missing: {some(missing)}")
    surplus = sorted(stored.keys() - wanted.keys())
    if harmless := [name for name in surplus if name.endswith(_COMPUTED)]:
        logger.warning("Tensors that are computed anew aren't read: %s.", some(harmless))
    if unexpected := [name for name in surplus if name not in harmless]:
        problems.append(f"unexpected: {some([f'{name} ({stored[name].place[0].name})' for name in unexpected])}")
    both = sorted(wanted.keys() & stored.keys())
    misshapen = [
        f"{name} in {stored[name].place[0].name} is {list(stored[name].shape)}, expected {list(wanted[name].shape)}"
        for name in both
        if stored[name].shape != wanted[name].shape
    ]
    if misshapen:
        problems.append(f"wrong shape: {some(misshapen)}")
    foreign = [
        f"{name} in {each.tensor.file.name} is {each.tensor.dtype}"
        for name in both
        if isinstance(each := stored[name], PlainSource) and each.tensor.dtype not in _FLOAT_DTYPES
    ]
    if foreign:
        how = "float64 can be cast: model.to(torch.float32).save_pretrained(...); others lack their scales"
        problems.append(f"wrong dtype (expected {', '.join(_FLOAT_DTYPES)}; {how}): {some(foreign)}")
    if problems:
        what = f"The checkpoint's tensors don't fit its config.json. {'; '.join(problems)}."
        raise CheckpointError(f"{what} Download it again, or take another one.")


def _fill(
    model: Qwen35Model,
    targets: list[Target],
    stored: dict[str, Source],
    progress: OnRead | None,
) -> set[str]:
    """Fills a model; returns the names of the tensors that keep a checkpoint's format."""
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, Weight)}
    parameters = {name: parameter.detach().view(-1) for name, parameter in model.named_parameters()}
    sizes = {name: flat.numel() for name, flat in parameters.items() if not _inside(name, matrices)}
    sizes |= {name: x.out_features * x.in_features for name, x in matrices.items() if not _inside(name, matrices)}
    filled: dict[str, int] = defaultdict(int)
    for target in targets:
        filled[target.parameter] += target.numel
    assert dict(filled) == sizes, "a parameter isn't filled whole"
    held = _lay_out(model, targets, stored)
    buffer = new_buffer()
    total, done = sum(stored[target.name].num_bytes for target in targets), 0
    for target in sorted(targets, key=lambda target: stored[target.name].place):
        source = stored[target.name]
        if (matrix := matrices.get(target.parameter)) is not None:
            first, width = target.offset // matrix.in_features, matrix.in_features
            for rows in source.grouped_rows() if target.name in held else source.rows(width, buffer):
                matrix.fill(first, rows)
                first += len(rows)
        else:
            source.read_into(parameters[target.parameter][target.offset : target.offset + target.numel], buffer)
        done += source.num_bytes
        if progress is not None:
            progress(done, total)
    return held


def _lay_out(model: Qwen35Model, targets: Sequence[Target], stored: Mapping[str, Source]) -> set[str]:
    """Makes the parts of weights that keep a checkpoint's format; returns the names of the tensors that fill them.

    Tensors merged into one matrix may have several formats: neighbours of one format share a part.
    """
    held: set[str] = set()
    formats = held_formats(stored, model.dtype, model.integers, model.devices)
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, Weight)}
    by_parameter: dict[str, list[Target]] = defaultdict(list)
    for target in sorted(targets, key=lambda target: target.offset):
        by_parameter[target.parameter].append(target)
    for name, matrix in matrices.items():
        if not isinstance(matrix, StackedWeight) or _inside(name, matrices):
            continue
        for first, weight in matrix.stored():
            runs = []
            for target in by_parameter[name]:
                start = target.offset // matrix.in_features - first
                stop = start + target.numel // matrix.in_features
                count = min(stop, weight.out_features) - max(start, 0)
                if count <= 0:
                    continue
                is_whole = count == stop - start
                groups = formats.get(target.name) if is_whole else None
                held |= {target.name} if groups else set()
                # Blocks of rows begin anew with each of a stack's matrices.
                num_matrices = target.shape[0] if is_whole and len(target.shape) == 3 else 1
                runs += [(count // num_matrices, groups)] * num_matrices
            weight.lay_out(runs)
    return held


def _inside(name: str, matrices: Mapping[str, Weight]) -> bool:
    """Whether a parameter or weight is part of another weight."""
    parents = [name[:index] for index, letter in enumerate(name) if letter == "."]
    return any(parent in matrices for parent in parents)
