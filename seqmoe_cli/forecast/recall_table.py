"""The tables that say how well coming routing is foreseen, as Markdown and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seqmoe_cli.forecast.recall import GROUPS, POOLS, Recall, Score, best_by_counting
from seqmoe_cli.residency.policies import WINDOWS


def recall_tables(found: Recall) -> Iterator[str]:
    """Markdown, line by line: by distance, and then what matters for prefetch."""
    yield from _table(
        ["forecast", *(f"{_steps(*window)}: @{_top(found)}" for window in WINDOWS)],
        [
            [score.forecast, *(" / ".join(map(_percent, three)) for three in score.overall)]
            for score in found.scores
        ],
    )
    yield ""
    pools = [percent for percent in POOLS if percent in found.num_misses]
    yield from _table(
        [
            f"step 1, @{found.top[1]}", *GROUPS, "rare",
            *(f"misses at {percent} %" for percent in pools),
            *(f"likeliest {round(found.num_misses[percent])}" for percent in pools),
        ],
        [
            [
                score.forecast,
                *(_percent(share) for share in score.by_depth[0, :, 1]),
                _percent(score.rare),
                *(_percent(score.misses[percent]) for percent in pools),
                *(_percent(score.named[percent]) for percent in pools),
            ]
            for score in found.scores
        ],
    )  # fmt: skip
    yield ""
    yield _note(found)


def recall_facts(found: Recall) -> dict[str, object]:
    """The same as plain values."""
    return {
        "num_tokens": found.num_tokens,
        "top": list(found.top),
        "rare_share": found.rare_share,
        "misses_per_token": {str(percent): n for percent, n in found.num_misses.items()},
        "scores": [_plain(score) for score in found.scores],
    }


def _plain(score: Score) -> dict[str, object]:
    return {
        "forecast": score.forecast,
        "recall": {_steps(*w): _rounded(x) for w, x in zip(WINDOWS, score.overall, strict=True)},
        "recall_by_depth": {
            _steps(*w): {group: _rounded(y) for group, y in zip(GROUPS, x, strict=True)}
            for w, x in zip(WINDOWS, score.by_depth, strict=True)
        },
        "recall_of_rare": round(score.rare, 4),
        "recall_of_misses": {str(p): round(x, 4) for p, x in score.misses.items()},
        "misses_among_likeliest": {str(p): round(x, 4) for p, x in score.named.items()},
    }


def _note(found: Recall) -> str:
    k, more, twice = found.top
    lines = [
        f"{found.num_tokens:,} tokens of answers. Share of uses that are among the {k}, {more} and "
        f"{twice} experts of a layer named first. Rare: not used in the last 64 steps, "
        f"{_percent(found.rare_share)} % of uses. Misses: of a pool of that size with LRU, "
        + " and ".join(f"{n:.1f}" for n in found.num_misses.values())
        + " a token; likeliest: of the absent experts of all layers, as many."
    ]
    by_name = {score.forecast: score for score in found.scores}
    if "predictor" in by_name:
        own = float(by_name["predictor"].overall[0, 1])
        best = best_by_counting(found.scores)
        decayed = next(s for s in found.scores if s.forecast.startswith("decayed"))
        lines.append(
            f"Step 1, @{more}: predictor {_percent(own)} %, "
            f"{own / float(best.overall[0, 1]):.2f} times {best.forecast}, "
            f"{own / float(decayed.overall[0, 1]):.2f} times {decayed.forecast}."
        )
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [c.rjust(width) for c, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    yield line(head)
    yield line(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    yield from map(line, rows)


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _top(found: Recall) -> str:
    return "/".join(map(str, found.top))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _rounded(shares: object) -> list[float]:
    return [round(float(share), 4) for share in shares]  # type: ignore[attr-defined]
