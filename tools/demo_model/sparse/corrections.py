"""What the student is to learn better than its teacher: to leave loops, and to come to an end.

Small models at low temperature say the same thing again and again. SmolLM2 itself, asked everyday
questions, does so in one answer of four to seven, by how it samples. So its logits are corrected:
the token that came next the last time the row stood at the same six tokens is made less likely, and
the end of the turn more likely, the oftener the row has stood there; the end also the longer the
answer is. Twice the same is no loop yet, and is let be. What never ends a turn, the middle of a
sentence, stays that way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

SAME = 6  # tokens that must be the same
NUM_SPECIAL = 17  # SmolLM2's first tokens; the frame of a conversation may repeat itself
LOWERED, MOST_LOWERED = 0.75, 2  # of the logit of going on as before, each time but the first
RAISED, MOST = 3.0, 4  # of the end's logit, each time but the first, and times that count
PATIENCE, HURRY, MOST_HURRY = 200, 1 / 60, 3.0  # tokens; of the end's logit, a token over; at most


class Marks(NamedTuple):
    """Token ids: what ends a turn, and the header of an assistant's turn. Its first token begins
    any turn, its second one begins no other role's name."""

    end: int
    header: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Marks:
        """Those of SmolLM2's chat template."""
        end, *header = tokenizer.encode("<|im_end|><|im_start|>assistant\n").ids
        return cls(end, tuple(header))


class Correction(NamedTuple):
    """Behind each token of rows [B, T]: by how much the logit of `token` is `lowered` and that of
    `end`, one id for all, is `raised`; both float32."""

    token: Tensor
    lowered: Tensor
    end: int
    raised: Tensor


def correct(rows: Tensor, marks: Marks, num_rows: int) -> Correction:
    """Corrections of the teacher's logits on token ids int64 [B, T], of the first `num_rows`."""
    same = earlier_places(rows[:num_rows])
    times = same.sum(dim=-1)
    places = torch.arange(rows.shape[1], device=rows.device)
    last = (same * places).amax(dim=-1)
    token = rows[:num_rows].gather(1, last + 1)
    lowered = LOWERED * (times - 1).clamp(0, MOST_LOWERED) * (token >= NUM_SPECIAL)
    answered = answer_lengths(rows[:num_rows], marks)
    hurry = ((answered - PATIENCE) * HURRY).clamp(0, MOST_HURRY)
    raised = (RAISED * (times - 1).clamp(0, MOST) + hurry) * (answered > 0)
    rest = len(rows) - num_rows
    token, lowered, raised = (
        torch.cat([x, x.new_zeros(rest, x.shape[1])]) for x in (token, lowered, raised)
    )
    return Correction(token, lowered, marks.end, raised)


def earlier_places(rows: Tensor) -> Tensor:
    """Where rows [B, T] have been before: bool [B, T, T], for every place the earlier ones that
    the same SAME tokens stand at and before, none of them special."""
    length = rows.shape[1]
    places = torch.arange(length, device=rows.device)
    earlier = (places < places[:, None]) & (places >= SAME - 1)
    same = earlier.expand(len(rows), -1, -1).clone()
    for back in range(SAME):
        shifted = rows.roll(back, dims=1)
        same &= (shifted[:, :, None] == shifted[:, None, :]) & (shifted >= NUM_SPECIAL)[:, :, None]
    return same


def answer_lengths(rows: Tensor, marks: Marks) -> Tensor:
    """How many tokens of an assistant's turn stand at and before each place of rows [B, T] since
    it began: int64 [B, T], 0 outside of such turns."""
    places = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    begun = torch.where(rows == marks.header[0], places, -1).cummax(dim=1).values
    ended = torch.where(rows == marks.end, places, -1).cummax(dim=1).values
    role = rows.gather(1, (begun + 1).clamp(max=rows.shape[1] - 1))
    inside = (begun > ended) & (role == marks.header[1])
    return torch.where(inside, places - begun - len(marks.header) + 1, 0).clamp(min=0)
