"""ChatOptions: how a chat behaves, apart from sampling and the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from seqmoe_cli.text.sampling import Setting


@dataclass
class ChatOptions:
    """`predict`: most tokens of an answer, None for no limit of its own. `plain`: no status line.
    `stats`: say what an answer cost. `think`: auto, on or off."""

    predict: Setting = field(default_factory=lambda: Setting(None, "default"))
    think: str = "auto"
    hide_thinking: bool = False
    stats: bool = True
    plain: bool = False

    @property
    def max_tokens(self) -> int | None:
        return None if self.predict.value is None else int(self.predict.value)
