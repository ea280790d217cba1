"""One row of a study, and the table for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from seqmoe_cli.terminal.table import Column
from tools.simulator.link import Link
from tools.simulator.replay import Replayed


@dataclass(frozen=True)
class Row:
    """Totals are over the `num_tokens` that count; the names are the keys of the JSON.

    A hit found a slot with the expert in it, or on its way and waited for; an on-time hit did not
    wait. Loads are fetches and prefetches, counted whole; of a prefetch that was cut short,
    `loads_per_token` and `loaded_bytes` have only the part that came over the link.
    `used_prefetches` became on-time hits. `stall_ms` is per token. `share_of_full_load` compares
    the speed with that of a pool for all experts. `gap_recovered`, without prefetch: 0 at the loads
    of LRU, 1 at those of Belady.
    """

    trace: str
    pool: str
    num_slots: int
    policy: str
    prefetch: str
    prefetch_by: str
    look_ahead: str
    forecast: str
    num_tokens: int
    num_lookups: int
    num_hits: int
    num_on_time_hits: int
    hit_rate: float
    on_time_hit_rate: float
    num_loads: int
    num_prefetches: int
    num_used_prefetches: int
    loads_per_token: float
    prefetches_per_token: float
    loaded_bytes: int
    stall_ms: float
    share_of_full_load: float
    gap_recovered: float | None

    @classmethod
    def of(
        cls,
        done: Replayed,
        skip: int,
        link: Link,
        online_and_best: tuple[float, float],
        names: dict[str, str],
        num_slots: int,
    ) -> Row:
        """The figures of a replay from token `skip` on."""
        counted = slice(skip, None)
        fetches, late = int(done.loads[counted].sum()), int(done.late[counted].sum())
        copies, used = int(done.copies[counted].sum()), int(done.used[counted].sum())
        tokens, layers = done.loads[counted].shape
        lookups = tokens * layers * done.top_k
        per_token = done.loads_per_token(counted)
        stall_s = float(done.stall_s[counted].mean())
        step_s = link.layer_s * layers
        return cls(
            **names,
            num_slots=num_slots,
            num_tokens=tokens,
            num_lookups=lookups,
            num_hits=lookups - fetches,
            num_on_time_hits=lookups - fetches - late,
            hit_rate=1 - fetches / lookups,
            on_time_hit_rate=1 - (fetches + late) / lookups,
            num_loads=fetches + copies,
            num_prefetches=copies,
            num_used_prefetches=used,
            loads_per_token=per_token,
            prefetches_per_token=copies / tokens,
            loaded_bytes=round(per_token * tokens * link.record_bytes),
            stall_ms=1e3 * stall_s,
            share_of_full_load=step_s / (step_s + stall_s),
            gap_recovered=_recovered(per_token, *online_and_best)
            if names["prefetch"] == "off"
            else None,
        )

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


COLUMNS = (
    Column("trace", lambda row: Path(row["trace"]).name, left=True, width=9),
    Column("pool", "pool", left=True, width=9),
    Column("policy", "policy", left=True, width=9),
    Column("prefetch", "prefetch", left=True, width=9),
    Column("hit %", "hit_rate", ".1f", 100),
    Column("on time %", "on_time_hit_rate", ".1f", 100),
    Column("loads/tok", "loads_per_token", ".1f"),
    Column("ahead/tok", "prefetches_per_token", ".1f"),
    Column("used %", lambda row: _share(row["num_used_prefetches"], row["num_prefetches"])),
    Column("MB/tok", lambda row: row["loaded_bytes"] / row["num_tokens"], ".0f", 1e-6),
    Column("stall ms", "stall_ms", ".2f"),
    Column("% of full load", "share_of_full_load", ".0f", 100),
    Column("gap %", "gap_recovered", ".0f", 100),
)


def _recovered(loads: float, online: float, best: float) -> float | None:
    return (online - loads) / (online - best) if online > best else None


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}" if whole else ""
