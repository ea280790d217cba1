"""The locality table of a trace, in Markdown: `python -m tools.demo_model.locality TRACE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import isnan
from pathlib import Path

from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.forecast.trace import DECODE, Trace
from tools.simulator.locality import adjacent_overlap, working_set
from tools.simulator.policies import belady, lru
from tools.simulator.replay import replay, slots_for

SHARES = (15, 25, 35, 45)  # percent of all experts
COLUMNS = 10  # layers in a row of the table
WINDOWS = (1, 2, 4, 8, 16, 32, 64)  # tokens


def main(argv: list[str]) -> int:
    """Print the tables of the trace that is named; the exit code."""
    if len(argv) != 1:
        print("usage: python -m tools.demo_model.locality TRACE", file=sys.stderr)
        return 2
    try:
        trace = Trace.load(Path(argv[0]))
    except SeqmoeError as error:
        print(f"{error.message}\n  {error.hint}", file=sys.stderr)
        return 1
    if not (trace.phase == DECODE).any():
        print(f"{argv[0]} holds no token of an answer", file=sys.stderr)
        return 1
    print("\n".join(page(trace)))
    return 0


def page(trace: Trace) -> Iterator[str]:
    """The lines of all tables."""
    answers = trace.select(trace.phase == DECODE)
    yield (
        f"`{trace.model}`: {trace.num_layers} layers of {trace.num_experts} experts, "
        f"{trace.top_k} used by a token. {len(answers):,} tokens of answers in "
        f"{trace.num_sequences:,} sequences, after {len(trace) - len(answers):,} tokens of prompts."
    )
    yield from ("", "One pool for all layers, empty at the start, through which every token goes,")
    yield "sequence after sequence; tokens of answers are counted. An event is a token in a layer;"
    yield "what it wants is no victim, what it misses is loaded. Belady knows the future."
    yield from ("", *_residency(trace), "", *_overlap(answers), "", *_working_set(answers))


def _residency(trace: Trace) -> Iterator[str]:
    yield "| pool | slots | LRU: hits | loads per token | Belady: hits | loads per token |"
    yield "|---:|---:|---:|---:|---:|---:|"
    counted = trace.phase == DECODE
    for share in SHARES:
        slots = slots_for(trace, share)
        cells = [f"{share} %", f"{slots:,}"]
        if slots < trace.top_k:
            cells += ["too small", "", "", ""]
        else:
            for policy in (lru, belady):
                done = replay(trace, slots, policy)
                cells.append(f"{100 * done.hit_rate(counted):.1f} %")
                cells.append(f"{done.loads_per_token(counted):.1f}")
        yield f"| {' | '.join(cells)} |"


def _overlap(answers: Trace) -> Iterator[str]:
    shared = adjacent_overlap(answers)
    yield "Share of a token's experts that the token before it used too: by chance"
    yield f"{answers.top_k / answers.num_experts:.3f}, here {shared.mean():.3f}, layer by layer:"
    yield ""
    yield f"| layer | {' | '.join(f'+{n}' for n in range(COLUMNS))} |"
    yield "|---:|" + "---:|" * COLUMNS
    for first in range(0, len(shared), COLUMNS):
        cells = [f"{value:.3f}" for value in shared[first : first + COLUMNS]]
        cells += [""] * (COLUMNS - len(cells))
        yield f"| {first} | {' | '.join(cells)} |"


def _working_set(answers: Trace) -> Iterator[str]:
    yield f"Different experts of a layer, of {answers.num_experts}, that tokens in a row use:"
    yield ""
    sizes = {window: working_set(answers, window) for window in WINDOWS}
    sizes = {window: size for window, size in sizes.items() if not isnan(size)}
    yield f"| tokens | {' | '.join(map(str, sizes))} |"
    yield "|---|" + "---:|" * len(sizes)
    yield f"| experts | {' | '.join(f'{size:.1f}' for size in sizes.values())} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
