"""What evicted keys and values cost: recall of facts and of a picture far back, by kept share and by score.

    python -m benchmarks.kv_keep [--n 40] [--shares 0.7 0.5 0.3 text=1,media=0.5] [--scores gates keys KeyDiff]

The bundled model answers about facts told some 2,000 tokens ago, and about a picture 150, 450 and 2,000 tokens back
(that far back it hardly knows pictures, evicted or not). Teacher-forced: for each right answer, the mean loss of its
tokens, and whether all of them are the likeliest. `gates` adds the bundled ones to `keys`, which chooses without them.
The others are scores of kvpress 0.5.4 (github.com/NVIDIA/kvpress), written anew: it hooks `self_attn` of every layer,
which Qwen3.5's linear layers don't have. `window` keeps a segment's newest tokens. All of them choose from the same
segments and keep the same first tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import eviction
from qwen35mm.contract import Message, iter_media
from qwen35mm.evaluation import scenes
from qwen35mm.evaluation.cases import Case, sample_case
from qwen35mm.evaluation.passages import Passage, hidden_states
from qwen35mm.evaluation.scenes import Split
from qwen35mm.evaluation.skills import describing, recall
from qwen35mm.evaluation.skills.base import Sample, conversation, image
from qwen35mm.model import LoadedModel, load
from qwen35mm.model.attention import GatedAttention
from qwen35mm.prompt import PromptBuilder

_FAR = 2_000  # tokens between facts and question, with the facts
_BETWEEN = (150, 450, 2_000)  # tokens between a picture and its question
_MOST_CHUNKS = 12  # of one segment
_Score = Callable[[torch.Tensor], torch.Tensor]


def far_picture(rng: random.Random, split: Split, between: int) -> Sample:
    """A picture with a question, turns about other things, and another question about it."""
    asked = (describing.caption_turn, describing.place_turn, describing.color_turn)
    turns = [None, None]
    while None in turns:
        picture = scenes.random_picture(rng, scenes.random_size(rng, largest=320), rng.randint(1, 3), split)
        turns = [rng.choice(asked)(rng, picture) for _ in range(2)]
    first, last = (turn for turn in turns if turn is not None)
    parts = [
        conversation(rng, [first], [image(picture)]),
        *recall.other_turns(rng, split, between, pictures=False),
        conversation(rng, [last]),
    ]
    return Sample([message for part in parts for message in part.messages], grade=last.grade)


def cases(count: int) -> Iterator[Case]:
    """`count` of each kind, half of them from combinations that training never showed."""
    kinds: dict[str, Callable[[random.Random, Split], Sample]] = {}
    for num in (1, 10, 30):
        between = _FAR - 20 * num
        kinds[f"{num} facts"] = lambda rng, split, num=num, between=between: recall.sample_with(
            rng, split, num, told=True, between=between
        )
    for between in _BETWEEN:
        kinds[f"picture, {between}"] = lambda rng, split, between=between: far_picture(rng, split, between)
    splits: tuple[Split, ...] = ("seen", "combos")
    for kind, sample in kinds.items():
        for split in splits:
            rng = random.Random(f"kv-keep {kind} {split}")
            for _ in range(count // 2):
                yield sample_case(rng, kind, sample(rng, split))


def passages(loaded: LoadedModel, asked: Sequence[Case]) -> list[Passage]:
    """The cases with their right answers to predict."""
    builder, found = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config), []
    with closing(LocalBackend(loaded)) as backend:
        for case in asked:
            question = [Message.from_dict(message) for message in case.messages]
            media = tuple(backend.media_of(part) for part in iter_media(question))
            plans = [medium.plan for medium in media]
            prompt, start = builder.reply(question, plans, case.expected, enable_thinking=False)
            found.append(Passage(prompt, start, media))
    return found


@torch.inference_mode()
def measure(
    loaded: LoadedModel, asked: Sequence[Case], read: Sequence[Passage], kv_keep: str, kv_gates: str
) -> dict[str, Any]:
    """By kind: the mean loss, and how many answers in a hundred are all likeliest tokens."""
    found: dict[str, list[tuple[float, bool]]] = {}
    states = hidden_states(loaded, read, kv_keep=kv_keep, kv_gates=kv_gates)
    for case, passage, hidden in zip(asked, read, states, strict=True):
        logits, targets = loaded.model.logits(hidden).float(), passage.targets
        loss = float(torch.nn.functional.cross_entropy(logits, targets))
        found.setdefault(case.skill, []).append((loss, bool((logits.argmax(-1) == targets).all())))
    found["all"] = [each for values in found.values() for each in values]
    return {
        kind: (sum(loss for loss, _ in each) / len(each), 100 * sum(right for _, right in each) / len(each))
        for kind, each in found.items()
    }


@contextmanager
def queries() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Gives the last queries of the layer whose keys are scored: layers are scored in order."""
    seen: dict[int, list[torch.Tensor]] = {}
    write = GatedAttention.write

    def watched(self: GatedAttention, x: Any, rope: Any, batch: Any) -> Any:
        q, gate = write(self, x, rope, batch)
        seen[self.layer_idx] = [*seen.get(self.layer_idx, [])[-_MOST_CHUNKS:], q.float()]
        return q, gate

    def of(k: torch.Tensor) -> torch.Tensor:
        layer = min(seen)
        return torch.cat(seen.pop(layer))[-len(k) :].view(len(k), k.shape[1], -1, k.shape[2])

    with patch.object(GatedAttention, "write", watched):
        yield of


def expected_attention(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The attention of Gaussian queries with the segment's mean and covariance (arXiv:2510.00636), without values."""
    mean, scale = q.mean(0), k.shape[-1] ** -0.5
    covariance = torch.einsum("ahri,ahrj->hrij", q - mean, q - mean) / len(q)
    logits = torch.einsum("hrd,bhd->bhr", mean, k) * scale
    logits += torch.einsum("bhi,hrij,bhj->bhr", k, covariance, k) * scale**2 / 2
    return logits.softmax(0).mean(-1)


def keydiff(k: torch.Tensor) -> torch.Tensor:
    """arXiv:2504.15364, in one block."""
    unit = torch.nn.functional.normalize(k, dim=-1)
    return -torch.nn.functional.cosine_similarity(unit, unit.mean(0, keepdim=True), dim=-1)


def chance(k: torch.Tensor) -> torch.Tensor:
    """The same for every segment of a length."""
    return torch.rand(k.shape[:2], generator=torch.Generator().manual_seed(len(k)))


# Scores of keys [n, heads, D]: [n, heads]. Each is made with what gives the keys' queries.
OTHERS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], _Score]] = {
    "KeyDiff": lambda _: keydiff,
    "Expected-Attention": lambda queries_of: lambda k: expected_attention(k, queries_of(k)),
    "Knorm": lambda _: lambda k: -k.norm(dim=-1),
    # Beside them nothing counts.
    "gates alone": lambda _: lambda k: torch.zeros(k.shape[:2]),
    "window": lambda _: lambda k: torch.arange(float(len(k)))[:, None].repeat(1, k.shape[1]),
    "random": lambda _: chance,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=40, help="questions of each kind")
    parser.add_argument("--shares", nargs="*", default=["0.7", "0.5", "0.3", "text=1,media=0.5"])
    known = ["gates", "keys", *OTHERS]
    parser.add_argument("--scores", nargs="*", default=known, choices=known)
    args = parser.parse_args()
    loaded = load(demo_model_path(), dtype="bfloat16", device="cpu")
    asked = list(cases(args.n))
    read = passages(loaded, asked)
    table: dict[str, Any] = {}

    def add(name: str, share: str, gates: str) -> None:
        table[name] = found = measure(loaded, asked, read, share, gates)
        if len(table) == 1:
            print(f"| kept; loss, right in % | {' | '.join(found)} |\n|{'---|' * (len(found) + 1)}")
        print(f"| {name} |", *(f"{loss:.3f}, {right:.0f} |" for loss, right in found.values()), flush=True)

    add("1", "1", "none")
    with queries() as queries_of:
        for name, share in ((name, share) for name in args.scores for share in args.shares):
            score = OTHERS[name](queries_of) if name in OTHERS else eviction.key_scores
            with patch("qwen35mm.cache.kv_pool.key_scores", score):
                add(f"{share} {name}", share, "auto" if name.startswith("gates") else "none")
    tokens = sum(len(each.prompt.token_ids) for each in read) / len(read)
    print(json.dumps({"n": args.n, "mean_tokens": round(tokens), "table": table}))


if __name__ == "__main__":
    main()
