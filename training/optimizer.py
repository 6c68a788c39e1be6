"""Muon for the matrices of the blocks, AdamW for everything else, as one object with one schedule."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from training import parallel

_ADAM_NAMES = ("embed", "lm_head", "pos_embed", "in_proj_a", "in_proj_b", "heads.")


class Muon:
    """Momentum orthogonalised by Newton-Schulz iterations (Jordan et al. 2024), batched over matrices of one shape.

    Updates are scaled by sqrt(max(1, rows / columns)), so that one rate serves every shape.
    """

    def __init__(self, params: list[tuple[nn.Parameter, float]], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, int, float], list[nn.Parameter]] = defaultdict(list)
        for param, rate in params:
            self.groups[(param.shape[0], param[0].numel(), rate)].append(param)
        self.buffers = {key: torch.zeros(len(g), key[0], key[1], device=g[0].device) for key, g in self.groups.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Every process orthogonalises its share of the matrices; the updates are then summed over processes.

        What has no gradient stays as it is, and so does its momentum.
        """
        params: list[nn.Parameter] = []
        updates: list[torch.Tensor] = []
        for (rows, columns, rate), group in self.groups.items():
            learned = [i for i, param in enumerate(group) if param.grad is not None]
            if not learned:
                continue
            grads = torch.stack([grad.reshape(rows, columns) for param in group if (grad := param.grad) is not None])
            buffer = self.buffers[rows, columns, rate]
            momentum = buffer[learned] * self.momentum + grads
            buffer[learned] = momentum
            grads.add_(momentum, alpha=self.momentum)
            mine = torch.arange(parallel.rank(), len(learned), parallel.world())
            update = torch.zeros_like(grads)
            if len(mine):
                update[mine] = _orthogonal(grads[mine]) * (rate * max(1.0, rows / columns) ** 0.5)
            params += [group[i] for i in learned]
            updates += update
        parallel.sum_over_processes(updates)
        for param, update in zip(params, updates, strict=True):
            param.sub_(update.reshape(param.shape), alpha=lr)


class Optimizer:
    """`step` takes one step with every learning rate multiplied by `scale`, Muon's by `muon_scale` too."""

    def __init__(self, model: nn.Module, heads: nn.Module, muon_lr: float, adam_lr: float, vision_rate: float) -> None:
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        matrices, others = [], []
        for name, param in model.named_parameters():
            is_matrix = param.ndim >= 2 and "conv1d" not in name and not any(n in name for n in _ADAM_NAMES)
            if "patch_embed.proj.weight" in name:
                is_matrix = True
            if is_matrix:
                matrices.append((param, vision_rate if "visual" in name else 1.0))
            else:
                others.append(param)
        self.muon = Muon(matrices)
        others += heads.parameters()
        fused = others[0].device.type != "cpu"  # a launch for all of them; for few and small ones, a processor's loss
        self.adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)

    def step(self, scale: float, muon_scale: float = 1.0) -> None:
        self.muon.step(self.muon_lr * scale * muon_scale)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for group in self.muon.groups.values():
            for param in group:
                param.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "muon": list(self.muon.buffers.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for buffer, saved in zip(self.muon.buffers.values(), state["muon"], strict=True):
            buffer.copy_(saved)


def _orthogonal(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[n, rows, columns] -> the nearest semi-orthogonal matrices, roughly: singular values between 0.7 and 1.2.

    In bfloat16, which is as exact as this has to be.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)
