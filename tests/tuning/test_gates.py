"""Gates: what they learn, from which attention, and that a killed training goes on to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qwen35mm.cache.gates import KVGates, gate_scores, gate_shapes
from qwen35mm.captioning.manifest.files import temporary_for
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.config import TextConfig
from qwen35mm.contract import iter_media
from qwen35mm.errors import ConfigError
from qwen35mm.model import LoadedModel
from qwen35mm.tuning.gate_texts import Conversations
from qwen35mm.tuning.gates import GateSettings, Trained, fit, needs, train
from tests.engine.exact import DENSE, chat_model, words
from tests.tuning.conftest import picture

SMALL = GateSettings(conversations=4, tokens=48, rank=3, steps=12)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return chat_model(DENSE)


@pytest.fixture(scope="module")
def config(loaded: LoadedModel) -> TextConfig:
    return loaded.config.text


@pytest.fixture
def conversations(tmp_path: Path) -> Conversations:
    folder = tmp_path / "media"
    folder.mkdir()
    for number in range(2):
        picture(number)[0].save(folder / f"{number}.png")
    return Conversations.of(words("text", count=60), folder, blind=False, seed=0)


class Killed(BaseException):
    """Ends a training where a kill would."""


def trained(loaded: LoadedModel, out: Path, conversations: Conversations, kill_at: int | None = None) -> Trained:
    def told(phase: str, done: int, total: int) -> None:
        if phase == "reading" and done == kill_at:
            raise Killed

    return train(loaded, out, conversations, SMALL, told=told)


def test_a_gate_finds_the_tokens_that_are_needed(config: TextConfig) -> None:
    """In each head another direction of the inputs says so; the gate knows neither beforehand."""
    random = torch.Generator().manual_seed(1)
    directions = torch.randn(config.hidden_size, config.num_key_value_heads, generator=random)
    x = torch.randn(1200, config.hidden_size, generator=random)
    need = torch.sigmoid(x @ directions * config.hidden_size**-0.5 * 3)
    gate = fit(gate_shapes(config, 4), [(x[:1000], need[:1000])], GateSettings(steps=80))
    chosen = gate_scores(gate, x[1000:]).argsort(0, descending=True)[:100]
    best = need[1000:].argsort(0, descending=True)[:100]
    for head in range(config.num_key_value_heads):
        assert torch.isin(best[:, head], chosen[:, head]).sum() > 75, "chance finds 50"


def test_a_need_is_the_most_attention_of_any_later_query_of_the_head() -> None:
    random = torch.Generator().manual_seed(2)
    num_tokens, heads, per_head, width = 5, 2, 3, 8
    k = torch.randn(num_tokens + 140, heads, width, generator=random)
    q = torch.randn(140, heads * per_head, width, generator=random)
    expected = torch.zeros(num_tokens, heads)
    for row in range(len(q)):
        for query in range(heads * per_head):
            head = query // per_head
            seen = k[: num_tokens + row + 1, head]
            attention = (seen @ q[row, query] / width**0.5).softmax(0)
            expected[:, head] = torch.maximum(expected[:, head], attention[:num_tokens])
    assert torch.allclose(needs(q, k, num_tokens), expected, atol=1e-6)


def test_a_killed_training_goes_on_to_the_same_bytes(
    loaded: LoadedModel, conversations: Conversations, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    found = trained(loaded, whole / "g.safetensors", conversations)
    with pytest.raises(Killed):
        trained(loaded, killed / "g.safetensors", conversations, kill_at=2)
    assert not (killed / "g.safetensors").exists()
    (parts,) = killed.glob(".g.safetensors.*")
    assert sorted(path.name for path in parts.iterdir()) == ["0000", "0001"]
    first = (parts / "0000").stat().st_mtime_ns
    temporary_for(parts / "0002").write_bytes(b"half of it")
    with pytest.raises(Killed):
        trained(loaded, killed / "g.safetensors", conversations, kill_at=3)
    assert (parts / "0000").stat().st_mtime_ns == first, "it is read once"
    trained(loaded, killed / "g.safetensors", conversations)
    assert (killed / "g.safetensors").read_bytes() == (whole / "g.safetensors").read_bytes()
    assert [path.name for path in killed.iterdir()] == ["g.safetensors"]

    config = loaded.config.text
    gates = KVGates.read(whole / "g.safetensors", config, weights_digest(loaded.path, None))
    assert tuple(gates.layers) == tuple(found.overlap) == config.attention_layers
    assert found.num_parameters == sum(tensor.numel() for gate in gates.layers.values() for tensor in gate.values())
    assert found.num_left_out == 0
    with pytest.raises(ConfigError, match=r"'g.safetensors' exists\. Name another .* --replace"):
        trained(loaded, whole / "g.safetensors", conversations)


def test_conversations_are_the_same_each_time_and_about_text_and_media(
    loaded: LoadedModel, conversations: Conversations
) -> None:
    made = [conversations.make(number, loaded) for number in range(4)]
    kinds = [[part.kind for part in iter_media(each)] for each in made]
    assert kinds == [["image"], [], ["image"], []]
    assert [[message.text for message in each] for each in made] == [
        [message.text for message in conversations.make(number, loaded)] for number in range(4)
    ]
    blind = Conversations.of(None, None, blind=True, seed=0)
    first, second = (blind.make(number, loaded)[0].text for number in range(2))
    assert first != second
    assert len(first) > 500


def test_media_that_can_not_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no pictures and no videos"):
        Conversations.of(None, tmp_path, blind=False, seed=0)
    picture(0)[0].save(tmp_path / "0.png")
    with pytest.raises(ConfigError, match="reads text alone"):
        Conversations.of(None, tmp_path, blind=True, seed=0)
    with pytest.raises(ConfigError, match="is empty"):
        Conversations.of(" \n", None, blind=True, seed=0)
