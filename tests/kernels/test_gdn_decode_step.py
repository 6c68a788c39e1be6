"""A Gated DeltaNet layer's decode step against the reference and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from qwen35mm_kernels.reference.gated_delta_rule import gated_delta_step
from tests.kernels.compare import DTYPES, Backend, assert_close, sliced

EPS = 1e-6
MIXED, DT_BIAS, CONV_STATES, RECURRENT_STATES, SLOTS = 0, 3, 6, 7, 8


def make(
    slots: list[int],
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (32, 64),
    width: int = 4,
    num_slots: int = 5,
) -> list[Any]:
    """The positional arguments of a step: rows of `mixed` and slots of the pools lie in wider tensors."""
    (num_k_heads, num_v_heads), (key_dim, value_dim) = heads, dims
    channels = 2 * num_k_heads * key_dim + num_v_heads * value_dim
    return [
        sliced(len(slots), channels + num_v_heads * (value_dim + 2), dtype=dtype),
        (torch.rand(channels, width) - 0.5).to(dtype),
        torch.rand(num_v_heads) * 2,
        torch.randn(num_v_heads),
        torch.randn(value_dim).to(dtype),
        EPS,
        torch.randn(2 * num_slots, channels, width - 1).to(dtype)[::2],
        torch.randn(num_slots, num_v_heads, key_dim, value_dim),
        torch.tensor(slots),
    ]


def check(backend: Backend, arguments: list[Any], num_k_heads: int = 2) -> torch.Tensor:
    """Output and states; slots that the step doesn't name, and those of padding rows, must keep every bit."""
    states = arguments[RECURRENT_STATES]
    before = states.clone()
    out = backend.check("gdn_decode_step", *arguments, num_k_heads=num_k_heads)
    idle = [slot for slot in range(len(states)) if slot not in arguments[SLOTS].tolist()]
    assert torch.equal(states[idle], before[idle])
    assert not out[arguments[SLOTS] < 0].any()
    return out


@pytest.mark.parametrize(
    ("slots", "dtype"),
    [
        ([4, 0, 3], torch.float32),
        ([2], torch.bfloat16),
        ([1, 2, 3], torch.bfloat16),
        ([-1], torch.bfloat16),
        ([2], torch.float32),
        ([3, -1, 0, 1], torch.bfloat16),
    ],
)
def test_slots_in_any_order(slots: list[int], dtype: torch.dtype, backend: Backend) -> None:
    check(backend, make(slots, dtype))


@pytest.mark.parametrize("heads", [(2, 2), (1, 3), (1, 4)])
def test_any_number_of_value_heads_to_a_key_head(heads: tuple[int, int], backend: Backend) -> None:
    check(backend, make([1, 2], torch.float32, heads=heads), heads[0])


@pytest.mark.parametrize(("dims", "width"), [((64, 32), 3), ((16, 16), 2), ((16, 128), 3)])
def test_other_dims_and_kernel_widths(dims: tuple[int, int], width: int, backend: Backend) -> None:
    check(backend, make([1, 3], torch.float32, dims=dims, width=width))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_dims(dtype: torch.dtype, backend: Backend) -> None:
    check(backend, make([1, 0], dtype, heads=(1, 2), dims=(128, 128), num_slots=3), 1)


def test_from_a_zero_state_and_on(backend: Backend) -> None:
    arguments = make([1, 2], torch.float32)
    arguments[CONV_STATES].zero_()
    arguments[RECURRENT_STATES].zero_()
    for _ in range(3):
        check(backend, arguments)
        arguments[MIXED] = torch.randn(arguments[MIXED].shape)


def test_padding_rows_are_not_read(backend: Backend) -> None:
    arguments = make([-1, 3, -1, 0], torch.bfloat16)
    arguments[MIXED][[0, 2]] = float("nan")
    arguments[SLOTS] = arguments[SLOTS].int()
    check(backend, arguments)


def test_a_row_has_the_same_bits_alone_and_in_a_batch(kernel_backend: Backend) -> None:
    arguments = make([4, 0, -1, 3], torch.bfloat16)
    alone = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
    out = kernel_backend.run("gdn_decode_step", *arguments, num_k_heads=2)
    mixed, slots = alone[MIXED], alone[SLOTS]
    for row in range(4):
        alone[MIXED], alone[SLOTS] = mixed[row : row + 1], slots[row : row + 1]
        assert torch.equal(kernel_backend.run("gdn_decode_step", *alone, num_k_heads=2)[0], out[row])
    assert torch.equal(alone[RECURRENT_STATES], arguments[RECURRENT_STATES])


@pytest.mark.parametrize(
    ("slots", "sources"),
    [
        ([2, 4, 0], [2, 2, 4]),
        ([1, 3, 2, 4, -1], [1, 1, 2, 2, -1]),
        ([4, -1, 0, 3], [4, -1, 0, 0]),
        ([3, 1, 0, 2], [3, 1, 0, 2]),
    ],
    ids=["one sequence", "two sequences", "beside padding", "rows of their own"],
)
def test_several_tokens_of_a_sequence_leave_the_state_after_each(
    slots: list[int], sources: list[int], kernel_backend: Backend
) -> None:
    """The same bits as one step a token."""
    arguments = make(slots, torch.bfloat16, heads=(2, 4))
    check(kernel_backend, [*(_copied(arguments)), torch.tensor(sources)])
    together, by_token = _copied(arguments), _copied(arguments)
    out = kernel_backend.run("gdn_decode_step", *together, torch.tensor(sources), num_k_heads=2)
    for row, (slot, source) in enumerate(zip(slots, sources, strict=True)):
        if slot >= 0:
            for states in by_token[CONV_STATES], by_token[RECURRENT_STATES]:
                states[slot] = states[source]
            alone = [*by_token]
            alone[MIXED], alone[SLOTS] = arguments[MIXED][row : row + 1], torch.tensor([slot])
            assert torch.equal(kernel_backend.run("gdn_decode_step", *alone, num_k_heads=2)[0], out[row])
    for states in CONV_STATES, RECURRENT_STATES:
        assert torch.equal(together[states], by_token[states])


def _copied(arguments: list[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]


def test_gates_of_any_size(backend: Backend) -> None:
    """A step that is nothing beside 1 still counts, and none overflows."""
    arguments = make([0, 1, 2, 3], torch.float32)
    arguments[MIXED][:, -4:] = torch.tensor([-30.0, -12.0, 30.0, 200.0])[:, None]
    arguments[MIXED][:, -8:-4] = torch.tensor([-200.0, 0.0, 30.0, 200.0])
    arguments[DT_BIAS].zero_()
    check(backend, arguments)


def test_the_references_rule_equals_that_of_transformers() -> None:
    q, k, v = torch.randn(3, 1, 4, 128)
    g, beta, state = -torch.rand(1, 4), torch.rand(1, 4), torch.randn(1, 4, 128, 128)
    expected, expected_state = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
        *(x[None] for x in (q, k, v, g, beta)),
        initial_state=state.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert_close(gated_delta_step(q, k, v, g, beta, state), expected[0])
    assert_close(state, expected_state)
