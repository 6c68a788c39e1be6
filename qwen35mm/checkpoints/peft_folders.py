"""PEFT's folders: adapter_config.json and adapter_model.safetensors, read as changes of a checkpoint's tensors.

The tensors in the file say what is changed, whatever the config's patterns of targets are; the config says by how much.
Formulas are those of peft 0.21 (tuners/lora/layer.py, dora.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from qwen35mm.checkpoints.hub_folders import hub_folder, shown_name
from qwen35mm.checkpoints.lora_choices import LoraChoice
from qwen35mm.checkpoints.safetensors_files import StoredTensor, read_headers
from qwen35mm.checkpoints.shards import check_files, some
from qwen35mm.checkpoints.tensor_names import LM_HEAD, TEXT_PREFIX, VISION_PREFIX
from qwen35mm.checkpoints.weights_digest import hash_file, look
from qwen35mm.errors import CheckpointError
from qwen35mm.outside_json import read_json

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_FLOATS = ("F32", "BF16", "F16")
# PEFT's prefix, the module, and its part; files written by other means keep the adapter's name behind the part.
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_(?:embedding_)?[AB]|lora_magnitude_vector)(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?"
)
_SAVED = re.compile(r"\.modules_to_save(?:\.(?!weight$|bias$)[^.]+)?(?=\.)")
# A module's place in the family, by the names of the multimodal and the text-only class, of now and of earlier.
_TEXT_MODULE = re.compile(
    r"(?:model\.)?(?:language_model\.)?(?:model\.)?(?P<rest>(?:layers|embed_tokens|norm)(?:\..+)?)"
)
_VISION_MODULE = re.compile(r"(?:model\.)?visual\.(?P<rest>.+)")
_HEAD_MODULE = re.compile(r"(?:(?:model\.)?language_model\.)?lm_head(?P<rest>(?:\..+)?)")
# Options under which the file's tensors mean something else than low-rank changes of single tensors.
_OTHER_METHODS = {
    "alora_invocation_tokens": "is for a part of the prompt alone",
    "arrow_config": "chooses among adapters by the token",
    "kasa_config": "changes the model's own matrices first",
    "layer_replication": "repeats layers",
    "lora_bias": "adds biases that the model has no place for",
    "monteclora_config": "draws its weights at random",
    "trainable_token_indices": "changes single tokens' embeddings",
    "use_bdlora": "keeps blocks of its matrices alone",
    "use_qalora": "sums groups of inputs first",
}
# Numbers that no adapter has; patterns of module names that could take minutes to match.
_MAX_NUMBER = 1e9
_MAX_PATTERN, _MAX_REPEATS = 500, 3
_NESTED = re.compile(r"\)[*+{]")
# Initialisations that take the adapter's start out of the model's own matrices.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LowRank:
    """scaling * up @ down, added to a matrix; for a stack of experts' matrices, one such product for each.

    Attributes:
        down: PEFT's lora_A.
        up: PEFT's lora_B.
        rank: of one matrix.
        magnitude: of DoRA: the length of each row of the result.
        is_embedding: whether `up` and `down` are lora_embedding_A and _B, of the transposed table.
    """

    down: StoredTensor
    up: StoredTensor
    rank: int
    scaling: float
    magnitude: StoredTensor | None = None
    is_embedding: bool = False


@dataclass(frozen=True)
class Adapter:
    """What one PEFT folder changes, by names of the family's own checkpoints.

    Attributes:
        name: the folder's, or the Hub id.
        low_rank: by module, as `model.language_model.layers.0.mlp.down_proj`; of a module with several parameters, a
            stack of experts, there may be several.
        whole: tensors that take the place of the model's, by name: `modules_to_save`, and trained biases.
        keeps_ties: whether a change of the embeddings also changes a head that is tied to them.
        made_for: the model that it was trained on, in its maker's words.
        looks: of both files, when their headers were read.
    """

    name: str
    folder: Path
    scale: float
    low_rank: Mapping[str, tuple[LowRank, ...]]
    whole: Mapping[str, StoredTensor]
    keeps_ties: bool = False
    made_for: str | None = None
    looks: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """Hex SHA-256 of both files and the scale. Raises CheckpointError if they can't be read any more."""
        try:
            files = [hash_file(self.folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE)]
        except OSError as error:
            raise CheckpointError(f"The adapter {self.name} can't be read ({type(error).__name__}).") from None
        return hashlib.sha256(json.dumps([*files, repr(self.scale)]).encode()).hexdigest()

    def check_unchanged(self) -> None:
        """Raises CheckpointError if the files were replaced since their headers were read."""
        if _looks(self.folder) != self.looks:
            raise self.error("its files were replaced while they were read.", "Start again.")

    def error(self, what: str, advice: str) -> CheckpointError:
        return CheckpointError(f"The adapter {self.name}: {what} {advice}")

    def foreign(self, what: str) -> CheckpointError:
        """The error for a change that doesn't fit the model."""
        made_for = f" ({self.made_for})" if self.made_for else ""
        return self.error(what, f"Use it with the model that it was trained on{made_for}.")


@dataclass(frozen=True)
class _Config:
    """What adapter_config.json says of the tensors."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_stabilised: bool
    is_dora: bool
    raw: Mapping[str, Any] = field(repr=False)

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.ranks, module, self.rank)

    def scaling(self, module: str) -> float:
        rank = self.rank_of(module)
        return _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_stabilised else rank)


def read_adapter(choice: LoraChoice) -> Adapter:
    """Reads a folder's config, and the headers of its tensors; one of the Hub is downloaded once.

    Raises:
        CheckpointError: it can't be downloaded; it is no folder of PEFT's with a LoRA, or of a kind that can't be used;
            its files are damaged.
    """
    folder = (choice.source if isinstance(choice.source, Path) else _download(choice.source)).resolve()
    _check_folder(folder)
    looks = _looks(folder)
    config = _read_config(folder)
    try:
        tensors = read_headers([folder / WEIGHTS_FILE])
    except OSError as error:
        raise CheckpointError(f"{shown_name(folder)}/{WEIGHTS_FILE} can't be read ({type(error).__name__}).") from None
    parts: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    whole: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise _bad(folder, f"{key} is {tensor.dtype}, where {', '.join(_FLOATS)} are expected", "Save it again.")
        path = key.removeprefix("base_model.model.")
        # PEFT saves embeddings beside their change, as they were.
        if (original := path.removesuffix(".base_layer.weight")) != path and _has_parts(tensors, original):
            continue
        if (found := _PART.fullmatch(path)) is not None:
            into, name = parts[found["module"]], found["part"]
        elif ".lora_" in path or ".token_adapter." in path:
            advice = "Train it without lora_bias and trainable_token_indices."
            raise _bad(folder, f"{key} is no part of a LoRA that can be used here", advice)
        else:
            into, name = whole, _family(folder, key, _SAVED.sub("", path).replace(".base_layer.", "."))
        if name in into:
            raise _bad(folder, f"{key} and {into[name].name} change the same tensor", "Save one adapter alone.")
        into[name] = tensor
    if not parts and not whole:
        raise _bad(folder, "it has no tensors", "Save the adapter again.")
    low_rank: dict[str, list[LowRank]] = defaultdict(list)
    for module, own in parts.items():
        family = _family(folder, f"{module}.{min(own)}", module.replace(".base_layer", ""))
        low_rank[family].append(_low_rank(folder, module, own, config))
    logger.info("Adapter %s: %s", shown_name(folder), _described(low_rank, whole, choice.scale))
    return Adapter(
        shown_name(folder),
        folder,
        choice.scale,
        {module: tuple(each) for module, each in low_rank.items()},
        whole,
        keeps_ties=config.raw.get("ensure_weight_tying") is True,
        made_for=str(config.raw.get("base_model_name_or_path") or "") or None,
        looks=looks,
    )


@functools.cache
def _download(hub_id: str) -> Path:
    """Asked once a process: a plan and the load must see the same files."""
    folder = hub_folder(hub_id, [CONFIG_FILE, WEIGHTS_FILE])
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"'{hub_id}' on the Hugging Face Hub is no adapter that can be used: it has no {name}. A pickled "
                "adapter_model.bin is never read: it can run code when loaded."
            )
    return folder


def _has_parts(tensors: Mapping[str, StoredTensor], module: str) -> bool:
    return any(f"base_model.model.{module}.lora_" in key for key in tensors)


def _looks(folder: Path) -> tuple[str, ...]:
    """What tells a file from another one in its place. Raises CheckpointError."""
    try:
        return tuple(look(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE))
    except OSError as error:
        raise _bad(folder, f"it can't be read ({type(error).__name__})", "Get the folder again.") from None


def _check_folder(folder: Path) -> None:
    name = shown_name(folder)
    if not folder.is_dir():
        raise CheckpointError(f"There is no adapter folder '{name}': give the folder that holds {CONFIG_FILE}.")
    if not (folder / CONFIG_FILE).is_file():
        if (folder / "config.json").is_file():
            raise CheckpointError(f"'{name}' holds a whole model, no adapter: name it as the model.")
        inner = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}"))
        hint = f" Adapters are in its folders {some(inner)}." if inner else ""
        raise CheckpointError(f"'{name}' is no adapter: it has no {CONFIG_FILE}.{hint}")
    if not (folder / WEIGHTS_FILE).is_file():
        if list(folder.glob("adapter_model.bin")):
            raise CheckpointError(
                f"'{name}' has its adapter in adapter_model.bin, a pickle, which can run code when loaded and "
                f"is never read. Save it as safetensors with PEFT: model.save_pretrained(folder)."
            )
        raise CheckpointError(f"'{name}' has {CONFIG_FILE}, but no {WEIGHTS_FILE}: get the whole folder again.")
    check_files([folder / WEIGHTS_FILE])


def _read_config(folder: Path) -> _Config:
    try:
        raw = read_json(folder / CONFIG_FILE)
    except (OSError, ValueError):
        raise _bad(folder, f"{CONFIG_FILE} can't be read as JSON", "Get the folder again.") from None
    if not isinstance(raw, dict):
        raise _bad(folder, f"{CONFIG_FILE} holds no names and values", "Get the folder again.")
    if raw.get("peft_type") != "LORA":
        what = f"{CONFIG_FILE} has peft_type {raw.get('peft_type')!r}, where 'LORA' is expected"
        raise _bad(folder, what, "Merge other kinds into the model with PEFT's merge_and_unload.")
    for option, why in _OTHER_METHODS.items():
        if raw.get(option):
            raise _bad(folder, f"{option} is set: it {why}, which isn't done here", "Train it without that.")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGED_BASE):
        what = f"init_lora_weights is '{init}', so it fits a changed model, not the original one"
        advice = "Save it with PEFT's path_initial_model_for_weight_conversion, which makes a plain LoRA of it."
        raise _bad(folder, what, advice)
    ranks = _numbers(folder, raw, "rank_pattern")
    for name, rank in (("r", raw.get("r")), *ranks.items()):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise _bad(folder, f"{CONFIG_FILE} gives {name} the rank {rank!r}", "A rank is a whole number above 0.")
    alpha = raw.get("lora_alpha")
    if not _is_number(alpha):
        raise _bad(folder, f"{CONFIG_FILE} has lora_alpha {alpha!r}, where a number is expected", "Save it again.")
    alphas = _numbers(folder, raw, "alpha_pattern")
    return _Config(raw["r"], alpha, ranks, alphas, raw.get("use_rslora") is True, raw.get("use_dora") is True, raw)


def _numbers(folder: Path, raw: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Numbers by pattern. Raises CheckpointError."""
    found = raw.get(option) or {}
    if not isinstance(found, dict):
        raise _bad(folder, f"{option} is {found!r}, where numbers by name are expected", "Save it again.")
    for pattern, number in found.items():
        try:
            re.compile(pattern)
        except re.error:
            raise _bad(folder, f"{option} has {pattern!r}, which is no pattern", "Save it again.") from None
        if len(pattern) > _MAX_PATTERN or len(re.findall(r"[*+{]", pattern)) > _MAX_REPEATS or _NESTED.search(pattern):
            advice = "Write out the modules' names."
            raise _bad(folder, f"{option} has {pattern[:80]!r}, which could take minutes to match", advice)
        if not _is_number(number):
            raise _bad(folder, f"{option} gives {pattern!r} {number!r}, where a number is expected", "Save it again.")
    return found


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number of a size that an adapter may have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _by_pattern(numbers: Mapping[str, Any], module: str, usual: Any) -> Any:
    """As PEFT's get_pattern_key: the first pattern that a module's name ends with."""
    return next((numbers[pattern] for pattern in numbers if re.match(rf"(.*\.)?({pattern})$", module)), usual)


def _low_rank(folder: Path, module: str, parts: Mapping[str, StoredTensor], config: _Config) -> LowRank:
    """A module's change, from its parts. Raises CheckpointError."""
    is_embedding = any(part.startswith("lora_embedding") for part in parts)
    names = ("lora_embedding_B", "lora_embedding_A") if is_embedding else ("lora_A", "lora_B")
    needed = (*names, "lora_magnitude_vector") if config.is_dora else names
    if missing := [name for name in needed if name not in parts]:
        raise _bad(folder, f"{module} has no {' and no '.join(missing)}", "The file is incomplete: get it again.")
    if surplus := sorted(parts.keys() - set(needed)):
        raise _bad(folder, f"{module} has {', '.join(surplus)}, which {CONFIG_FILE} doesn't say", "Save it again.")
    down, up = (parts[name] for name in names)
    if is_embedding and config.is_dora:
        raise _bad(folder, f"{module} is a table of embeddings with use_dora", "Train it without one of the two.")
    rank = config.rank_of(module)
    # Of a stack of experts there is a multiple of it.
    first = parts[names[1]] if is_embedding else down
    found = first.shape[0] if first.shape else 0
    is_stack = module.replace(".base_layer", "").endswith(".experts")
    if found != rank and not (is_stack and found and found % rank == 0):
        what = f"{first.name} is {list(first.shape)}, rank {found}, and {CONFIG_FILE} says rank {rank}"
        raise _bad(folder, what, "The two files belong to different adapters: get both again.")
    return LowRank(down, up, rank, config.scaling(module), parts.get("lora_magnitude_vector"), is_embedding)


def _family(folder: Path, key: str, path: str) -> str:
    """A module's or tensor's name in the family's own checkpoints. Raises CheckpointError."""
    for pattern, prefix in ((_VISION_MODULE, VISION_PREFIX), (_TEXT_MODULE, TEXT_PREFIX), (_HEAD_MODULE, "lm_head")):
        if (found := pattern.fullmatch(path)) is not None:
            return prefix + found["rest"]
    what = f"{key} names no part of a Qwen3.5 model: its layers, embed_tokens, norm, {LM_HEAD} or visual"
    raise _bad(folder, what, "The adapter is for another family of models.")


def _described(low_rank: Mapping[str, Any], whole: Mapping[str, Any], scale: float) -> str:
    ranks = sorted({each.rank for several in low_rank.values() for each in several})
    found = [f"{len(low_rank)} modules of rank {', '.join(map(str, ranks))}"] if ranks else []
    found += [f"{len(whole)} whole tensors"] if whole else []
    return f"{' and '.join(found)}, scale {scale:g}."


def _bad(folder: Path, what: str, advice: str) -> CheckpointError:
    return CheckpointError(f"The adapter {shown_name(folder)}: {what}. {advice}")
