"""Loads a checkpoint, from its folder or the Hugging Face Hub, with everything needed to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qwen35mm.checkpoints.gguf_folder import gguf_folder
from qwen35mm.checkpoints.hub_folders import hub_folder
from qwen35mm.checkpoints.lora_choices import Loras, read_choices
from qwen35mm.checkpoints.peft_folders import Adapter, read_adapter
from qwen35mm.checkpoints.shards import check_folder, gguf_file, model_name, some
from qwen35mm.config import MEDIA_TOKENS, ModelConfig
from qwen35mm.contract import SamplingParams
from qwen35mm.contract.sampling import read_generation_config
from qwen35mm.errors import CheckpointError, ConfigError, RequestError
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.devices import DeviceRequest
from qwen35mm.model.mtp import num_draft_ids
from qwen35mm.model.vocabulary import GrammarVocabulary
from qwen35mm.model.weight_formats import AS_STORED, ROUNDED_FORMATS
from qwen35mm.model.weights import OnRead, find_mtp, load_model
from qwen35mm.model.weights_cache import WeightsCache
from qwen35mm.prompt import ChatTemplate
from qwen35mm.tokenizer import Tokenizer
from qwen35mm_preprocess import ImageProcessing, VideoProcessing, family_processing, read_processing

# Never code, never pickles: weights as safetensors, everything else as text.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Values of `weights`. `bf16` and `auto` follow `dtype`; `auto` keeps a quantised checkpoint's own format.
WEIGHTS = ("auto", "bf16", *ROUNDED_FORMATS)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model and what belongs to it.

    Attributes:
        name: the folder's name or the Hub id.
        path: the folder that it was read from.
        weights: the format of its matrices: float32, bf16, int8, int4, as stored or fp8.
        eos_ids: ids that end a reply.
        vocabulary: for constrained decoding.
        generation: the checkpoint's sampling defaults.
        adapters: that change every request.
        named_adapters: those that a request may choose, by name.
    """

    name: str
    path: Path
    model: Qwen35Model
    weights: str
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    image_processing: ImageProcessing
    video_processing: VideoProcessing
    generation: SamplingParams
    eos_ids: frozenset[int]
    vocabulary: GrammarVocabulary
    adapters: tuple[Adapter, ...] = ()
    named_adapters: Mapping[str, Adapter] = field(default_factory=dict)

    def adapter_number(self, name: str | None) -> int:
        """An adapter's number for the model's `Routes`; 0 without a name.

        Raises:
            RequestError: there is none of that name.
        """
        if name is None:
            return 0
        if name not in self.named_adapters:
            known = some(list(self.named_adapters)) or "none"
            raise RequestError(f"There is no adapter {name!r:.200} here; there is {known}.")
        return 1 + list(self.named_adapters).index(name)


def load(
    path_or_hub_id: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    weights: str = "auto",
    weights_cache: WeightsCache | None = None,
    rope_scaling: str | None = None,
    mtp: bool = False,
    lora: Loras = None,
    progress: OnRead | None = None,
) -> LoadedModel:
    """Loads a Qwen3.5, 3.6 or 3.8 checkpoint.

    Args:
        path_or_hub_id: a folder, a GGUF file, `ollama:NAME` for an Ollama model, or a Hub id such as
            `Qwen/Qwen3.5-2B`, which is downloaded once.
        dtype: `bfloat16` (`auto`) or `float32`.
        device: `cpu`, `cuda`, `cuda:1`, or several: `cuda:0,cuda:1` splits the layers over two GPUs; `cuda:0,cpu`
            computes the layers that don't fit on the processor, slowly. `auto` takes the first GPU with enough room,
            else all GPUs together, and the CPU where there is no GPU.
        weights: `bf16`; `int8`, `fp8` (for cards) or `int4`: matrices in a half or a quarter of the memory. `auto`
            keeps the checkpoint's precision: `dtype`, or with bfloat16 a quantised checkpoint's integers or FP8 (on
            cards that multiply it). `model_library` chooses what fits into memory.
        weights_cache: keeps quantised weights for the processor on disk for the next start.
        rope_scaling: "yarn,factor=4" for four times as many positions (see `ModelConfig.from_pretrained`).
        mtp: loads the checkpoint's layer that drafts tokens, if it has one.
        lora: adapters that PEFT saved: a folder or a Hub id, "FOLDER=0.5" for half of its change, or several, whose
            changes are added up. They are merged into the weights before these are rounded; a quantised checkpoint
            keeps its integers, with the changes beside them. Folders with names, {"NAME": folder} or "NAME=FOLDER",
            stay beside the weights, and a request chooses one by `GenerationRequest.adapter`.
        progress: called with the bytes of weights that were read, and all of them.

    Raises:
        CheckpointError: files or tensors are missing, damaged or foreign.
        ConfigError: the model or a setting isn't supported.
    """
    if not isinstance(path_or_hub_id, str | Path) or not str(path_or_hub_id):
        raise CheckpointError(f"A model is a folder, or a Hub id such as Qwen/Qwen3.5-2B; got {path_or_hub_id!r}.")
    DeviceRequest.parse(device)  # before anything is downloaded
    torch_dtype = choose_dtype(dtype)
    integers = choose_integers(weights, torch_dtype)
    choices = read_choices(lora)
    adapters = tuple(read_adapter(each) for each in choices if each.name is None)
    named = {each.name: read_adapter(each) for each in choices if each.name is not None}
    folder = find_checkpoint(path_or_hub_id)
    config = read_config(folder, rope_scaling=rope_scaling, mtp=mtp)
    tokenizer = Tokenizer.from_pretrained(folder)
    _check_media_ids(config, tokenizer)
    template = ChatTemplate.from_pretrained(folder)
    # A text-only checkpoint has no settings for media.
    image_processing, video_processing = family_processing() if config.tower is None else read_processing(folder)
    generation = read_generation_config(folder)
    eos_ids = set(config.eos_token_ids) | _as_ids(generation.get("eos_token_id"))
    # Some checkpoints name only <|endoftext|>, but a chat turn ends with <|im_end|>.
    eos_ids |= {
        tokenizer.control_ids[text] for text in ("<|im_end|>", "<|endoftext|>") if text in tokenizer.control_ids
    }
    vocabulary = GrammarVocabulary(tokenizer, eos_ids)
    vocabulary.begin()
    how = {"dtype": torch_dtype, "device": device, "integers": integers}
    how |= {"adapters": adapters, "named": [*named.values()]}
    every = (*adapters, *named.values())
    # Before a tensor is read: the digests are those of what is read, or it is refused.
    for each in every:
        _ = each.digest
    model = load_model(folder, config, **how, cache=weights_cache, progress=progress)
    for each in every:
        each.check_unchanged()
    if model.mtp is not None and (count := num_draft_ids(config.text.vocab_size)) is not None:
        model.mtp.cut_head(model.head, torch.tensor(tokenizer.frequent_ids(count)), model.integers)
    return LoadedModel(
        name=model_name(path_or_hub_id),
        path=folder,
        model=model,
        weights=model.integers or weights_name(torch_dtype),
        config=config,
        tokenizer=tokenizer,
        template=template,
        image_processing=image_processing,
        video_processing=video_processing,
        generation=SamplingParams.from_generation_config(generation),
        eos_ids=frozenset(eos_ids),
        vocabulary=vocabulary,
        adapters=adapters,
        named_adapters=named,
    )


def read_config(folder: str | Path, *, rope_scaling: str | None = None, mtp: bool = False) -> ModelConfig:
    """A checkpoint's config for `load`'s arguments.

    Raises:
        CheckpointError: a file is missing, damaged or foreign.
        ConfigError: the model or a setting isn't supported.
    """
    config = ModelConfig.from_pretrained(folder, rope_scaling=rope_scaling)
    return find_mtp(folder, config) if mtp else config


def _check_media_ids(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError where config.json's media tokens aren't the tokenizer's."""
    for name, token in MEDIA_TOKENS.items():
        named, own = getattr(config, name), tokenizer.control_ids.get(token)
        if named is not None and own != named:
            has = "has no such token" if own is None else f"has {own:,} for it"
            raise CheckpointError(
                f"config.json: {name} is {named:,}, which stands for {token}, and the tokenizer {has}. One of the two "
                "files belongs to another model: download both again."
            )


def find_checkpoint(path_or_hub_id: str | Path) -> Path:
    """A checkpoint's folder; a Hub id is downloaded once.

    Raises:
        CheckpointError: there is no such folder, or it can't be downloaded.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        check_folder(path.resolve())
        return path.resolve()
    name = str(path_or_hub_id)
    if (file := gguf_file(path_or_hub_id)) is not None:
        return gguf_folder(file)
    if path.exists():
        raise CheckpointError(
            f"'{path.name}' is a file; give the folder that holds config.json and *.safetensors, or a GGUF file."
        )
    if isinstance(path_or_hub_id, Path) or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"There is no folder '{name}', and it isn't a Hub id such as Qwen/Qwen3.5-2B either.")
    return hub_folder(name, HUB_PATTERNS)


def weights_name(dtype: torch.dtype) -> str:
    """The name of a float weight format."""
    return {torch.bfloat16: "bf16", torch.float32: "float32"}[dtype]


def choose_dtype(name: str) -> torch.dtype:
    """The dtype for `load`'s `dtype`. Raises ConfigError."""
    if name == "auto":
        # Half the memory and faster decode everywhere; `dense.linear` handles CPUs without bfloat16 arithmetic.
        return torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto, {' or '.join(DTYPES)}; got '{name}'.")
    return DTYPES[name]


def choose_integers(weights: str, dtype: torch.dtype) -> str | None:
    """The format for `load`'s `weights`: one of `ROUNDED_FORMATS`, `AS_STORED` or None. Raises ConfigError."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights must be {', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]}; got '{weights}'.")
    if weights == "bf16" and dtype != torch.bfloat16:
        raise ConfigError("bf16 weights need --dtype bfloat16 (or auto): float32 keeps them in float32.")
    if weights == "auto" and dtype == torch.bfloat16:
        return AS_STORED
    return weights if weights in ROUNDED_FORMATS else None


def _as_ids(value: Any) -> set[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
        raise CheckpointError(f"generation_config.json: eos_token_id must be one or more token ids; got {value!r}.")
    return set(ids)
