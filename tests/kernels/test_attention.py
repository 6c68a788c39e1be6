"""Attention against its twins and transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import eager_attention_forward

from qwen35mm_kernels import attention_decode, attention_prefill, vision_attention
from qwen35mm_kernels.attention import naive_attention_decode, naive_attention_prefill, naive_vision_attention
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, sliced

HEAD_DIM = 32
SCALE = 0.3  # not the default of torch's function
HEADS = [(4, 4), (4, 2), (8, 2), (6, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("cached", [0, 1, 70])
def test_prefill_equals_its_twin(num_tokens: int, cached: int, dtype: torch.dtype) -> None:
    q = sliced(num_tokens, 4, HEAD_DIM, dtype=dtype)
    k, v = (sliced(num_tokens + cached, 2, HEAD_DIM, dtype=dtype) for _ in range(2))
    actual = attention_prefill(q, k, v, scale=SCALE)
    assert_close(actual, naive_attention_prefill(q, k, v, SCALE))


@pytest.mark.parametrize("heads", HEADS)
def test_prefill_with_grouped_heads_equals_transformers(heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    q, k, v = sliced(50, num_heads, 256), sliced(80, num_kv_heads, 256), sliced(80, num_kv_heads, 256)
    future = torch.ones(50, 80, dtype=torch.bool).triu(31)
    theirs, _ = eager_attention_forward(
        SimpleNamespace(num_key_value_groups=num_heads // num_kv_heads, training=False),  # type: ignore[arg-type]
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        attention_mask=torch.zeros(50, 80).masked_fill_(future, float("-inf")),
        scaling=0.0625,
    )
    assert_close(attention_prefill(q, k, v, scale=0.0625), theirs[0])


def test_prefill_sees_nothing_of_the_future() -> None:
    q, k, v = (torch.randn(300, 2, HEAD_DIM) for _ in range(3))
    before = attention_prefill(q, k, v, scale=SCALE)
    k[200:], v[200:] = 50.0, -1e4
    after = attention_prefill(q, k, v, scale=SCALE)
    assert torch.equal(before[:200], after[:200])
    assert not torch.equal(before[200:], after[200:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_keys", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
def test_decode_equals_its_twin(heads: tuple[int, int], num_keys: int, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads = heads
    q = sliced(num_heads, HEAD_DIM, dtype=dtype)
    k, v = (sliced(num_keys, num_kv_heads, HEAD_DIM, dtype=dtype) for _ in range(2))
    actual = attention_decode(q, k, v, scale=SCALE)
    assert actual.shape == q.shape
    assert_close(actual, naive_attention_decode(q, k, v, SCALE))


def test_decode_equals_the_last_row_of_prefill() -> None:
    q, k, v = torch.randn(40, 4, HEAD_DIM), torch.randn(40, 2, HEAD_DIM), torch.randn(40, 2, HEAD_DIM)
    assert_close(attention_decode(q[-1], k, v, scale=SCALE), attention_prefill(q, k, v, scale=SCALE)[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [[0, 1], [0, 64], [0, 16, 32, 48], [0, 4, 12, 20, 65]])
def test_vision_attention_equals_its_twin(bounds: list[int], dtype: torch.dtype) -> None:
    q, k, v = (sliced(bounds[-1], 3, HEAD_DIM, dtype=dtype) for _ in range(3))
    expected = naive_vision_attention(q, k, v, bounds)
    for cu_seqlens in (bounds, torch.tensor(bounds, dtype=torch.int32)):
        assert_close(vision_attention(q, k, v, cu_seqlens), expected)


def test_a_frame_is_the_same_alone_and_beside_others() -> None:
    q, k, v = (torch.randn(48, 3, HEAD_DIM) for _ in range(3))
    frames = [vision_attention(q[i : i + 16], k[i : i + 16], v[i : i + 16], [0, 16]) for i in (0, 16, 32)]
    assert torch.equal(vision_attention(q, k, v, [0, 16, 32, 48]), torch.cat(frames))


def test_what_does_not_fit_is_refused() -> None:
    q, k = torch.randn(5, 4, HEAD_DIM), torch.randn(5, 2, HEAD_DIM)
    with pytest.raises(ValueError, match="1 <= T <= L, got T = 5 queries and L = 4 keys"):
        attention_prefill(q, k[:4], k[:4], scale=SCALE)
    with pytest.raises(ValueError, match="1 <= T <= L, got T = 0"):
        attention_prefill(q[:0], k, k, scale=SCALE)
    with pytest.raises(ValueError, match="multiple of key heads, got Hq = 4 and Hkv = 3"):
        attention_prefill(q, torch.randn(5, 3, HEAD_DIM), torch.randn(5, 3, HEAD_DIM), scale=SCALE)
    with pytest.raises(TypeError, match=r"k must be torch.float32, got torch.bfloat16"):
        attention_prefill(q, k.bfloat16(), k, scale=SCALE)
    with pytest.raises(ValueError, match=r"v must be the shape of k = \[5, 2, 32\], got \[4, 2, 32\]"):
        attention_decode(q[0], k, k[:4], scale=SCALE)
    with pytest.raises(ValueError, match=r"q must be \[Hq, D\] = \[any, any\], got \[5, 4, 32\]"):
        attention_decode(q, k, k, scale=SCALE)
    with pytest.raises(ValueError, match="at least one token, got L = 0"):
        attention_decode(q[0], k[:0], k[:0], scale=SCALE)


@pytest.mark.parametrize("bounds", [[], [0], [0, 4], [1, 5], [0, 3, 3, 5], [0, 5, 3, 5], [0, 6]])
def test_frames_that_do_not_cover_the_patches_are_refused(bounds: list[int]) -> None:
    q = torch.randn(5, 4, HEAD_DIM)
    with pytest.raises(ValueError, match="rise from 0 to P = 5"):
        vision_attention(q, q, q, bounds)


def test_no_plan_is_built_for_each_shape_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's attention is left out there, and nothing but there."""
    allowed: list[bool] = []
    attend = F.scaled_dot_product_attention

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for device in ("meta", "cpu"):  # meta tensors take a card's way
        q, k = torch.empty(8, 2, HEAD_DIM, device=device), torch.empty(3, 2, HEAD_DIM, device=device)
        vision_attention(q, q, q, [0, 8])
        attention_decode(q[0], k, k, scale=SCALE)
    assert allowed == [False, False, True, True]
    assert torch.backends.cuda.cudnn_sdp_enabled()
