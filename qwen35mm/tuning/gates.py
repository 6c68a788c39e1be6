"""Trains the gates that choose which keys and values `--kv-keep` keeps.

The model reads a conversation, and then the same once more behind a request to repeat it. In each KV head a token is
needed as much as the most attention that it gets from there (KVzip, arXiv:2505.23416). A layer's gate learns this from
the layer's inputs alone (Fast KVzip, arXiv:2601.17668). The model only runs forward; gradients are the gates'.

    FILE                               the gates, in place at once when everything is done
    .FILE.<digest of the run>/0012     inputs and needs of one conversation's tokens; a killed run continues behind it
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F

from qwen35mm.cache import CacheSettings
from qwen35mm.cache.gates import Gate, gate_scores, gate_shapes, gates_file
from qwen35mm.captioning.manifest.files import RunLock, disk_errors, lock_for, replacing
from qwen35mm.captioning.records import printable
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.contract import EncodedMedium, Message, Text, iter_media
from qwen35mm.engine import CachedPrompt, EngineSettings
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.runtime import InlineExecutor, Runtime
from qwen35mm.errors import ConfigError
from qwen35mm.model import LoadedModel
from qwen35mm.prompt import PromptBuilder
from qwen35mm.tuning.gate_texts import Conversations
from qwen35mm.tuning.output import digest_of
from qwen35mm_preprocess import MediaBudget, MediaProcessor, PreparedMedia

_AGAIN = "Repeat the conversation so far, word for word."
# A conversation is read twice; longer ones would be cut off.
_CONTEXT = 8_192
_BUDGET = MediaBudget(max_image_tokens=512, max_video_tokens=1024)
# Queries whose attention is computed at a time.
_QUERIES = 128
# One conversation of so many is held out.
_HELD_OUT = 8
_BATCH, _RATE, _WARM_UP = 1024, 2e-2, 0.1
# Less attention than this is none, and so many tokens at either end share its value.
_LEAST_NEED, _OUTLIERS = 1e-5, 0.02


@dataclass(frozen=True)
class GateSettings:
    """How gates are trained.

    Attributes:
        conversations: how many are read.
        tokens: most tokens of each that the gates see.
        rank: of the projection that the heads of a layer share.
        steps: of the optimiser, for each layer.
    """

    conversations: int = 64
    tokens: int = 512
    rank: int = 16
    steps: int = 600
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """Finished gates.

    Attributes:
        overlap: by layer, how many of the half of the held-out tokens that is needed most the gate finds; chance is
            0.5.
        num_parameters: of all gates.
        num_left_out: conversations that were too long.
    """

    overlap: dict[int, float]
    num_parameters: int
    num_left_out: int


def check_free(out: Path, *, replace: bool) -> None:
    """Raises ConfigError if the file of the gates exists and may not be replaced."""
    if out.exists() and not replace:
        raise ConfigError(f"'{printable(out.name)}' exists. Name another file with --out, or add --replace.")


def train(
    loaded: LoadedModel,
    out: Path,
    conversations: Conversations,
    settings: GateSettings | None = None,
    *,
    replace: bool = False,
    told: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Trained:
    """Trains a model's gates and writes them to a file. After a kill, the same call continues.

    Args:
        loaded: with its layer of multi-token prediction, if the checkpoint has one.
        replace: whether an existing file may be replaced.
        told: called with "reading" or "training", what is done of it, and all of it.

    Raises:
        ConfigError: the file exists, or every conversation was too long.
        CaptioningError, OutputError: another run writes the file, or it can't be written.
        MediaError: a medium can't be read.
    """
    settings = settings or GateSettings()
    check_free(out, replace=replace)
    model = weights_digest(loaded.path, None)
    text = "" if conversations.text is None else hashlib.sha256(conversations.text.encode()).hexdigest()
    media = [(str(path), path.stat().st_size) for path in conversations.media]
    run = digest_of(model, loaded.weights, [each.digest for each in loaded.adapters], asdict(settings), text, media)
    folder = out.parent / f".{out.name}.{run}"
    with disk_errors(printable(out.name)):
        folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(lock_for(out), f"to {printable(out.name)}")
    try:
        reader = _Reader(loaded, conversations, settings)
        for number in range(settings.conversations):
            told("reading", number, settings.conversations)
            path = folder / f"{number:04}"
            if not path.exists():
                part = safetensors.torch.save(reader.read(number))
                with replacing(path) as file:
                    file.write(part)
        told("reading", settings.conversations, settings.conversations)
        parts = [folder / f"{number:04}" for number in range(settings.conversations)]
        trained, found = _fit(loaded, parts, settings, told)
        made = gates_file(found, model)
        with replacing(out) as file:
            file.write(made)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()
        lock_for(out).unlink(missing_ok=True)
    return trained


class _Reader:
    """Runs conversations through the model."""

    def __init__(self, loaded: LoadedModel, conversations: Conversations, settings: GateSettings) -> None:
        self._loaded, self._conversations, self._settings = loaded, conversations, settings
        self._builder = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config)
        self._processor = MediaProcessor(loaded.image_processing, loaded.video_processing, budget=_BUDGET)
        self._context = min(_CONTEXT, loaded.config.text.max_position_embeddings)
        kv_bytes = (self._context + 64) * loaded.config.kv_bytes_per_token(loaded.model.dtype)
        self._runtime = Runtime(
            loaded,
            EngineSettings(context_length=self._context, slots=1),
            CacheSettings(reuse=False, kv_bytes=kv_bytes),
            reader=InlineExecutor(),
            writer=InlineExecutor(),
            budget=_BUDGET,
        )

    def read(self, number: int) -> dict[str, torch.Tensor]:
        """Some of a conversation's tokens: by layer `N.x` [n, hidden], their inputs, and `N.need` [n, heads]; nothing
        of a conversation that is too long."""
        messages = self._conversations.make(number, self._loaded)
        media = tuple(self._prepared(messages))
        plans = [medium.plan for medium in media]
        num_tokens = len(self._builder.history(messages, plans, enable_thinking=False).token_ids)
        twice = [*messages, Message("user", (Text(_AGAIN),)), *messages]
        prompt = self._builder.history(twice, plans * 2, enable_thinking=False)
        if len(prompt.token_ids) > self._context:
            return {}
        seen = _Seen(num_tokens)
        with closing(Prefill(self._runtime, CachedPrompt(prompt, media * 2), watch=seen)) as prefill:
            while not prefill.done:
                prefill.step()
            keys = prefill.cache.export()["k"]
        order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(number))
        chosen = order[: self._settings.tokens].sort().values
        found: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(self._runtime.pools.kv.layers):
            q, k = seen.queries(layer), self._runtime.pools.kv.formats[0].dequantise(keys[index], torch.float32)
            need = needs(q, k.to(q.device), num_tokens)
            found[f"{layer}.x"] = seen.inputs(layer)[chosen].to("cpu", torch.bfloat16)
            found[f"{layer}.need"] = _levels(need.cpu())[chosen]
        return found

    def _prepared(self, messages: list[Message]) -> Iterator[PreparedMedia]:
        for part in iter_media(messages):
            assert not isinstance(part.source, PreparedMedia | EncodedMedium)
            yield self._processor.prepare(part.source, kind=part.kind)


class _Seen:
    """Keeps the inputs of a prompt's first tokens, and the queries of the others; see `Batch.watch`."""

    def __init__(self, num_first: int) -> None:
        self._num_first = num_first
        self._parts: dict[int, tuple[list[torch.Tensor], list[torch.Tensor], int]] = {}

    def __call__(self, layer_idx: int, x: torch.Tensor, q: torch.Tensor) -> None:
        inputs, queries, start = self._parts.get(layer_idx, ([], [], 0))
        first = max(self._num_first - start, 0)
        inputs.append(x[:first].clone())
        queries.append(q[first:].clone())
        self._parts[layer_idx] = inputs, queries, start + len(x)

    def inputs(self, layer_idx: int) -> torch.Tensor:
        return torch.cat(self._parts[layer_idx][0])

    def queries(self, layer_idx: int) -> torch.Tensor:
        return torch.cat(self._parts[layer_idx][1])


@torch.inference_mode()
def needs(q: torch.Tensor, k: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """How much the first tokens of a prompt are needed behind them.

    Args:
        q: [T, Hq, D], the queries of the tokens behind them.
        k: [num_tokens + T, H, D], the keys of all.

    Returns:
        [num_tokens, H] float32, the most attention that each gets from a query of the head.
    """
    heads, width = k.shape[1:]
    k, found = k.float(), q.new_zeros(heads, num_tokens, dtype=torch.float32)
    places = torch.arange(len(k), device=k.device)
    for start in range(0, len(q), _QUERIES):
        some = q[start : start + _QUERIES].float().view(-1, heads, q.shape[1] // heads, width)
        logits = torch.einsum("thgd,khd->hgtk", some, k) * width**-0.5
        own = num_tokens + start + torch.arange(len(some), device=k.device)
        logits.masked_fill_(places > own[:, None], -torch.inf)
        found = torch.maximum(found, logits.softmax(-1)[..., :num_tokens].amax((1, 2)))
    return found.T


def _levels(need: torch.Tensor) -> torch.Tensor:
    """The tokens' needs [n, heads] on a logarithmic scale, from 0 to 1 in each head: few take nearly all attention."""
    logs = need.clamp(min=_LEAST_NEED).log()
    low, high = logs.quantile(_OUTLIERS, dim=0), logs.quantile(1 - _OUTLIERS, dim=0)
    return ((logs - low) / (high - low).clamp(min=1e-6)).clamp(0, 1)


def _fit(
    loaded: LoadedModel, parts: list[Path], settings: GateSettings, told: Callable[[str, int, int], None]
) -> tuple[Trained, dict[int, Gate]]:
    """The gates of all layers, one after the other. Raises ConfigError where nothing was read."""
    found: dict[int, Gate] = {}
    overlap: dict[int, float] = {}
    layers = loaded.config.text.attention_layers
    for done, layer in enumerate(layers):
        told("training", done, len(layers))
        read = [_part(path, layer) for path in parts]
        read = [each for each in read if each is not None]
        if not read:
            raise ConfigError("Every conversation was too long for this model: give shorter media.")
        held_out, learned = read[::_HELD_OUT], [each for index, each in enumerate(read) if index % _HELD_OUT]
        gate = fit(gate_shapes(loaded.config.text, settings.rank), learned or held_out, settings)
        found[layer] = gate
        overlap[layer] = sum(_overlap(gate_scores(gate, x), need) for x, need in held_out) / len(held_out)
    told("training", len(layers), len(layers))
    num_parameters = sum(tensor.numel() for gate in found.values() for tensor in gate.values())
    return Trained(overlap, num_parameters, len(parts) - len(read)), found


def _part(path: Path, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One conversation's inputs and needs in a layer; None if it was too long."""
    with safetensors.safe_open(path, framework="pt") as file:
        if f"{layer}.x" not in file.keys():  # noqa: SIM118 - it is no dictionary
            return None
        return file.get_tensor(f"{layer}.x"), file.get_tensor(f"{layer}.need")


def fit(
    shapes: Mapping[str, tuple[int, ...]], parts: Sequence[tuple[torch.Tensor, torch.Tensor]], settings: GateSettings
) -> Gate:
    """A layer's gate, rounded as it will be stored.

    Args:
        shapes: see `gate_shapes`.
        parts: inputs [n, hidden] and needs [n, heads], from 0 to 1.
    """
    x, need = (torch.cat(each) for each in zip(*parts, strict=True))
    random = torch.Generator().manual_seed(settings.seed)
    gate = {name: _first(name, shape, random).requires_grad_() for name, shape in shapes.items()}
    optimiser = torch.optim.Adam(gate.values(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, settings.steps, pct_start=_WARM_UP)
    for _ in range(settings.steps):
        rows = torch.randint(len(x), (_BATCH,), generator=random)
        loss = F.binary_cross_entropy(gate_scores(gate, x[rows]).clamp(1e-6, 1 - 1e-6), need[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return {name: tensor.detach().to(torch.bfloat16).float() for name, tensor in gate.items()}


def _first(name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """A tensor before the first step."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name.endswith("norm"):
        return torch.ones(shape)
    scale = 1.0 if name == "sinks" else shape[-1] ** -0.5
    return torch.randn(shape, generator=random) * scale


def _overlap(found: torch.Tensor, need: torch.Tensor) -> float:
    """How many of the half that is needed most are in the half that scores highest."""
    half = len(need) // 2
    best, chosen = (each.argsort(0, descending=True)[:half] for each in (need, found))
    hits = [torch.isin(best[:, head], chosen[:, head]).float().mean() for head in range(need.shape[1])]
    return float(torch.stack(hits).mean())
