"""Keys and values that finished segments keep: against transformers with the evicted ones masked."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache.kv_keep import NUM_SINKS, WHOLE_ROWS, KVKeep
from qwen35mm.checkpoints import weights_digest
from qwen35mm.contract import Image, SamplingParams
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.errors import ConfigError
from qwen35mm.prompt import Prompt, cut_segments
from tests.engine.exact import (
    SETTINGS,
    Chat,
    cache_settings,
    chat_checkpoint,
    chat_model,
    dialog,
    gates_of,
    picture,
    serve,
    user,
    words,
)
from tests.tiny import TinySpec

TWO_LAYERS = TinySpec("chat-evicting", num_layers=4, interval=2, value_heads=4, seed=14)


# A segment's scores in one head, by its keys [n, D] and its inputs [n, hidden].
Scores = Callable[[np.ndarray, np.ndarray], np.ndarray]


def by_keys(keys: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    far, long = (np.linalg.norm(each, axis=1) for each in (keys - keys.mean(0), keys))
    return standard(far) + standard(long)


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / x.std()


def by_gate(gate: dict[str, np.ndarray], head: int) -> Scores:
    """Beside the keys, token by token: a key's share of its query's attention, with the sinks; the queries' mean."""
    dim = len(gate["key_norm"])
    per_head = gate["bias"].shape[1]

    def normed(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2) + 1e-6)

    def score(x: np.ndarray) -> float:
        low = gate["down"] @ x
        key = normed((gate["key"] @ low)[head * dim : (head + 1) * dim]) * gate["key_norm"]
        shares = []
        for index in range(per_head):
            at = (head * per_head + index) * dim
            query = normed((gate["query"] @ low + gate["query_bias"])[at : at + dim])
            own = math.exp(query @ key / math.sqrt(dim) + gate["bias"][head, index])
            shares.append(own / (own + sum(math.exp(query @ sink / math.sqrt(dim)) for sink in gate["sinks"][head])))
        return sum(shares) / per_head

    return lambda keys, inputs: by_keys(keys, inputs) + standard(np.array([score(x) for x in inputs]))


def evicted(
    prompt: Prompt, keys: np.ndarray, inputs: np.ndarray, score: Scores, text: float, media: float
) -> set[tuple[int, int]]:
    """(segment's end, place) of each token that a head evicts; keys: [T, D]."""
    is_media = [any(span.start <= place < span.stop for span in prompt.spans) for place in range(len(keys))]
    found = set()
    for segment in prompt.segments:
        here = slice(segment.start, segment.stop)
        scores = score(keys[here], inputs[here])
        scores[: max(NUM_SINKS - segment.start, 0)] = math.inf
        for kind, share in ((False, text), (True, media)):
            places = [place for place in range(segment.start, segment.stop) if is_media[place] is kind]
            best_first = sorted(places, key=lambda place: -scores[place - segment.start])
            found |= {(segment.stop, place) for place in best_first[math.ceil(round(share * len(places), 6)) :]}
    return found


def masked_attention(
    prompt: Prompt, score_of: Callable[[int, int], Scores], inputs: dict[int, np.ndarray], text: float, media: float
) -> Callable[..., Any]:
    """transformers' attention, in which tokens behind a segment don't see what that has evicted.

    Args:
        score_of: by layer and head.
        inputs: by layer.
    """
    plain = theirs.eager_attention_forward

    def attention(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **options: Any) -> Any:
        if not isinstance(module, theirs.Qwen3_5Attention):
            return plain(module, q, k, v, attention_mask, **options)
        (heads, num_tokens), per_head = k.shape[1:3], q.shape[1] // k.shape[1]
        hidden = torch.ones(num_tokens, num_tokens).triu(1).bool().repeat(heads, 1, 1)
        for head in range(heads):
            layer = module.layer_idx
            keys, score = k[0, head].double().numpy(), score_of(layer, head)
            for stop, place in evicted(prompt, keys, inputs[layer], score, text, media):
                hidden[head, stop:, place] = True
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf).repeat_interleave(per_head, 0)[None]
        return plain(module, q, k, v, mask, **options)

    return attention


@torch.no_grad()
@pytest.mark.parametrize("gated", [False, True], ids=["by keys", "by gates"])
def test_logits_are_those_of_attention_that_masks_what_is_evicted(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = chat_model(TWO_LAYERS)
    chat = Chat(loaded)
    questions = [user(words("first", count=40)), user(Image(picture(0)), words("second", count=30)), user("third")]
    request = chat.request(
        dialog(questions, system=words("system", count=40)), params=SamplingParams(temperature=0.0, max_tokens=3)
    )
    prompt = request.prompt
    assert len(prompt.segments) >= 3
    gates = str(gates_of(loaded)) if gated else "none"
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, kv_keep="text=0.6,media=0.4", kv_gates=gates))
    (answer,) = serve(engine, request)
    num_rows = KVKeep(0.6, 0.4).all_rows(prompt)
    assert answer.result.cache.num_evicted_tokens == len(prompt.token_ids) - num_rows > 0

    oracle: Any = Qwen3_5ForConditionalGeneration.from_pretrained(
        chat_checkpoint(TWO_LAYERS), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    inputs: dict[int, np.ndarray] = {}

    def keep_inputs(module: Any, _: Any, given: Any) -> None:
        inputs[module.layer_idx] = given["hidden_states"][0].double().numpy()

    for module in oracle.modules():
        if isinstance(module, theirs.Qwen3_5Attention):
            module.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    found = {} if engine.runtime.gates is None else engine.runtime.gates.layers
    in_numpy = {layer: {name: x.double().numpy() for name, x in gate.items()} for layer, gate in found.items()}

    def score_of(layer: int, head: int) -> Scores:
        return by_gate(in_numpy[layer], head) if gated else by_keys

    monkeypatch.setattr(theirs, "eager_attention_forward", masked_attention(prompt, score_of, inputs, 0.6, 0.4))
    ids = torch.tensor([*prompt.token_ids, *answer.result.token_ids[:-1]])[None]
    (medium,) = request.media
    pixels = torch.from_numpy(medium.pixel_values)  # pyright: ignore[reportAttributeAccessIssue] - it was prepared
    expected = oracle(
        input_ids=ids,
        pixel_values=pixels,
        image_grid_thw=torch.tensor([tuple(medium.plan.grid_thw)]),
        mm_token_type_ids=(ids == oracle.config.image_token_id).int(),
    ).logits[0, len(prompt.token_ids) - 1 :]
    assert torch.allclose(answer.logits, expected, atol=1e-4)


def test_shares_are_read_and_told() -> None:
    assert KVKeep.of("0.5") == KVKeep(0.5, 0.5)
    assert KVKeep.of(" text=1, media=0.25 ") == KVKeep(1.0, 0.25)
    assert [str(KVKeep.of(text)) for text in ("1", "1.0", "media=0.3,text=0.7")] == ["1", "1", "text=0.7,media=0.3"]
    assert KVKeep(0.1, 0.7).kept(30, 10) == (3, 7)
    assert KVKeep(0.5, 1.0).kept(3, 0) == (2, 0)
    for wrong in ("0", "1.5", "nan", "-0.5", "half", "", "text=0.5", "text=1,media=0", "0.5,0.5", "text=1,media=1,x=1"):
        with pytest.raises(ConfigError, match=r"above 0 and up to 1 .* text=1,media=0.5; got"):
            KVKeep.of(wrong)


def test_a_context_has_rows_for_every_prompt() -> None:
    half = KVKeep(0.5, 0.25)
    assert KVKeep(1.0, 0.1).most_rows(100_000) == 100_000
    assert half.most_rows(WHOLE_ROWS) == WHOLE_ROWS
    assert half.most_rows(WHOLE_ROWS + 128_000) == WHOLE_ROWS + 64_000 + 2 * 1_000


@pytest.mark.parametrize("min_segment", [1, 5, 32, 128])
def test_a_context_of_short_segments_has_rows_for_every_prompt(min_segment: int) -> None:
    """Each of them rounds up: planned for longer ones, the rows would be too few."""
    num_tokens = 32_768
    segments, tail_start = cut_segments(num_tokens, range(0, num_tokens, min_segment), (), min_segment=min_segment)
    prompt: Any = SimpleNamespace(segments=segments, spans=(), token_ids=range(num_tokens), tail_start=tail_start)
    for keep in (KVKeep(0.5, 0.5), KVKeep(0.1, 0.1), KVKeep(0.99, 0.3)):
        assert keep.all_rows(prompt) <= keep.most_rows(num_tokens, min_segment)
    assert (KVKeep(0.5, 0.5).all_rows(prompt) > KVKeep(0.5, 0.5).most_rows(num_tokens)) == (min_segment == 1)


def test_a_backend_plans_for_its_own_segments() -> None:
    loaded = chat_model(TWO_LAYERS)
    cache, settings = cache_settings(loaded, num_tokens=16_384, kv_keep="0.5"), EngineSettings(context_length=16_384)
    with closing(LocalBackend(loaded, settings=replace(settings, slots=1), cache=cache, min_segment=16)) as backend:
        assert backend.engine.plan.context_rows == KVKeep(0.5, 0.5).most_rows(16_384, 16)


def test_the_weights_that_gates_belong_to_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a disk cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights_digest, "_SETTLED_S", 0.0)
    hashed: list[str] = []
    hash_file = weights_digest.hash_file
    monkeypatch.setattr(weights_digest, "hash_file", lambda path: hashed.append(path.name) or hash_file(path))
    loaded = chat_model(TWO_LAYERS)
    settings = cache_settings(loaded, kv_keep="0.5", kv_gates=gates_of(loaded))
    for changed, count in (({"keep_weights": False}, 2), ({}, 2), ({}, 0), ({"directory": tmp_path / "other"}, 2)):
        hashed.clear()
        Engine(loaded, SETTINGS, replace(settings, **changed))
        assert len(hashed) == count, changed
