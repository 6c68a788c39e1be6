"""The poison itself: without it the other tests could pass on lucky zeros."""

import torch


def test_uninitialised_buffers_are_nan() -> None:
    like = torch.zeros(3)
    for buffer in (torch.empty(3), torch.empty_like(like), like.new_empty(3), torch.empty_strided((3,), (1,))):
        assert buffer.isnan().all()
    assert torch.empty(3, dtype=torch.int64).shape == (3,)
