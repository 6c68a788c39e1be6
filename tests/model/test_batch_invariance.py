"""A sequence has the same bits alone and in any company, in any row and slot, where a number of rows is given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from qwen35mm.cache import CachePools, OutOfBlocksError, SequenceCache
from qwen35mm.model import dense
from qwen35mm.model.decoder import Qwen35Model
from tests.model.layouts import new_pools, relative_error
from tests.tiny import DENSE, MOE, MOE_TIED, NUM_TEXT_IDS, REAL_HEADS, SHALLOW, TinySpec

Loader = Callable[..., Any]

# As many value heads as the 0.8B has: one sequence's gates fill half of what a vectorised loop takes, two fill it.
HALF_FULL = TinySpec("half-full", key_heads=4, value_heads=16, seed=6)
# Tied and untied, dense and MoE.
SPECS = pytest.mark.parametrize("spec", [HALF_FULL, SHALLOW, MOE, MOE_TIED, REAL_HEADS], ids=lambda spec: spec.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])

# Prompt lengths of the sequences A, B, C and D; at 15 and 16 a block of 16 tokens is about to be full.
LENGTHS = (23, 1, 15, 64)
NUM_STEPS = 4


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def prompt_of(name: int) -> torch.Tensor:
    return torch.randint(0, NUM_TEXT_IDS, (LENGTHS[name],), generator=torch.Generator().manual_seed(name))


def start(model: Qwen35Model, pools: CachePools, name: int) -> SequenceCache:
    """A sequence behind its prompt, in the pool's lowest free slot; its positions are not its places."""
    cache, ids = pools.new_sequence(), prompt_of(name)
    cache.rope_delta = 3 * name
    model.prefill(model.embed_tokens(ids), torch.arange(len(ids)).expand(3, -1), cache)
    return cache


def step(
    model: Qwen35Model, batch: Sequence[tuple[int, SequenceCache]], number: int, num_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of one step; which token a sequence gets depends on its name and the step."""
    tokens = torch.tensor([(37 * name + 11 * number) % NUM_TEXT_IDS for name, _ in batch])
    positions = torch.tensor([cache.next_position for _, cache in batch]).expand(3, -1)
    hidden = model.decode(tokens, positions, [cache for _, cache in batch], num_rows=num_rows)
    return hidden, model.logits(hidden, num_rows=num_rows)


def everything(model: Qwen35Model, cache: SequenceCache) -> list[torch.Tensor]:
    """Copies of all that a sequence holds: states, keys and values."""
    text = model.config.text
    states = [state for i in text.linear_layers for state in (cache.conv_state(i), cache.recurrent_state(i))]
    return [x.clone() for x in itertools.chain(states, *(cache.kv(i) for i in text.attention_layers))]


Trace = list[tuple[torch.Tensor, torch.Tensor]]


def run_alone(model: Qwen35Model, name: int, num_rows: int) -> tuple[Trace, list[torch.Tensor]]:
    cache = start(model, new_pools(model, 1), name)
    rows = [step(model, [(name, cache)], number, num_rows) for number in range(NUM_STEPS)]
    return [(hidden[0], logits[0]) for hidden, logits in rows], everything(model, cache)


def assert_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: object) -> None:
    assert len(actual) == len(expected)
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), (what, number, relative_error(a, b))


# Rows in companies of one to four; with four, every sequence has stood in every row.
ORDERS = [(0,), (3, 0), (0, 1), (1, 2, 0), (0, 3, 2), (2, 0, 1), (0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)]


@SPECS
@DTYPES
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_every_company_row_and_slot(spec: TinySpec, dtype: torch.dtype, threads: int, ours: Loader) -> None:
    model: Qwen35Model = ours(spec, dtype)
    alone = {name: run_alone(model, name, 4) for name in range(4)}
    # The originals take slots 0 to 3, an idle one 4, and the copies that run the ones behind, in changing order.
    pools = new_pools(model, 9)
    originals = [start(model, pools, name) for name in range(4)]
    idle = pools.new_sequence()
    for turn, order in enumerate(ORDERS):
        slots = sorted(order, key=lambda name: (name * (1 + turn % 4) + turn) % 4)
        caches = {name: originals[name].clone() for name in slots}
        for number in range(NUM_STEPS):
            hidden, logits = step(model, [(name, caches[name]) for name in order], number, 4)
            assert hidden.shape[0] == logits.shape[0] == len(order)
            for row, name in enumerate(order):
                assert_same((hidden[row], logits[row]), alone[name][0][number], (order, name, number))
        for name, cache in caches.items():
            assert_same(everything(model, cache), alone[name][1], (order, name))
            cache.free()
    assert idle.length == 0
    assert all(int(state.count_nonzero()) == 0 for state in everything(model, idle))


@SPECS
@DTYPES
def test_company_that_comes_and_goes(spec: TinySpec, dtype: torch.dtype, ours: Loader) -> None:
    model: Qwen35Model = ours(spec, dtype)
    expected, final = run_alone(model, 0, 4)
    pools = new_pools(model, 4)
    others = {name: start(model, pools, name) for name in (1, 2, 3)}
    cache = start(model, pools, 0)
    for number, company in enumerate([(3,), (), (1, 2, 3), (2,)]):
        batch = [(name, others[name]) for name in company]
        batch.insert(number % (len(batch) + 1), (0, cache))
        row = batch.index((0, cache))
        hidden, logits = step(model, batch, number, 4)
        assert_same((hidden[row], logits[row]), expected[number], number)
    assert_same(everything(model, cache), final, "at the end")


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("spec", [SHALLOW, MOE_TIED], ids=lambda spec: spec.name)
@DTYPES
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_other_numbers_of_rows(num_rows: int, spec: TinySpec, dtype: torch.dtype, threads: int, ours: Loader) -> None:
    """5 to 7 are those where a row's place changes its bits in MKL's products with two threads."""
    model: Qwen35Model = ours(spec, dtype)
    expected, _ = run_alone(model, 0, num_rows)
    pools = new_pools(model, num_rows + 2)
    originals = [start(model, pools, name) for name in (0, 1)]
    for place in {0, num_rows // 2, num_rows - 1}:
        names = [0 if row == place else 1 for row in range(num_rows)]
        batch = [(name, originals[name].clone()) for name in names]
        for number in range(2):
            hidden, logits = step(model, batch, number, num_rows)
            assert_same((hidden[place], logits[place]), expected[number], (place, number))
        for _, cache in batch:
            cache.free()


@SPECS
def test_result_is_that_of_the_plain_batch_to_rounding(spec: TinySpec, ours: Loader) -> None:
    model: Qwen35Model = ours(spec)
    results = []
    for num_rows in (None, 4, 9):
        pools = new_pools(model, 4)
        batch = [(name, start(model, pools, name)) for name in (2, 0, 3)]
        results.append(torch.cat([step(model, batch, number, num_rows)[1] for number in range(NUM_STEPS)]))
    assert relative_error(results[1], results[0]) <= 1e-5
    assert relative_error(results[2], results[0]) <= 1e-5


def test_the_comparison_notices_a_product_that_depends_on_the_number_of_rows(
    ours: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above would notice a product that takes the number of its rows from the batch."""
    model: Qwen35Model = ours(DENSE)
    expected, _ = run_alone(model, 0, 4)

    def by_the_batch(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        # What a library does: another order of summation for another number of rows.
        return torch.nn.functional.linear(x, weight) if len(x) == 1 else (x.double() @ weight.double().T).to(x.dtype)

    monkeypatch.setattr(dense, "_free_of_company", by_the_batch)
    changed, _ = run_alone(model, 0, 4)
    pools = new_pools(model, 4)
    batch = [(name, start(model, pools, name)) for name in range(4)]
    together = [step(model, batch, number, 4)[1][0] for number in range(NUM_STEPS)]
    assert not all(torch.equal(a, b[1]) for a, b in zip(together, changed, strict=True))
    assert relative_error(torch.stack(together), torch.stack([b for _, b in expected])) <= 1e-4


def test_no_room_for_one_sequence_changes_none(ours: Loader) -> None:
    model: Qwen35Model = ours(DENSE)
    # Blocks of 16 tokens: A has 2, B 1 and C 1, none is left, and C's next but one token needs another.
    pools = CachePools(model.config, num_slots=3, num_tokens=64, dtype=model.dtype, block_size=16)
    batch = [(name, start(model, pools, name)) for name in (0, 1, 2)]
    step(model, batch, 0, 4)
    before = [everything(model, cache) for _, cache in batch]
    lengths = [cache.length for _, cache in batch]
    assert lengths == [24, 2, 16]
    for num_rows in (None, 4):
        with pytest.raises(OutOfBlocksError):
            step(model, batch, 1, num_rows)
        assert [cache.length for _, cache in batch] == lengths
        for (_, cache), kept in zip(batch, before, strict=True):
            assert_same(everything(model, cache), kept, num_rows)
    # An engine finds out by itself who has no room, and goes on with the others.
    with pytest.raises(OutOfBlocksError):
        batch[2][1].prepare(1)
    batch.pop()[1].free()
    rows = step(model, batch, 1, 4)
    for row, (name, _) in enumerate(batch):
        assert_same([x[row] for x in rows], run_alone(model, name, 4)[0][1], name)
    pools.check_integrity([cache for _, cache in batch])


def test_a_second_prepare_changes_nothing(ours: Loader) -> None:
    model: Qwen35Model = ours(DENSE)
    pools = new_pools(model, 2)
    cache = start(model, pools, 2)
    twin = cache.clone()
    for sequence in (cache, twin):
        sequence.prepare(1)
    tables = cache.block_table, twin.block_table
    assert tables[0] != tables[1]
    for sequence in (cache, twin):
        sequence.prepare(1)
    assert (cache.block_table, twin.block_table) == tables


def test_a_batch_that_does_not_fit_is_refused(ours: Loader) -> None:
    model: Qwen35Model = ours(DENSE)
    pools = new_pools(model, 3)
    batch = [(name, start(model, pools, name)) for name in (1, 2, 3)]
    lengths = [cache.length for _, cache in batch]
    with pytest.raises(ValueError, match="num_rows must be at least the number of sequences; got 2 for 3"):
        step(model, batch, 0, 2)
    with pytest.raises(ValueError, match="got the same cache twice"):
        step(model, [batch[0], batch[0]], 0, 4)
    with pytest.raises(ValueError, match="one token for each of one or more caches"):
        model.decode(torch.tensor([], dtype=torch.int64), torch.zeros((3, 0), dtype=torch.int64), [], num_rows=4)
    with pytest.raises(ValueError, match="one token for each"):
        model.decode(torch.tensor([1, 2]), torch.zeros((3, 1), dtype=torch.int64), [batch[0][1]])
    with pytest.raises(ValueError, match="3 rows don't fit into num_rows = 2"):
        model.logits(torch.zeros(3, model.config.text.hidden_size), num_rows=2)
    assert [cache.length for _, cache in batch] == lengths


def test_idle_rows_meet_no_expert(ours: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Qwen35Model = ours(MOE)
    pools = new_pools(model, 4)
    batch = [(0, start(model, pools, 0))]
    products: list[tuple[int, ...]] = []
    original = dense._free_of_company

    def counted(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        products.append((len(x), *weight.shape))
        return original(x, weight, *rest)

    monkeypatch.setattr(dense, "_free_of_company", counted)
    step(model, batch, 0, 4)
    text = model.config.text
    assert text.moe is not None
    experts = [shape for shape in products if shape[1:] == (text.hidden_size, text.moe.intermediate_size)]
    assert len(experts) == text.num_layers * text.moe.num_experts_per_tok
    assert {shape[0] for shape in products} == {1}
