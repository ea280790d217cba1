"""The tables that say how well coming routing is foreseen, as Markdown and as plain values."""

from __future__ import annotations

from collections.abc import Iterator

from seqmoe_cli.forecast.recall import steps_text
from seqmoe_cli.residency.policies import WINDOWS
from seqmoe_cli.terminal.table import Column, markdown
from tools.simulator.recall_study import GROUPS, POOLS, Recall, Score, best_by_counting


def recall_tables(found: Recall) -> Iterator[str]:
    """Markdown, line by line: by distance, and then what matters for prefetch."""
    top = "/".join(map(str, found.top))
    columns = [Column("forecast", "forecast", left=True)]
    columns += [Column(f"{steps_text(*window)}: @{top}", steps_text(*window)) for window in WINDOWS]
    yield from markdown(columns, [_by_distance(score) for score in found.scores])
    yield ""
    pools = [percent for percent in POOLS if percent in found.num_misses]
    names = [(name, name) for name in (*GROUPS, "rare")]
    names += [(f"misses at {percent} %", f"misses {percent}") for percent in pools]
    names += [(f"likeliest {round(found.num_misses[p])}", f"named {p}") for p in pools]
    columns = [Column(f"step 1, @{found.top[1]}", "forecast", left=True)]
    columns += [Column(title, key, ".1f", 100) for title, key in names]
    yield from markdown(columns, [_closely(score) for score in found.scores])
    yield ""
    yield _note(found)


def _by_distance(score: Score) -> dict[str, str]:
    shares = (" / ".join(map(_percent, three)) for three in score.overall)
    return {"forecast": score.forecast} | {
        steps_text(*w): text for w, text in zip(WINDOWS, shares, strict=True)
    }


def _closely(score: Score) -> dict[str, object]:
    """Of the step that begins: by depth, of rare experts, and of those that LRU misses."""
    return {
        "forecast": score.forecast,
        **dict(zip(GROUPS, score.by_depth[0, :, 1], strict=True)),
        "rare": score.rare,
        **{f"misses {percent}": share for percent, share in score.misses.items()},
        **{f"named {percent}": share for percent, share in score.named.items()},
    }


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
        "recall": {
            steps_text(*w): _rounded(x) for w, x in zip(WINDOWS, score.overall, strict=True)
        },
        "recall_by_depth": {
            steps_text(*w): {group: _rounded(y) for group, y in zip(GROUPS, x, strict=True)}
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


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _rounded(shares: object) -> list[float]:
    return [round(float(share), 4) for share in shares]  # type: ignore[attr-defined]
