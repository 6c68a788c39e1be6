"""The prefill kernels of the gated delta rule against its twin."""

from __future__ import annotations

import itertools

import pytest
import torch

from qwen35mm_kernels.gated_delta_rule.naive import naive_gated_delta_rule, naive_gdn_gates
from qwen35mm_kernels.gpu import gdn_prefill
from qwen35mm_kernels.gpu.gdn_prefill import chunk_gated_delta_rule, gated_delta_prefill
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, moved, relative_error, sliced
from tests.kernels.delta_rule import Inputs, make_inputs

HEADS = [(2, 2), (1, 2), (1, 3), (1, 4)]


def make(
    num_tokens: int,
    heads: tuple[int, int] = (1, 2),
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int] = (64, 64),
) -> tuple[Inputs, torch.Tensor]:
    """As `make_inputs`, small."""
    return make_inputs(num_tokens, heads, dtype, dims=dims)


def check(inputs: Inputs, state: torch.Tensor | None, device: torch.device) -> None:
    """Outputs and final state against the twin's, the state within the limit of the inputs' dtype."""
    given = None if state is None else state.to(device)
    out, final_state = chunk_gated_delta_rule(*inputs.to(device), given)
    expected, expected_state = naive_gated_delta_rule(*inputs, state)
    assert_close(out.cpu(), expected)
    assert_close(final_state.cpu(), expected_state, 1e-5 if inputs.q.dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("with_state", [False, True])
def test_equals_its_twin(num_tokens: int, dtype: torch.dtype, with_state: bool, device: torch.device) -> None:
    inputs, state = make(num_tokens, dtype=dtype)
    check(inputs, state if with_state else None, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_key_heads_serve_their_value_heads(heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(*make(70, heads, dtype, dims=(32, 32)), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(16, 64), (64, 16), (128, 64), (64, 128), (128, 128)])
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(*make(70, (1, 2), dtype, dims), device)


def test_the_given_state_is_not_written_to(device: torch.device) -> None:
    inputs, state = make(70)
    given = state.to(device)
    _, final_state = chunk_gated_delta_rule(*inputs.to(device), given)
    assert torch.equal(given.cpu(), state)
    assert final_state.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_pieces_cut_at_chunks_equal_one_shot_bit_for_bit(
    dims: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    inputs, state = make(130, dtype=dtype, dims=dims)
    inputs, state = inputs.to(device), state.to(device)
    whole, final_state = chunk_gated_delta_rule(*inputs, state)
    first, between = chunk_gated_delta_rule(*inputs.rows(0, 64), state)
    second, last = chunk_gated_delta_rule(*inputs.rows(64, None), between)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(last, final_state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_equal_each_alone_bit_for_bit(
    dtype: torch.dtype, with_state: bool, device: torch.device
) -> None:
    inputs, _ = make(168, dtype=dtype, dims=(32, 64))
    inputs = inputs.to(device)
    states = torch.randn(4, 2, 32, 64).to(device)[::2] if with_state else None
    out, final_states = chunk_gated_delta_rule(*inputs, states, cu_seqlens=[0, 71, 168])
    for i, (start, stop) in enumerate([(0, 71), (71, 168)]):
        alone, final_state = chunk_gated_delta_rule(*inputs.rows(start, stop), None if states is None else states[i])
        assert torch.equal(out[start:stop], alone)
        assert torch.equal(final_states[i], final_state)


def test_many_short_sequences(device: torch.device) -> None:
    lengths = [1, 64, 2, 65, 1]
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    inputs, _ = make(bounds[-1], dims=(32, 32))
    states = torch.randn(len(lengths), 2, 32, 32)
    out, final_states = chunk_gated_delta_rule(*inputs.to(device), states.to(device), cu_seqlens=bounds)
    for i, length in enumerate(lengths):
        rows = inputs.rows(bounds[i], bounds[i] + length)
        expected, expected_state = naive_gated_delta_rule(*rows, states[i])
        assert_close(out[bounds[i] : bounds[i + 1]].cpu(), expected)
        assert_close(final_states[i].cpu(), expected_state)


@pytest.mark.parametrize("num_tokens", [65, 200])
def test_in_place_in_a_pool(num_tokens: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The final state overwrites the initial one, its neighbours stay; with segments as without."""
    inputs, _ = make(num_tokens, dims=(32, 32))
    pool = torch.randn(3, 2, 32, 32)
    gates = raw_gates(num_tokens)
    g, beta = naive_gdn_gates(*gates)
    expected, expected_state = naive_gated_delta_rule(*inputs[:3], g, beta, pool[1])
    for cut_from in (gdn_prefill._SEGMENTS_FROM_TOKENS, 1):
        monkeypatch.setattr(gdn_prefill, "_SEGMENTS_FROM_TOKENS", cut_from)
        monkeypatch.setattr(gdn_prefill, "_SEGMENT_TOKENS", 64)
        on_device = pool.to(device, copy=True)
        slot = on_device[1]
        out, final_state = prefill(inputs.to(device), gates, slot, slot)
        assert final_state is slot
        assert_close(out.cpu(), expected)
        assert_close(slot.cpu(), expected_state)
        assert torch.equal(on_device[::2].cpu(), pool[::2])


def raw_gates(
    num_tokens: int, num_heads: int = 2, dtype: torch.dtype = torch.float32, spread: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, A_log and dt_bias; a and b are views of one row."""
    a, b = (spread * sliced(num_tokens, 2 * num_heads)).to(dtype).split(num_heads, dim=-1)
    return a, b, torch.zeros(num_heads).uniform_(-4, 1).to(dtype), torch.randn(num_heads).to(dtype)


def prefill(
    inputs: Inputs, gates: tuple[torch.Tensor, ...], state: torch.Tensor, final_state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_delta_prefill` with raw gates in place of g and beta."""
    q, k, v, _, _ = inputs
    a, b, A_log, dt_bias = (moved(x, q.device) for x in gates)
    return gated_delta_prefill(q, k, v, a, b, A_log, dt_bias, state, final_state=final_state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [2.0, 20.0])
def test_raw_gates_equal_their_twin(spread: float, dtype: torch.dtype, device: torch.device) -> None:
    inputs, state = make(70, dtype=dtype)
    gates = raw_gates(70, dtype=dtype, spread=spread)
    g, beta = naive_gdn_gates(*gates)
    expected, expected_state = naive_gated_delta_rule(*inputs[:3], g, beta, state)
    out, final_state = prefill(inputs.to(device), gates, state.to(device))
    assert_close(out.cpu(), expected)
    assert_close(final_state.cpu(), expected_state, 1e-5 if dtype == torch.float32 else 5e-3)


def test_slow_decays_keep_their_digits(device: torch.device) -> None:
    """softplus of -5 to -20: log(1 + exp(x)) as it stands loses there what thousands of tokens add up."""
    num_tokens = 64
    inputs, state = make(num_tokens, dims=(16, 16))
    zero = torch.zeros(num_tokens, 2)
    a = torch.empty(num_tokens, 2).uniform_(-20, -5)
    gates = a, zero, torch.full((2,), 2.5), torch.zeros(2)
    g, _ = naive_gdn_gates(*gates)
    # Without keys the state only decays.
    _, final_state = prefill(inputs._replace(k=0 * inputs.k).to(device), gates, state.to(device))
    lost = 1 - final_state.cpu().double() / state.double()
    expected = -torch.expm1(g.double().sum(0))[:, None, None].expand_as(lost)
    assert relative_error(lost, expected) < 1e-3


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_resemble_each_other(noise: float, dtype: torch.dtype, device: torch.device) -> None:
    """A repeated token, a blank wall: an inverse made of matrix powers would lose every digit here."""
    inputs, state = make(130, dtype=dtype)
    keys = inputs.k[:1] + noise * inputs.k
    inputs = inputs._replace(k=keys, beta=torch.ones_like(inputs.beta), g=torch.zeros_like(inputs.g))
    check(inputs, state, device)


@pytest.mark.parametrize("strength", [5.0, 100.0])
def test_strong_decays_do_not_overflow(strength: float, device: torch.device) -> None:
    inputs, state = make(130)
    check(inputs._replace(g=-strength * torch.rand_like(inputs.g)), state, device)


def test_zero_keys_and_queries_give_zeros(device: torch.device) -> None:
    inputs, state = make(70)
    inputs = inputs._replace(q=0 * inputs.q, k=0 * inputs.k)
    out, final_state = chunk_gated_delta_rule(*inputs.to(device), state.to(device))
    assert torch.equal(out, torch.zeros_like(out))
    assert_close(final_state.cpu(), state * inputs.g.sum(0).exp()[:, None, None])


def test_what_lies_after_the_last_token_is_not_read(device: torch.device) -> None:
    """NaN in the rows after a sequence's end, which its last chunk reaches into, reach nothing."""
    inputs, state = make(64)
    ends = Inputs(*(torch.cat([x[:50], torch.full_like(x[50:], float("nan"))]) for x in inputs)).to(device)
    out, final_state = chunk_gated_delta_rule(*ends.rows(0, 50), state.to(device))
    expected, expected_state = naive_gated_delta_rule(*inputs.rows(0, 50), state)
    assert_close(out.cpu(), expected)
    assert_close(final_state.cpu(), expected_state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_tokens", [128, 129, 330])
def test_segments_side_by_side_agree(
    num_tokens: int, with_state: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(gdn_prefill, "_SEGMENTS_FROM_TOKENS", 128)
    monkeypatch.setattr(gdn_prefill, "_SEGMENT_TOKENS", 128)
    inputs, state = make(num_tokens, dtype=dtype)
    check(inputs, state if with_state else None, device)


@pytest.mark.parametrize("with_state", [False, True])
def test_segments_of_packed_sequences_equal_each_alone_bit_for_bit(
    with_state: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The middle one is long enough to be cut, the others are not."""
    monkeypatch.setattr(gdn_prefill, "_SEGMENTS_FROM_TOKENS", 100)
    monkeypatch.setattr(gdn_prefill, "_SEGMENT_TOKENS", 64)
    inputs, _ = make(240, dims=(32, 64))
    inputs = inputs.to(device)
    bounds = [0, 60, 210, 240]
    states = torch.randn(3, 2, 32, 64).to(device) if with_state else None
    out, final_states = chunk_gated_delta_rule(*inputs, states, cu_seqlens=bounds)
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        alone, final_state = chunk_gated_delta_rule(*inputs.rows(start, stop), None if states is None else states[i])
        assert torch.equal(out[start:stop], alone)
        assert torch.equal(final_states[i], final_state)


@pytest.mark.parametrize(
    ("field", "change", "error", "message"),
    [
        ("q", lambda x: x[None], ValueError, r"q must be \[T, Hk, K\] = \[any, any, any\], got \[1, 5, 1, 64\]"),
        ("k", lambda x: x[:4], ValueError, r"k must be the shape of q = \[5, 1, 64\], got \[4, 1, 64\]"),
        ("k", torch.Tensor.bfloat16, TypeError, r"k must be torch.float32, got torch.bfloat16"),
        ("v", lambda x: x[..., :48], ValueError, r"got K = 64 and V = 48"),
        ("v", lambda x: x[..., ::2], ValueError, r"v must be contiguous in its last dimension"),
        ("g", lambda x: x[:, :1], ValueError, r"g must be \[T, Hv\] = \[5, 2\], got \[5, 1\]"),
        ("g", torch.Tensor.bfloat16, TypeError, r"g must be torch.float32, got torch.bfloat16"),
        ("beta", torch.Tensor.half, TypeError, r"beta must be torch.float32 or torch.bfloat16"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(field, change, error, message) -> None:
    inputs, state = make(5)
    inputs = inputs._replace(**{field: change(getattr(inputs, field))})
    with pytest.raises(error, match=message):
        chunk_gated_delta_rule(*inputs, state)


def test_lengths_and_states_that_do_not_fit_are_refused() -> None:
    inputs, state = make(5)
    with pytest.raises(ValueError, match="at least one token, got T = 0"):
        chunk_gated_delta_rule(*inputs.rows(0, 0), state)
    for bounds in ([0], [0, 4], [1, 5], [0, 3, 3, 5], [0, 4, 2, 5]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 5"):
            chunk_gated_delta_rule(*inputs, cu_seqlens=bounds)
    with pytest.raises(
        ValueError, match=r"initial_state must be \[N, Hv, K, V\] = \[2, 2, 64, 64\], got \[2, 64, 64\]"
    ):
        chunk_gated_delta_rule(*inputs, state, cu_seqlens=[0, 2, 5])
    with pytest.raises(TypeError, match=r"initial_state must be torch.float32, got torch.bfloat16"):
        chunk_gated_delta_rule(*inputs, state.bfloat16())
    with pytest.raises(ValueError, match="initial_state must be contiguous in its last dimension"):
        chunk_gated_delta_rule(*inputs, state.transpose(1, 2))
    with pytest.raises(ValueError, match="multiple of key heads, got Hv = 3 and Hk = 2"):
        chunk_gated_delta_rule(*make(5, (2, 3))[0])
    gates = raw_gates(5)
    with pytest.raises(ValueError, match=r"A_log must be \[Hv\] = \[2\], got \[1\]"):
        gated_delta_prefill(*inputs[:3], gates[0], gates[1], gates[2][:1], gates[3])
    with pytest.raises(ValueError, match=r"final_state must be \[Hv, K, V\] = \[2, 64, 64\], got \[1, 64, 64\]"):
        gated_delta_prefill(*inputs[:3], *gates, final_state=state[:1])
