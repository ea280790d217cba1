"""Weighs the healing against the first training: a share of what it changed is kept.

The second training may trade too much of the teacher's language for answers that end. Between its
weights and those it started from lie models that have some of both.

    python -m tools.demo_model.sparse.weigh HEALED --share SHARE -o FILE
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.demo_model.sparse.build import DELTA
from tools.demo_model.sparse.decoder import LINEARS
from tools.demo_model.sparse.delta import is_healed, read_delta, round_delta


def weigh(first: dict[str, Tensor], healed: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """The healing, rounded, whose model lies at `share` of the way from the delta `first` to
    `first | healed`: 0 is the former, 1 the latter. Low-rank changes keep the rank they have in
    `healed`."""
    num_neurons = int(first["neurons"].max()) + 1
    old, support = read_delta(first, num_neurons)
    new, _ = read_delta(first | healed, num_neurons)
    made = dict(old)
    for name in filter(is_healed, old):
        if name.partition(".")[0] not in LINEARS:
            made[name] = torch.lerp(old[name], new[name], share)
    for key in filter(is_healed, LINEARS):
        a = torch.cat([old[f"{key}.a"], new[f"{key}.a"]], dim=1)
        b = torch.cat([(1 - share) * old[f"{key}.b"], share * new[f"{key}.b"]], dim=2)
        made[f"{key}.a"], made[f"{key}.b"] = truncated(a, b, new[f"{key}.a"].shape[1])
    return {name: t for name, t in round_delta(made, support).items() if is_healed(name)}


def truncated(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors a [L, rank, in], b [L, out, rank] of the matrices nearest to b @ a of a higher rank.

    All scale is in `a`, whose rows are rounded one by one: small parts are as exact as large ones.
    """
    left, mixed_left = torch.linalg.qr(b)
    right, mixed_right = torch.linalg.qr(a.mT)
    turn_left, sizes, turn_right = torch.linalg.svd(mixed_left @ mixed_right.mT)
    a = sizes[:, :rank, None] * (turn_right[:, :rank] @ right.mT)
    return a, left @ turn_left[:, :, :rank]


def main() -> None:
    """Write the weighed healing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("healed", type=Path, help="healing.safetensors of the second training")
    parser.add_argument("--share", type=float, required=True, help="of its changes, from 0 to 1")
    parser.add_argument("--delta", type=Path, default=DELTA, help="the first training's")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    save_file(
        weigh(load_file(options.delta), load_file(options.healed), options.share), options.out
    )


if __name__ == "__main__":
    main()
