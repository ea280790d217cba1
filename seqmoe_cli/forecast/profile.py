"""UseProfile: which experts the user's answers have used, kept in a file on this machine alone. It
says which experts a pool should begin with. Holds counts, no text."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.paths import profiles_dir
from seqmoe_weights.files import naming_os_errors, replacing
from seqmoe_weights.packed import PackedModel

FORMAT = "seqmoe-profile"
HALF_LIFE = 200  # answers after which one counts half


@dataclass
class UseProfile:
    """`counts` f64 [N], by flat id: in how many answers an expert was used, old ones fading."""

    path: Path
    counts: NDArray[np.float64]
    num_answers: int = 0
    _new: list[NDArray[np.bool_]] = field(default_factory=list, repr=False)  # not saved yet

    @classmethod
    def of(cls, model: PackedModel) -> UseProfile:
        """The user's profile of a model, an empty one if there is none or it is damaged. Whatever
        is made of the same source in the same precision is the same model."""
        source, quantize = model.manifest["source"]["sha256"], model.manifest["quantize"]
        path = profiles_dir() / f"{source[:16]}-{quantize}.npz"
        return cls.load(path, model.config.num_routed_experts)

    @classmethod
    def load(cls, path: Path, num_experts: int) -> UseProfile:
        """From a file; empty if it cannot be read or is for another number of experts."""
        try:
            with np.load(path) as file:
                counts = file["counts"].astype(np.float64)
                num_answers, is_profile = int(file["num_answers"]), file["format"] == FORMAT
                are_counts = bool(np.isfinite(counts).all()) and counts.min() >= 0
                if is_profile and counts.shape == (num_experts,) and are_counts:
                    return cls(path, counts, num_answers)
        except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile, zlib.error):
            pass
        return cls(path, np.zeros(num_experts))

    def add(self, used: Sequence[bool] | NDArray[np.bool_]) -> None:
        """An answer used these experts, bool [N]; nothing is counted for one that used none."""
        if np.any(used):
            self._new.append(np.asarray(used, bool))
            self._count(self._new[-1])

    def _count(self, used: NDArray[np.bool_]) -> None:
        self.counts = self.counts * 2 ** (-1 / HALF_LIFE) + used
        self.num_answers += 1

    def learn(self, trace: Trace) -> None:
        """Every sequence of a trace is an answer."""
        flat = trace.experts + np.arange(trace.num_layers)[:, None] * trace.num_experts
        for number in np.unique(trace.sequence):
            used = np.zeros(len(self.counts), bool)
            used[flat[(trace.sequence == number) & (trace.phase == DECODE)]] = True
            self.add(used)

    def ranking(self) -> NDArray[np.int32]:
        """The experts that were ever used, those of most answers first."""
        order = np.argsort(-self.counts, kind="stable")
        return order[: np.count_nonzero(self.counts)].astype(np.int32)

    def save(self) -> None:
        """Write the file, if anything is new, on top of what other chats have written meanwhile.
        Raises `SeqmoeError` where that is not possible."""
        if not self._new:
            return
        latest = self.load(self.path, len(self.counts))
        for used in self._new:
            latest._count(used)
        self.counts, self.num_answers = latest.counts, latest.num_answers
        with naming_os_errors("write", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(self.path) as file:
            os.fchmod(file.fileno(), 0o600)
            np.savez_compressed(
                file, format=FORMAT, num_answers=self.num_answers, counts=self.counts
            )
        self._new.clear()
