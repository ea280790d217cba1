"""Copies of prefetched experts that come late, in another order, damaged or not at all."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from seqmoe_cli.residency.prefetcher import DmaCopier, HostCopier
from seqmoe_kernels import Request


class Troubled:
    """A copier on whose behalf things go wrong."""

    trouble: Callable[[Troubled, Request], bool]  # whether it took care of the request itself

    def __init__(self, *parts: object) -> None:
        records = parts[0]
        assert isinstance(records, torch.Tensor)
        kind = DmaCopier if parts[1].is_cuda else HostCopier  # type: ignore[attr-defined]
        self.real = kind(*parts)  # type: ignore[arg-type]
        self.luck = random.Random(3)
        self.held: list[Request] = []
        self.started = 0

    def begin(self) -> None:
        self.real.begin()

    def start(self, request: Request, refuse: bool) -> None:
        self.started += 1
        if not self.trouble(request):
            self.real.start(request, refuse)

    def num_under_way(self) -> int:
        return self.real.num_under_way()


def late(copier: Troubled, request: Request) -> bool:
    time.sleep(copier.luck.choice((0, 0.001, 0.02)))
    return False


def swapped(copier: Troubled, request: Request) -> bool:
    """Every second request waits for the one after it, whose slot is another."""
    copier.held.append(request)
    if len(copier.held) == 2:
        for held in reversed(copier.held):
            copier.real.start(held, False)
        copier.held.clear()
    return True


def lost(copier: Troubled, request: Request) -> bool:
    """Some copies never arrive, some arrive with an old tag, some are refused."""
    kind = copier.luck.randrange(6)
    if kind == 1:
        copier.real.start(request._replace(tag=request.tag - 1), False)
    if kind == 2:
        copier.real.start(request, True)
    return kind < 3


def deadly(copier: Troubled, request: Request) -> bool:
    if copier.started > 5:
        raise OSError("no more")
    return False
