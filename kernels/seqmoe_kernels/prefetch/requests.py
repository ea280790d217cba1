"""The ring of requests, from the kernel that asks for prefetches to what copies them: a kernel, or
a thread of the host. Each 64-bit word carries its request's number in its low bits, as those of
`step_ring` do, so that the thread sees for every word by itself whether it has arrived."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from seqmoe_kernels.pool.step_ring import LOW_BITS, NUMBER_BITS
from seqmoe_kernels.state import NUM_REQUESTS, REQUEST_WORDS, Flights

SLOT_BITS = 15

_NUM_REQUESTS, _REQUEST_WORDS = tl.constexpr(NUM_REQUESTS), tl.constexpr(REQUEST_WORDS)
_NUMBER_BITS, _LOW_BITS = tl.constexpr(NUMBER_BITS), tl.constexpr(LOW_BITS)
_SLOT_BITS, _SLOT_MASK = tl.constexpr(SLOT_BITS), tl.constexpr((1 << SLOT_BITS) - 1)


class Request(NamedTuple):
    """Copy the record `expert` into `slot`, then land `tag`; it is for the event of that clock."""

    tag: int
    slot: int
    expert: int
    event: int


def read_request(requests: torch.Tensor, number: int) -> Request | None:
    """Request `number` of a ring on the host, None while it is not all there."""
    words = requests[number % NUM_REQUESTS].tolist()
    if any((word ^ number) & LOW_BITS for word in words):
        return None
    tag, place, event = (word >> NUMBER_BITS for word in words)
    return Request(tag, place % (1 << SLOT_BITS), place >> SLOT_BITS, event)


def write_request_reference(request: Request, flights: Flights) -> None:
    number = int(flights.number)
    values = request.tag, request.slot | request.expert << SLOT_BITS, request.event
    words = [value << NUMBER_BITS | number & LOW_BITS for value in values]
    flights.requests[number % NUM_REQUESTS] = torch.tensor(words)
    flights.number.add_(1)


@triton.jit
def write_request(flights, number, tag, slot, expert, event):
    """Of int64 scalars and an int32 `slot` and `expert`; the number is counted by the caller."""
    place = slot.to(tl.int64) | (expert.to(tl.int64) << _SLOT_BITS)
    entry = flights.requests + number % _NUM_REQUESTS * _REQUEST_WORDS
    low = number & _LOW_BITS
    tl.store(entry, (tag << _NUMBER_BITS) | low)
    tl.store(entry + 1, (place << _NUMBER_BITS) | low)
    tl.store(entry + 2, (event << _NUMBER_BITS) | low)


@triton.jit
def load_request(flights, number):
    """Tag, slot, expert and event of a request that is known to be there, int64, and the present
    `control`, which is read while those come."""
    entry = flights.requests + number % _NUM_REQUESTS * _REQUEST_WORDS
    tag, place, event = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    control = tl.atomic_or(flights.control, 0, sem="relaxed")
    tag, place, event = tag >> _NUMBER_BITS, place >> _NUMBER_BITS, event >> _NUMBER_BITS
    return tag, place & _SLOT_MASK, place >> _SLOT_BITS, event, control
