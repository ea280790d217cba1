"""The lines that show what an answer costs. Pure functions: figures and a width in, text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seqmoe_cli.engine.stats import BY_KEY, TurnStats
from seqmoe_weights.files import readable_size as size

SEPARATOR = " | "


def figure(key: str, stats: TurnStats) -> str:
    """A figure of a turn as people read it."""
    shown = BY_KEY[key]
    value = shown.of(stats)
    if value is None:
        return "none compared"
    return _FORMS[shown.unit](value)


def live_line(
    stats: TurnStats,
    ctx_size: int,
    pool_bytes: int,
    width: int,
    thinking: bool = False,
    prefetch: str = "",
    eviction: str = "",
) -> str:
    """The line under an answer while it comes; `thinking`: what comes now is not shown; `prefetch`
    and `eviction` by a forecast: their status, nothing if there is none."""
    num_ctx = stats.prompt_tokens + stats.completion_tokens
    fields = ["thinking"] if thinking else []
    fields += [
        f"ctx {num_ctx:,}/{ctx_size:,}",
        f"{figure('tokens_per_second', stats)} tok/s",
        f"hit {figure('hit_rate', stats)}",
        f"miss {stats.decode.misses_per_token:,.1f}/tok",
        f"fetch {figure('fetch_bytes_per_s', stats)}",
        *_prefetch(stats, prefetch),
        *_eviction(stats, eviction),
        f"pool {size(pool_bytes)}",
    ]
    return fit(fields, width)


def _prefetch(stats: TurnStats, prefetch: str) -> list[str]:
    if prefetch != "on":
        return [f"prefetch {prefetch}"] if prefetch else []
    tokens = max(stats.decode.num_tokens, 1)
    return [f"prefetch {stats.total.prefetch_hits / tokens:,.1f}/tok in time"]


def _eviction(stats: TurnStats, eviction: str) -> list[str]:
    saved = stats.decode.eviction_saved_misses
    if eviction != "on" or saved is None:
        return [f"forecast {eviction}"] if eviction else []
    return [f"forecast {saved:+,.1f} hit/tok"]


def eviction_line(saved_misses: float, saved_stall_s: float, saved: float) -> str:
    """What eviction by a forecast was worth when it was last judged, without and with its cost."""
    kept, word = ("saved" if value >= 0 else "cost" for value in (saved_misses, saved))
    return (
        f"the forecast {kept} {abs(saved_misses):,.1f} misses ({1e3 * abs(saved_stall_s):.2f} ms) "
        f"a step, all in all it {word} {abs(saved):.1%} of it"
    )


def worth_line(saved: float, copies_per_use: float | None) -> str:
    """What prefetch was worth when it was last compared with none."""
    word = "saved" if saved >= 0 else "cost"
    line = f"prefetch {word} {abs(saved):.1%} of a step when it was last compared, "
    return line + (
        "no copy was of use" if copies_per_use is None else f"{copies_per_use:,.1f} copies a use"
    )


def idle_line(num_ctx: int, ctx_size: int, pool_bytes: int, width: int) -> str:
    """The line under the prompt while nothing happens."""
    fields = [f"ctx {num_ctx:,}/{ctx_size:,}", f"pool {size(pool_bytes)}", "/help"]
    return fit(fields, width)


def prefill_line(done: int, total: int, elapsed_s: float, width: int) -> str:
    """The line shown while the prompt is evaluated."""
    fields = [f"prompt {done:,}/{total:,}"]
    if done and elapsed_s > 0:
        fields.append(f"{done / elapsed_s:,.0f} tok/s")
    return fit(fields, width)


def turn_line(stats: TurnStats, cold: bool, width: int) -> str:
    """The line after an answer; `cold` says that the pool was empty before it."""
    fields = [
        f"{_tokens(stats.completion_tokens)}, {figure('tokens_per_second', stats)} tok/s",
        f"prompt {_tokens(stats.prefill.num_tokens)} in {figure('prefill_seconds', stats)}",
        f"hit {figure('hit_rate', stats)}" + (" (cold pool)" if cold else ""),
    ]
    total, decode = stats.total, stats.decode
    if total.prefetched_bytes:
        fields.append(f"prefetch {total.prefetch_hits:,} in time, {size(total.prefetched_bytes)}")
    elif decode.prefetch_rested_tokens:
        fields.append("prefetch rested")
    if decode.eviction_saved_misses is not None:
        fields += _eviction(stats, "on")
    elif decode.eviction_rested_tokens:
        fields.append("forecast rested")
    return fit(fields, width)


def fit(fields: Sequence[str], width: int) -> str:
    """As many fields as fit into `width` columns, dropped from the right; at least a part of the
    first one."""
    for count in range(len(fields), 0, -1):
        line = SEPARATOR.join(fields[:count])
        if len(line) <= width:
            return line
    return fields[0][: max(0, width)]


def rate(bytes_per_s: float) -> str:
    """Bytes per second in GB/s, or MB/s when slow."""
    gb = bytes_per_s / 1e9
    return f"{gb:,.1f} GB/s" if gb >= 0.95 else f"{bytes_per_s / 1e6:,.1f} MB/s"


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


_FORMS: dict[str, Callable[[Any], str]] = {
    "tokens": "{:,} tok".format,
    "count": "{:,}".format,
    "number": "{:,.2f}".format,
    "per token": "{:,.2f}/tok".format,
    "share": "{:.1%}".format,
    "bytes": size,
    "bytes/s": rate,
    "tok/s": "{:,.1f}".format,
    "s": "{:.2f} s".format,
}
