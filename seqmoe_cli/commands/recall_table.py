"""The tables that say how well coming routing is foreseen, as Markdown and as plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from seqmoe_cli.forecast.recall import GROUPS, POOLS, Recall, Score, best_by_counting
from seqmoe_cli.residency.policies import WINDOWS
from seqmoe_cli.terminal.table import Column, markdown


def recall_tables(found: Recall) -> Iterator[str]:
    """Markdown, line by line: by distance, and then what matters for prefetch."""
    name = Column("forecast", lambda score: score.forecast, left=True)
    windows = enumerate(WINDOWS)
    by_distance = [Column(f"{_steps(*w)}: @{_top(found)}", _overall(n)) for n, w in windows]
    yield from markdown([name, *by_distance], found.scores)
    yield ""
    yield from markdown(
        [replace(name, title=f"step 1, @{found.top[1]}"), *_closely(found)], found.scores
    )
    yield ""
    yield _note(found)


def _overall(window: int) -> Callable[[Score], str]:
    return lambda score: " / ".join(map(_percent, score.overall[window]))


def _closely(found: Recall) -> list[Column]:
    """Of the step that begins: by depth, of rare experts, and of those that LRU misses."""
    num_misses = found.num_misses
    pools = [percent for percent in POOLS if percent in num_misses]
    shares: list[tuple[str, Callable[[Score], float]]] = [
        *((group, partial(_by_depth, n)) for n, group in enumerate(GROUPS)),
        ("rare", lambda score: score.rare),
        *((f"misses at {pool} %", partial(_of_misses, pool)) for pool in pools),
        *((f"likeliest {round(num_misses[pool])}", partial(_named, pool)) for pool in pools),
    ]
    return [Column(title, share, ".1f", 100) for title, share in shares]


def _by_depth(group: int, score: Score) -> float:
    return float(score.by_depth[0, group, 1])


def _of_misses(percent: int, score: Score) -> float:
    return score.misses[percent]


def _named(percent: int, score: Score) -> float:
    return score.named[percent]


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


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _top(found: Recall) -> str:
    return "/".join(map(str, found.top))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _rounded(shares: object) -> list[float]:
    return [round(float(share), 4) for share in shares]  # type: ignore[attr-defined]
