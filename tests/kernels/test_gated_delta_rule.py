"""The gated delta rule over a sequence, against the reference and transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from qwen35mm_kernels.reference.gated_delta_rule import gdn_gates
from tests.kernels.compare import DTYPES, LENGTHS_AND_DTYPES, Backend, assert_close, relative_error, sliced

FLOAT32, BFLOAT16 = DTYPES


class Inputs(NamedTuple):
    """The arguments of `gated_delta_prefill`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor

    @property
    def state(self) -> torch.Tensor:
        return self.states[self.slots[0]]

    def each_row(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """With what has a row for each token changed."""
        changed = {name: change(getattr(self, name)) for name in ("q", "k", "v", "a", "b")}
        return self._replace(**changed, counts=torch.tensor([len(changed["q"])]))

    def rows(self, start: int, stop: int | None) -> Inputs:
        """Some of the tokens, with the states that they share."""
        return self.each_row(lambda x: x[start:stop])


def make(
    num_tokens: int,
    heads: tuple[int, int] = (1, 2),
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int] = (64, 64),
    spread: float = 1.0,
) -> Inputs:
    """As the layer makes them, views of one q | k | v and one a | b row; decays mostly 0.9 to 0.999."""
    (num_k_heads, num_v_heads), (k_dim, v_dim) = heads, dims
    parts = [num_k_heads * k_dim, num_k_heads * k_dim, num_v_heads * v_dim]
    q, k, v = sliced(num_tokens, sum(parts), dtype=dtype).split(parts, dim=-1)
    a, b = (spread * sliced(num_tokens, 2 * num_v_heads)).to(dtype).split(num_v_heads, dim=-1)
    return Inputs(
        q.unflatten(-1, (num_k_heads, k_dim)),
        k.unflatten(-1, (num_k_heads, k_dim)),
        v.unflatten(-1, (num_v_heads, v_dim)),
        a,
        b,
        torch.empty(num_v_heads).uniform_(-5, -1).to(dtype),
        torch.randn(num_v_heads).to(dtype),
        torch.randn(3, num_v_heads, k_dim, v_dim),
        torch.tensor([1]),
        torch.tensor([num_tokens]),
    )


def check(backend: Backend, inputs: Inputs) -> None:
    """Outputs, and the state within the limit of the inputs' dtype; its neighbours in the pool stay."""
    limit = 1e-5 if inputs.q.dtype == torch.float32 else 5e-3
    backend.check("gated_delta_prefill", *inputs, limit=limit)


def run(backend: Backend, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the states afterwards; those of `inputs` stay."""
    inputs = inputs._replace(states=inputs.states.clone())
    return backend.run("gated_delta_prefill", *inputs), inputs.states


@pytest.mark.parametrize(("num_tokens", "dtype"), LENGTHS_AND_DTYPES)
def test_every_length(num_tokens: int, dtype: torch.dtype, backend: Backend) -> None:
    check(backend, make(num_tokens, dtype=dtype))


@pytest.mark.parametrize(
    ("heads", "dtype"), [((2, 4), BFLOAT16), ((2, 2), FLOAT32), ((1, 3), FLOAT32), ((1, 4), BFLOAT16)]
)
def test_key_heads_serve_their_value_heads(heads: tuple[int, int], dtype: torch.dtype, backend: Backend) -> None:
    check(backend, make(70, heads, dtype, dims=(32, 32)))


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        ((16, 64), FLOAT32),
        ((64, 16), BFLOAT16),
        ((128, 64), BFLOAT16),
        ((64, 128), FLOAT32),
        ((128, 128), FLOAT32),
        ((128, 128), BFLOAT16),
    ],
)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype, backend: Backend) -> None:
    check(backend, make(70, (1, 2), dtype, dims))


@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_equals_transformers_at_the_real_sizes(rule: str, backend: Backend) -> None:
    heads = (16, 32) if backend.name != "interpreted" else (1, 2)
    inputs = make(130, heads, dims=(128, 128))
    batched = [x[None] for x in (*inputs[:3], *gdn_gates(*inputs[3:7]))]
    theirs, their_state = getattr(modeling_qwen3_5, rule)(
        *batched, initial_state=inputs.state[None].clone(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    out, states = run(backend, inputs)
    assert_close(out, theirs[0])
    assert_close(states[1], their_state[0])


@pytest.mark.parametrize(
    ("num_tokens", "cut", "num_threads", "dtype"),
    [
        (130, 64, 1, FLOAT32),
        (130, 128, 1, BFLOAT16),
        (135, 64, 2, BFLOAT16),
        (647, 512, 1, FLOAT32),
        (647, 576, 1, BFLOAT16),
    ],
)
def test_pieces_cut_at_chunks_equal_one_shot_bit_for_bit(
    num_tokens: int,
    cut: int,
    num_threads: int,
    dtype: torch.dtype,
    backend: Backend,
    request: pytest.FixtureRequest,
) -> None:
    if backend.name == "interpreted" and num_tokens > 130:
        pytest.skip("the others show how torch takes several chunks at once")
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(num_threads)
    inputs = make(num_tokens, dtype=dtype, dims=(128, 128))
    whole, final_state = run(backend, inputs)
    first, between = run(backend, inputs.rows(0, cut))
    second, last = run(backend, inputs.rows(cut, None)._replace(states=between))
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(last, final_state)


def test_threads_change_no_bit(compiled_backend: Backend, request: pytest.FixtureRequest) -> None:
    """Also where several of them share a head's columns."""
    inputs = make(70, (1, 2), torch.bfloat16, dims=(64, 128))
    out, state = run(compiled_backend, inputs)
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    for num_threads in (1, 5):
        torch.set_num_threads(num_threads)
        again, final_state = run(compiled_backend, inputs)
        assert torch.equal(out, again)
        assert torch.equal(state, final_state)


@pytest.mark.parametrize("cut", [65, 1, 63, 130])
def test_pieces_cut_anywhere_agree(cut: int, backend: Backend) -> None:
    inputs = make(131)
    whole, final_state = run(backend, inputs)
    first, between = run(backend, inputs.rows(0, cut))
    second, last = run(backend, inputs.rows(cut, None)._replace(states=between))
    assert_close(torch.cat([first, second]), whole)
    assert_close(last, final_state)


@pytest.mark.parametrize(("noise", "dtype"), [(0.01, FLOAT32), (0.0, FLOAT32), (0.0, BFLOAT16), (0.1, BFLOAT16)])
def test_keys_that_resemble_each_other(noise: float, dtype: torch.dtype, backend: Backend) -> None:
    """A repeated token, a blank wall: an inverse made of matrix powers would lose every digit here."""
    inputs = make(200, dtype=dtype)
    keys = inputs.k[:1] + noise * inputs.k
    # Nothing decays, and all of a value is written.
    check(backend, inputs._replace(k=keys, a=torch.full_like(inputs.a, -20), b=torch.full_like(inputs.b, 20)))


@pytest.mark.parametrize("strength", [5.0, 100.0])
def test_strong_decays_do_not_overflow(strength: float, backend: Backend) -> None:
    """exp of a future token's decay difference would be infinite, and infinity times a masked zero NaN."""
    inputs = make(130)
    check(backend, inputs._replace(a=strength * torch.rand_like(inputs.a), A_log=torch.zeros(2)))


def test_gates_far_out(backend: Backend) -> None:
    check(backend, make(70, spread=20.0))


def test_slow_decays_keep_their_digits(backend: Backend) -> None:
    """softplus of -5 to -20: log(1 + exp(x)) as it stands loses there what thousands of tokens add up."""
    inputs = make(64, dims=(16, 16))._replace(A_log=torch.full((2,), 2.5), dt_bias=torch.zeros(2))
    inputs = inputs._replace(a=torch.empty(64, 2).uniform_(-20, -5), b=torch.zeros(64, 2), k=0 * inputs.k)
    g, _ = gdn_gates(*inputs[3:7])
    # Without keys the state only decays.
    _, states = run(backend, inputs)
    lost = 1 - states[1].double() / inputs.state.double()
    expected = -torch.expm1(g.double().sum(0))[:, None, None].expand_as(lost)
    assert relative_error(lost, expected) < 1e-3


def test_zero_keys_and_queries_give_zeros(backend: Backend) -> None:
    inputs = make(70)
    inputs = inputs._replace(q=0 * inputs.q, k=0 * inputs.k)
    out, states = run(backend, inputs)
    assert torch.equal(out, torch.zeros_like(out))
    assert_close(states[1], inputs.state * gdn_gates(*inputs[3:7])[0].sum(0).exp()[:, None, None])


def test_the_past_does_not_see_the_future(backend: Backend) -> None:
    # Dense, both times: torch's elementwise functions round a strided tensor otherwise.
    inputs = make(130).each_row(torch.Tensor.contiguous)
    before, _ = run(backend, inputs)
    after, _ = run(backend, inputs.each_row(lambda x: torch.cat([x[:100], 0.5 * x[100:]])))
    assert torch.equal(before[:100], after[:100])
    assert not torch.equal(before[100:], after[100:])


@pytest.mark.parametrize("count", [50, 1, 64, 65, 130])
def test_padding_reaches_nothing(count: int, backend: Backend) -> None:
    """It is NaN here, in the last token's chunk of 64 and in chunks of its own."""
    ends = make(200).each_row(lambda x: torch.cat([x[:count], torch.full_like(x[count:], float("nan"))]))
    ends = ends._replace(counts=torch.tensor([count]))
    plain, states = run(backend, ends.rows(0, count))
    out, padded_states = run(backend, ends)
    check(backend, ends)
    assert torch.equal(out[:count], plain)
    assert not out[count:].any()
    assert torch.equal(padded_states, states)


def test_a_piece_of_no_token_changes_nothing(triton_backend: Backend) -> None:
    """As a graph runs before it is captured."""
    inputs = make(70).each_row(lambda x: torch.full_like(x, float("nan")))._replace(counts=torch.tensor([0]))
    out, states = run(triton_backend, inputs)
    assert not out.any()
    assert torch.equal(states, inputs.states)
