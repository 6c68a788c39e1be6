"""The gated delta rule against its twin and transformers."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from qwen35mm_kernels import chunk_gated_delta_rule, gdn_gates, recurrent_gated_delta_step
from qwen35mm_kernels.gated_delta_rule.naive import naive_gated_delta_rule, naive_gated_delta_step, naive_gdn_gates
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, sliced
from tests.kernels.delta_rule import Inputs, make_inputs

K_DIM, V_DIM = 24, 16
HEADS = [(2, 2), (2, 4), (1, 4)]


make = functools.partial(make_inputs, dims=(K_DIM, V_DIM))


def theirs(name: str, inputs: Inputs, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' torch function `name` on one sequence."""
    out, final_state = getattr(modeling_qwen3_5, name)(
        *(x[None] for x in inputs),
        initial_state=None if state is None else state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], final_state[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("with_state", [False, True])
def test_chunked_equals_its_twin(num_tokens: int, heads: tuple[int, int], dtype: torch.dtype, with_state: bool) -> None:
    inputs, state = make(num_tokens, heads, dtype)
    given = state if with_state else None
    before = state.clone()
    out, final_state = chunk_gated_delta_rule(*inputs, given)
    expected, expected_state = naive_gated_delta_rule(*inputs, given)
    assert_close(out, expected)
    assert_close(final_state, expected_state)
    assert torch.equal(state, before)
    assert final_state.untyped_storage().data_ptr() != state.untyped_storage().data_ptr()


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_chunked_equals_transformers_at_the_real_sizes(name: str, with_state: bool) -> None:
    inputs, state = make(130, heads=(16, 32), dims=(128, 128))
    given = state if with_state else None
    for ours, expected in zip(chunk_gated_delta_rule(*inputs, given), theirs(name, inputs, given), strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize(
    ("num_tokens", "cut", "num_threads"), [(647, 64, 1), (647, 512, 1), (647, 576, 1), (647, 640, 1), (135, 64, 2)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_cut_at_chunks_equal_one_shot_bit_for_bit(
    num_tokens: int, cut: int, num_threads: int, dtype: torch.dtype
) -> None:
    torch.set_num_threads(num_threads)
    inputs, state = make(num_tokens, dtype=dtype, dims=(128, 128))
    whole, final_state = chunk_gated_delta_rule(*inputs, state)
    first, between = chunk_gated_delta_rule(*inputs.rows(0, cut), state)
    second, last = chunk_gated_delta_rule(*inputs.rows(cut, None), between)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(last, final_state)


@pytest.mark.parametrize("cut", [1, 63, 65, 130])
def test_pieces_cut_anywhere_agree(cut: int) -> None:
    inputs, state = make(131)
    whole, final_state = chunk_gated_delta_rule(*inputs, state)
    first, between = chunk_gated_delta_rule(*inputs.rows(0, cut), state)
    second, last = chunk_gated_delta_rule(*inputs.rows(cut, None), between)
    assert_close(torch.cat([first, second]), whole)
    assert_close(last, final_state)


@pytest.mark.parametrize("chunk_size", [1, 16, 50, 128])
def test_other_chunk_sizes_agree(chunk_size: int) -> None:
    inputs, state = make(131)
    expected, expected_state = naive_gated_delta_rule(*inputs, state)
    out, final_state = chunk_gated_delta_rule(*inputs, state, chunk_size=chunk_size)
    assert_close(out, expected)
    assert_close(final_state, expected_state)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_keys_that_resemble_each_other(noise: float) -> None:
    """A repeated token, a blank wall: an inverse made of matrix powers would lose every digit here."""
    inputs, state = make(200)
    keys = inputs.k[:1] + noise * inputs.k
    inputs = inputs._replace(k=keys, beta=torch.full_like(inputs.beta, 0.999), g=inputs.g / 100)
    out, final_state = chunk_gated_delta_rule(*inputs, state)
    expected, expected_state = naive_gated_delta_rule(*inputs, state)
    assert_close(out, expected)
    assert_close(final_state, expected_state)


@pytest.mark.parametrize("strength", [5.0, 100.0])
def test_strong_decays_do_not_overflow(strength: float) -> None:
    """exp of a future token's decay difference would be infinite, and infinity times a masked zero NaN."""
    inputs, state = make(130)
    inputs = inputs._replace(g=-strength * torch.rand_like(inputs.g))
    for actual, expected in zip(
        chunk_gated_delta_rule(*inputs, state), naive_gated_delta_rule(*inputs, state), strict=True
    ):
        assert_close(actual, expected)


def test_zero_keys_and_queries_give_zeros() -> None:
    inputs, state = make(70)
    inputs = inputs._replace(q=0 * inputs.q, k=0 * inputs.k)
    out, final_state = chunk_gated_delta_rule(*inputs, state)
    assert torch.equal(out, torch.zeros_like(out))
    assert_close(final_state, state * inputs.g.sum(0).exp()[:, None, None])


def test_the_past_does_not_see_the_future() -> None:
    inputs, state = make(130)
    before = chunk_gated_delta_rule(*inputs, state)[0]
    changed = Inputs(*(torch.cat([x[:100], 0.5 * x[100:]]) for x in inputs))
    after = chunk_gated_delta_rule(*changed, state)[0]
    assert torch.equal(before[:100], after[:100])
    assert not torch.equal(before[100:], after[100:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", HEADS)
def test_a_step_equals_its_twin_and_keeps_to_its_rows(batch: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, _ = make(batch, heads, dtype)
    pool = torch.randn(2 * batch + 1, heads[1], K_DIM, V_DIM)
    expected_pool = pool.clone()
    out = recurrent_gated_delta_step(*inputs, pool[1::2])
    expected = naive_gated_delta_step(*inputs, expected_pool[1::2])
    assert_close(out, expected)
    assert_close(pool[1::2], expected_pool[1::2])
    assert torch.equal(pool[::2], expected_pool[::2])


def test_a_step_equals_transformers() -> None:
    inputs, state = make(1, heads=(16, 32), dims=(128, 128))
    expected, expected_state = theirs("torch_recurrent_gated_delta_rule", inputs, state)
    stepped = state.clone()[None]
    assert_close(recurrent_gated_delta_step(*inputs, stepped), expected)
    assert_close(stepped[0], expected_state)


def test_steps_equal_a_prefill() -> None:
    inputs, state = make(100)
    expected, expected_state = chunk_gated_delta_rule(*inputs, state)
    stepped = state.clone()[None]
    out = [recurrent_gated_delta_step(*inputs.rows(t, t + 1), stepped) for t in range(100)]
    assert_close(torch.cat(out), expected)
    assert_close(stepped[0], expected_state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 65])
def test_gates_equal_their_twin(num_tokens: int, dtype: torch.dtype) -> None:
    a, b = 5 * sliced(num_tokens, 6, dtype=dtype), 5 * sliced(num_tokens, 6, dtype=dtype)
    A_log, dt_bias = torch.empty(6).uniform_(-4, 2.7).to(dtype), torch.randn(6).to(dtype)
    for actual, expected in zip(gdn_gates(a, b, A_log, dt_bias), naive_gdn_gates(a, b, A_log, dt_bias), strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual, expected)


def test_gates_stay_finite_far_out() -> None:
    a = torch.tensor([[-200.0, -30.0, 30.0, 200.0]])
    g, beta = gdn_gates(a, a, torch.zeros(4), torch.zeros(4))
    assert torch.allclose(g, torch.tensor([[0.0, -9.3576e-14, -30.0, -200.0]]), rtol=1e-4, atol=0)
    assert torch.allclose(beta, torch.tensor([[0.0, 9.3576e-14, 1.0, 1.0]]), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("field", "change", "error", "message"),
    [
        ("q", lambda x: x[None], ValueError, r"q must be \[T, Hk, K\] = \[any, any, any\], got \[1, 5, 2, 24\]"),
        ("k", lambda x: x[:, :1], ValueError, r"k must be the shape of q = \[5, 2, 24\], got \[5, 1, 24\]"),
        ("v", lambda x: x[:4], ValueError, r"v must be \[T, Hv, V\] = \[5, any, any\], got \[4, 4, 16\]"),
        ("g", lambda x: x[:, :1], ValueError, r"g must be \[T, Hv\] = \[5, 4\], got \[5, 1\]"),
        ("beta", lambda x: x[..., None], ValueError, r"beta must be \[T, Hv\] = \[5, 4\], got \[5, 4, 1\]"),
        ("g", torch.Tensor.bfloat16, TypeError, r"g must be torch.float32, got torch.bfloat16"),
        ("v", torch.Tensor.half, TypeError, r"v must be torch.float32 or torch.bfloat16, got torch.float16"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(field, change, error, message) -> None:
    inputs, state = make(5)
    inputs = inputs._replace(**{field: change(getattr(inputs, field))})
    with pytest.raises(error, match=message):
        chunk_gated_delta_rule(*inputs, state)
    with pytest.raises(error, match=message.replace("[T", "[B")):
        recurrent_gated_delta_step(*inputs, state.expand(5, *state.shape))


def test_states_and_lengths_that_do_not_fit_are_refused() -> None:
    inputs, state = make(5)
    with pytest.raises(ValueError, match="at least one token, got T = 0"):
        chunk_gated_delta_rule(*inputs.rows(0, 0), state)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        chunk_gated_delta_rule(*inputs, state, chunk_size=0)
    with pytest.raises(ValueError, match=r"initial_state must be \[Hv, K, V\] = \[4, 24, 16\], got \[4, 16, 24\]"):
        chunk_gated_delta_rule(*inputs, state.transpose(1, 2))
    with pytest.raises(TypeError, match=r"initial_state must be torch.float32, got torch.bfloat16"):
        chunk_gated_delta_rule(*inputs, state.bfloat16())
    with pytest.raises(ValueError, match=r"state must be \[B, Hv, K, V\] = \[5, 4, 24, 16\], got \[4, 24, 16\]"):
        recurrent_gated_delta_step(*inputs, state)
    with pytest.raises(ValueError, match="multiple of key heads, got Hv = 3 and Hk = 2"):
        chunk_gated_delta_rule(inputs.q, inputs.k, inputs.v[:, :3], inputs.g[:, :3], inputs.beta[:, :3])
    with pytest.raises(ValueError, match=r"A_log must be \[Hv\] = \[4\], got \[3\]"):
        gdn_gates(inputs.g, inputs.g, torch.zeros(3), torch.zeros(4))
