"""The fused decode step of a Gated DeltaNet layer against its twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwen35mm_kernels.gated_delta_rule import decode_step
from qwen35mm_kernels.gated_delta_rule.decode_step import naive_gdn_decode_step
from qwen35mm_kernels.gpu import gdn_step
from tests.kernels.compare import DTYPES, assert_close, moved, sliced

EPS = 1e-6
CPU = torch.device("cpu")


def make(
    slots: list[int],
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (32, 64),
    width: int = 4,
    num_slots: int = 5,
) -> dict[str, Any]:
    """The arguments of a step: rows of `mixed` and slots of the pools lie in wider tensors."""
    (num_k_heads, num_v_heads), (key_dim, value_dim) = heads, dims
    channels = 2 * num_k_heads * key_dim + num_v_heads * value_dim
    tensors = {
        "mixed": sliced(len(slots), channels + num_v_heads * (value_dim + 2), dtype=dtype),
        "conv_weight": (torch.rand(channels, width) - 0.5).to(dtype),
        "A_log": torch.rand(num_v_heads) * 2,
        "dt_bias": torch.randn(num_v_heads),
        "norm_weight": torch.randn(value_dim).to(dtype),
        "conv_states": torch.randn(2 * num_slots, channels, width - 1).to(dtype)[::2],
        "recurrent_states": torch.randn(num_slots, num_v_heads, key_dim, value_dim),
        "slots": torch.tensor(slots),
    }
    arguments: dict[str, Any] = {name: moved(tensor, device) for name, tensor in tensors.items()}
    return arguments | {"eps": EPS, "num_k_heads": num_k_heads}


def run(arguments: dict[str, Any]) -> torch.Tensor:
    """The Triton kernel; `naive_gdn_decode_step` takes the same arguments."""
    mixed, states = arguments["mixed"], arguments["recurrent_states"]
    out = torch.empty(mixed.shape[0], states.shape[1] * states.shape[3], dtype=mixed.dtype, device=mixed.device)
    gdn_step.gdn_decode_step(**arguments, out=out)
    return out


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def changed(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return arguments | changes


def limit(x: torch.Tensor) -> float | None:
    """The default one. But Triton's interpreter cuts bfloat16 off where a card rounds."""
    return 1e-2 if x.dtype == torch.bfloat16 and x.device.type == "cpu" else None


def assert_equals_the_twin(arguments: dict[str, Any]) -> None:
    """Output and states; slots that the step doesn't name, and those of padding rows, must keep every bit."""
    before, expected = copied(arguments), copied(arguments)
    out = run(arguments)
    assert_close(out, naive_gdn_decode_step(**expected), limit(out))
    assert torch.equal(arguments["conv_states"], expected["conv_states"])
    assert_close(arguments["recurrent_states"], expected["recurrent_states"])
    idle = [slot for slot in range(len(before["conv_states"])) if slot not in before["slots"].tolist()]
    assert torch.equal(arguments["recurrent_states"][idle], before["recurrent_states"][idle])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[2], [4, 0, 3]])
def test_equals_its_twin(slots: list[int], dtype: torch.dtype, device: torch.device) -> None:
    assert_equals_the_twin(make(slots, dtype, device))


@pytest.mark.parametrize("heads", [(2, 2), (1, 3), (1, 4)])
def test_any_number_of_value_heads_to_a_key_head(heads: tuple[int, int], device: torch.device) -> None:
    assert_equals_the_twin(make([1, 2], torch.float32, device, heads=heads))


@pytest.mark.parametrize("dims", [(16, 16), (64, 32), (16, 128)])
@pytest.mark.parametrize("width", [2, 3])
def test_other_dims_and_kernel_widths(dims: tuple[int, int], width: int, device: torch.device) -> None:
    assert_equals_the_twin(make([1, 3], torch.float32, device, dims=dims, width=width))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_dims(dtype: torch.dtype, device: torch.device) -> None:
    assert_equals_the_twin(make([1, 0], dtype, device, heads=(1, 2), dims=(128, 128), num_slots=3))


def test_from_a_zero_state_and_on(device: torch.device) -> None:
    arguments = make([1, 2], torch.float32, device)
    arguments["conv_states"].zero_()
    arguments["recurrent_states"].zero_()
    for _ in range(3):
        assert_equals_the_twin(arguments)
        arguments["mixed"] = torch.randn(arguments["mixed"].shape).to(device)


def test_padding_rows_touch_nothing_and_give_zeros(device: torch.device) -> None:
    arguments = make([-1, 3, -1, 0], torch.bfloat16, device)
    arguments["mixed"][[0, 2]] = float("nan")
    arguments["slots"] = arguments["slots"].int()
    before = copied(arguments)
    out = run(arguments)
    assert not out[[0, 2]].any()
    for name in ("conv_states", "recurrent_states"):
        changed = [not torch.equal(*states) for states in zip(arguments[name], before[name], strict=True)]
        assert changed == [True, False, False, True, False]
    assert_close(out, naive_gdn_decode_step(**before), limit(out))


def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: torch.device) -> None:
    arguments = make([4, 0, -1, 3], torch.bfloat16, device)
    together, alone = copied(arguments), copied(arguments)
    out = run(together)
    for row in range(4):
        one = alone | {"mixed": alone["mixed"][row : row + 1], "slots": alone["slots"][row : row + 1]}
        assert torch.equal(run(one)[0], out[row])
    assert torch.equal(alone["recurrent_states"], together["recurrent_states"])


def test_gates_of_any_size(device: torch.device) -> None:
    """A step that is nothing beside 1 still counts, and none overflows."""
    arguments = make([0, 1, 2, 3], torch.float32, device)
    arguments["mixed"][:, -4:] = torch.tensor([-30.0, -12.0, 30.0, 200.0], device=device)[:, None]
    arguments["mixed"][:, -8:-4] = torch.tensor([-200.0, 0.0, 30.0, 200.0], device=device)
    arguments["dt_bias"].zero_()
    assert_equals_the_twin(arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[4, -1, 0], [-1]])
def test_the_torch_version_equals_the_twin(slots: list[int], dtype: torch.dtype) -> None:
    arguments = make(slots, dtype)
    expected = copied(arguments)
    out = decode_step.gdn_decode_step(**arguments)
    if any(slot >= 0 for slot in slots):
        assert_close(out, naive_gdn_decode_step(**expected))
    assert not out[arguments["slots"] < 0].any()
    assert torch.equal(arguments["conv_states"], expected["conv_states"])
    assert_close(arguments["recurrent_states"], expected["recurrent_states"])
    given = torch.empty_like(out)
    assert decode_step.gdn_decode_step(**expected, out=given) is given


def test_what_does_not_fit_is_refused() -> None:
    arguments = make([0, 1], torch.float32)
    with pytest.raises(ValueError, match="num_k_heads must divide the value heads, got Hv = 4 and Hk = 3"):
        decode_step.gdn_decode_step(**changed(arguments, num_k_heads=3))
    with pytest.raises(ValueError, match=r"mixed must be .* = \[any, 648\], got \[2, 647\]"):
        decode_step.gdn_decode_step(**changed(arguments, mixed=arguments["mixed"][:, :-1]))
    with pytest.raises(ValueError, match=r"conv_states must be .* = \[5, 384, 3\], got \[4, 384, 3\]"):
        decode_step.gdn_decode_step(**changed(arguments, conv_states=arguments["conv_states"][:-1]))
    with pytest.raises(ValueError, match="at least 2 taps, got W = 1"):
        decode_step.gdn_decode_step(**changed(arguments, conv_weight=arguments["conv_weight"][:, :1]))
    with pytest.raises(ValueError, match=r"slots must be \[B\] = \[2\], got \[1\]"):
        decode_step.gdn_decode_step(**changed(arguments, slots=arguments["slots"][:1]))
    with pytest.raises(TypeError, match=r"slots must be torch.int64 or torch.int32, got torch.float32"):
        decode_step.gdn_decode_step(**changed(arguments, slots=arguments["slots"].float()))
    with pytest.raises(TypeError, match=r"recurrent_states must be torch.float32, got torch.bfloat16"):
        decode_step.gdn_decode_step(**changed(arguments, recurrent_states=arguments["recurrent_states"].bfloat16()))
    with pytest.raises(TypeError, match=r"out must be torch.float32, got torch.bfloat16"):
        decode_step.gdn_decode_step(**arguments, out=torch.empty(2, 256, dtype=torch.bfloat16))
