"""What rotations, codebooks and residuals of signs do to attention, on synthetic keys and values (two minutes).

    python -m benchmarks.kv_rotations

Keys have outlier channels as real ones do behind their positions: four pairs among the turned dimensions and four
others, 10 to 30 times as large, half of them nearly constant over tokens. Values are Gaussian. Queries are random,
their scores of the given spread: 1 looks at many keys, 4 at a few.

Rotation: x to H D x, D fixed signs and H the normalised Walsh-Hadamard matrix (QuaRot, arXiv:2404.00456). `intB` has a
scale for 32 neighbours. `tqB` is TurboQuant's first quantiser (arXiv:2504.19874): the rotated row over its root mean
square, each coordinate to the nearest of 2^B levels that Lloyd and Max give for a Gaussian; `unbiased` gives K the
scale |x|^2 / <x, levels> instead, with which inner products aren't shortened. `+qjl` spends one bit of K more on the
residual r: the signs of S r, S Gaussian, from which <q, r> is read as sqrt(pi / 2) / D |r| <S q, sign(S r)> (QJL,
arXiv:2406.03482): unbiased, and linear in q, so that here it is a part of the key. Bits count scales (bfloat16).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

DIM, TURNED, GROUP = 256, 64, 32
Quantiser = Callable[[torch.Tensor], torch.Tensor]


def hadamard(dim: int) -> torch.Tensor:
    """The normalised Walsh-Hadamard matrix [D, D]; D is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / dim**0.5


def gaussian_levels(bits: int) -> torch.Tensor:
    """Lloyd and Max's levels [2^bits] of a Gaussian of variance one."""
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), 1.0)
    levels = normal.icdf((torch.arange(2**bits).double() + 0.5) / 2**bits)
    for _ in range(3000):
        edges = torch.cat([torch.tensor([-40.0]), (levels[1:] + levels[:-1]) / 2, torch.tensor([40.0])]).double()
        density, mass = normal.log_prob(edges).exp(), normal.cdf(edges)
        levels = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
    return levels.float()


def integers(bits: int) -> Quantiser:
    """The extreme of a group is the lowest code, as in `kv_formats`."""

    def quantise(x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, GROUP))
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        half = 2 ** (bits - 1)
        scale = (extreme / -half).bfloat16().float()
        return ((groups / scale).round().clamp(-half, half - 1) * scale).flatten(-2)

    return quantise


def codebook(bits: int, unbiased: bool = False) -> Quantiser:
    levels = gaussian_levels(bits)
    edges = (levels[1:] + levels[:-1]) / 2

    def quantise(x: torch.Tensor) -> torch.Tensor:
        scale = x.square().mean(-1, keepdim=True).sqrt()
        steps = levels[torch.bucketize(x / scale, edges)]
        if unbiased:
            scale = x.square().sum(-1, keepdim=True) / (x * steps).sum(-1, keepdim=True)
        return steps * scale.bfloat16().float()

    return quantise


def with_signs(first: Quantiser, sketch: torch.Tensor) -> Quantiser:
    def quantise(x: torch.Tensor) -> torch.Tensor:
        rough = first(x)
        residual = x - rough
        length = residual.norm(dim=-1, keepdim=True).bfloat16().float()
        return rough + (torch.pi / 2) ** 0.5 / x.shape[-1] * length * ((residual @ sketch.T).sign() @ sketch)

    return quantise


def rotated(quantise: Quantiser, signs: torch.Tensor) -> Quantiser:
    matrix = hadamard(len(signs)) * signs
    return lambda x: quantise(x @ matrix.T) @ matrix


def keys_with_outliers(count: int) -> torch.Tensor:
    """[count, DIM], turned by their positions in the first TURNED dimensions, halves against each other."""
    keys, size = torch.randn(count, DIM), torch.empty(DIM).fill_(1.0)
    half = TURNED // 2
    pairs, others = torch.randperm(half)[:4], TURNED + torch.randperm(DIM - TURNED)[:4]
    for i, channel in enumerate([*pairs.tolist(), *others.tolist()]):
        size[channel] = 10 + 20 * float(torch.rand(()))
        if i % 2:  # nearly constant
            keys[:, channel] = 1 + 0.1 * keys[:, channel]
    keys *= size
    angles = torch.arange(count)[:, None] / 10_000_000 ** (torch.arange(half) / half)
    first, second = keys[:, :half].clone(), keys[:, half:TURNED].clone()
    keys[:, :half] = first * angles.cos() - second * angles.sin()
    keys[:, half:TURNED] = second * angles.cos() + first * angles.sin()
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=8, help="each with other outliers")
    parser.add_argument("--spread", type=float, nargs="+", default=[1.0, 4.0])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    index = torch.arange(DIM)
    signs = torch.tensor([1.0 - 2 * (int(i & i >> 1 & 0x55).bit_count() % 2) for i in index])
    sketch = torch.randn(DIM, DIM)

    def rotate(quantise: Quantiser) -> Quantiser:
        return rotated(quantise, signs)

    # Of keys, of values, and the bits of a number of each.
    kinds: dict[str, tuple[Quantiser, Quantiser, float, float]] = {}
    for bits in (4, 3):
        plain, book, grouped, whole = integers(bits), codebook(bits), bits + 16 / GROUP, bits + 16 / DIM
        kinds[f"int{bits}"] = plain, plain, grouped, grouped
        kinds[f"int{bits} rotated"] = rotate(plain), rotate(plain), grouped, grouped
        kinds[f"tq{bits}"] = rotate(book), rotate(book), whole, whole
        kinds[f"tq{bits} unbiased"] = rotate(codebook(bits, unbiased=True)), rotate(book), whole, whole
        for first, name in ((bits - 1, "the same bits"), (bits, "one more")):
            quantiser = rotate(with_signs(codebook(first), sketch))
            kinds[f"tq{first}+qjl, {name}"] = quantiser, rotate(book), first + 1 + 32 / DIM, whole
            quantiser = rotate(with_signs(integers(first), sketch))
            kinds[f"int{first} rotated+qjl, {name}"] = quantiser, rotate(plain), grouped + first + 1 - bits, grouped
    columns = f"{'KL':>10}{'out':>8}{'K+V out':>9}{'same key':>10}"
    for spread in arguments.spread:
        print(f"\nspread of scores {spread:g}\n{'':<32}{'K bits':>7}{columns}")
        totals = {name: torch.zeros(4).double() for name in kinds}
        for _ in range(arguments.rounds):
            keys, values = keys_with_outliers(arguments.tokens), torch.randn(arguments.tokens, DIM)
            queries = torch.randn(256, DIM)
            scores = queries @ keys.T
            factor = spread / scores.std(-1, keepdim=True)
            exact = torch.log_softmax(scores * factor, -1)
            outs = exact.exp() @ values
            for name, (of_keys, of_values, *_) in kinds.items():
                found = torch.log_softmax(queries @ of_keys(keys).T * factor, -1)
                errors = [(found.exp() @ each - outs).norm() / outs.norm() for each in (values, of_values(values))]
                divergence = (exact.exp() * (exact - found)).sum(-1).mean()
                same = (found.argmax(-1) == exact.argmax(-1)).double().mean()
                totals[name] += torch.stack([divergence, *errors, same]).double() / arguments.rounds
        for name, (kl, out, both, same) in totals.items():
            print(f"{name:<32}{kinds[name][2]:>7.2f}{kl:>10.5f}{out:>8.3f}{both:>9.3f}{100 * same:>9.1f}%")


if __name__ == "__main__":
    main()
