"""Turns and slash commands on a real engine."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path

import pytest

from seqmoe_cli.chat.chat import Chat
from seqmoe_cli.chat.session import ChatOptions, Exchange, Session
from seqmoe_cli.chat.slash import COMMANDS, run_command
from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.forecast.predictor import Predictor, PredictorShape
from seqmoe_cli.forecast.stored import StoredPredictor
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.settings import EngineOptions, PoolSize
from seqmoe_cli.terminal.console import make_console, printable
from seqmoe_cli.text.sampling import SamplingSettings, Setting, Value
from seqmoe_cli.text.tokenizer import Tokenizer
from tests.chat.screen import Screen, terminal_console


class Talk:
    """A chat whose console is read back."""

    def __init__(
        self, engine: Engine, session: Session, predict: int | None = 12, **flags: Value
    ) -> None:
        engine.reset_kv()
        self.out = io.StringIO()
        sampling = SamplingSettings({"temp": 0.0} | flags, {})
        options = ChatOptions(Setting(predict, "flag"))
        self.chat = Chat("tiny", make_console(self.out), engine, session, sampling, options)

    def shown(self, n: int = -1) -> str:
        """An answer as a terminal shows it."""
        return printable(self.answers[n])

    def read(self) -> str:
        """What was printed since the last call."""
        text = self.out.getvalue()
        self.out.seek(0)
        self.out.truncate()
        return text

    def ask(self, text: str) -> str:
        self.chat.ask(text)
        return self.read()

    def run(self, line: str) -> str:
        run_command(self.chat, line)
        return self.read()

    def stop_after(self, polls: int) -> None:
        """Press Ctrl-C at the given poll of the next answer."""
        counter = itertools.count()
        self.chat.interrupted = lambda: next(counter) >= polls

    def undisturbed(self) -> None:
        self.chat.interrupted = lambda: False

    @property
    def answers(self) -> list[str]:
        return [e.answer for e in self.chat.session.exchanges]


@pytest.fixture
def session(template: ChatTemplate, tokenizer: Tokenizer) -> Session:
    return Session(template, tokenizer, 256)


@pytest.fixture
def talk(engine: Engine, session: Session) -> Talk:
    return Talk(engine, session)


def test_answers_and_the_lines_after_them(talk: Talk) -> None:
    first = talk.ask("hi")
    assert first.startswith(talk.shown(0) + "\n[stopped at -n 12]\n12 tokens, ")
    assert first.endswith(" (cold pool)\n")
    second = talk.ask("more")
    assert second.startswith(talk.shown(1)) and "cold" not in second
    assert "\x1b" not in first + second
    reused = talk.chat.turns[1]
    assert 0 < reused.prefill.num_tokens < reused.prompt_tokens  # the first turn is in the KV state
    assert talk.chat.session.num_ctx == reused.prompt_tokens + 12


def test_no_stats(talk: Talk) -> None:
    talk.chat.options.stats = False
    assert talk.ask("hi") == talk.shown(0) + "\n[stopped at -n 12]\n"


def test_a_stopped_answer_stays_and_the_next_equals_a_fresh_run(
    talk: Talk, engine: Engine, session: Session
) -> None:
    talk.ask("one")
    talk.stop_after(8)
    shown = talk.ask("two")
    kept = session.exchanges[-1]
    assert kept.stopped and kept.answer and shown.startswith(f"{talk.shown()}\n[stopped]\n")
    assert not session.exchanges[0].stopped
    talk.undisturbed()
    talk.ask("three")
    fresh = Talk(engine, Session(session.template, session.tokenizer, 256))
    fresh.chat.session.exchanges = session.exchanges[:2]
    fresh.ask("three")
    assert fresh.answers[-1] == talk.answers[-1] != ""


def test_a_message_stopped_before_its_answer_is_taken_back(talk: Talk) -> None:
    talk.stop_after(0)
    assert "stopped before the answer began" in talk.ask("hi")
    assert talk.answers == []
    talk.undisturbed()
    talk.ask("hi")
    before = talk.answers
    talk.stop_after(0)
    talk.run("/regen")
    assert talk.answers == before


def test_regen_and_undo(engine: Engine, session: Session) -> None:
    talk = Talk(engine, session, temp=1.0, seed=5)
    talk.ask("one")
    first = talk.answers[0]
    talk.run("/regen")
    assert len(talk.answers) == 1 and talk.answers[0] != first
    again = Talk(engine, Session(session.template, session.tokenizer, 256), temp=1.0, seed=5)
    again.ask("one")
    assert again.answers == [first]  # the same seed in a new chat
    talk.ask("x" * 70 + "\nsecond line")
    assert talk.run("/undo") == f"took back: {'x' * 60}...\n"
    assert len(talk.answers) == 1
    talk.run("/undo")
    assert talk.run("/undo") == "nothing to undo\n"
    assert talk.run("/regen") == "nothing to answer again\n"


def test_a_full_context_drops_the_oldest_and_goes_on(talk: Talk) -> None:
    talk.chat.session.system = "Be kind."
    notices = []
    for n in range(6):
        notices += re.findall(
            r"dropped (\d+) earlier exchanges? \(([\d,]+) tokens\)", talk.ask(f"question {n} " * 4)
        )
    assert notices and all(int(count) >= 1 and int(tokens) > 20 for count, tokens in notices)
    assert talk.chat.session.exchanges[-1].user.startswith("question 5")
    assert len(talk.answers) == 6 - sum(int(count) for count, _ in notices)
    held = talk.chat.session.tokenizer.backend.decode(
        talk.chat.engine.token_ids, skip_special_tokens=False
    )
    assert held.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nquestion")


def test_an_answer_that_fills_the_context(engine: Engine, session: Session) -> None:
    talk = Talk(engine, session, predict=None)
    assert "[stopped at -c 256]" in talk.ask("hi " * 60)
    assert talk.chat.session.num_ctx == 257  # the last token needs no KV state
    assert "dropped 1 earlier exchange (" in talk.ask("and?")


def test_a_message_that_is_too_long(talk: Talk) -> None:
    talk.ask("hi")
    shown = talk.ask("long " * 300)
    assert "tokens, the context holds 256\n  shorten it, or raise -c" in shown
    assert len(talk.answers) == 1


def test_a_template_that_refuses(engine: Engine, tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('no, never') }}", "here", {})
    talk = Talk(engine, Session(template, tokenizer, 256))
    assert "no, never" in talk.ask("hi") and talk.answers == []


def test_thoughts_are_shown_but_not_part_of_the_answer(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    template = ChatTemplate("{{ messages[-1].content }}<think>\n", "here", {})
    for hide in (False, True):
        talk = Talk(engine, Session(template, tokenizer, 256))
        talk.chat.options.hide_thinking = hide
        shown = talk.ask("hi")
        exchange = talk.chat.session.exchanges[0]
        assert exchange.answer == "" and exchange.thought
        assert (printable(exchange.thought) in shown) is not hide


def test_status_line_during_an_answer(engine: Engine, session: Session) -> None:
    talk = Talk(engine, session)
    screen = Screen()
    seen: set[str] = set()

    def look() -> None:
        seen.update(line for line in screen.display if " | " in line or line.startswith("prompt"))

    talk.chat.console = terminal_console(screen, look)
    talk.chat.ask("hi")
    fields = ["prompt", "ctx", "tok/s", "hit", "miss", "fetch", "pool"]
    assert all(any(field in line for line in seen) for field in fields)
    assert any(re.match(r"ctx \d+/256 \| [\d.]+ tok/s \| hit [\d.]+% \| miss", s) for s in seen)
    assert not any("ctx" in line for line in screen.lines)


def test_help_names_every_command(talk: Talk) -> None:
    shown = talk.run("/help")
    for command in COMMANDS:
        assert all(name in shown for name in command.names) and command.help in shown


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/foo", "no command /foo; see /help\n"),
        ("/udno", "no command /udno, did you mean /undo?\n"),
        ("/exiting", "no command /exiting, did you mean /exit?\n"),
        ("/clearly not", "no command /clearly, did you mean /clear?\n"),
        ("/", "no command /; see /help\n"),
        ("/undo x", "/undo takes no argument\n"),
        ("/exit now", "/exit takes no argument\n"),
    ],
)
def test_mistakes_change_nothing(talk: Talk, line: str, expected: str) -> None:
    talk.chat.session.exchanges.append(Exchange("a", "b"))
    assert talk.run(line) == expected
    assert not talk.chat.leaving and talk.answers == ["b"]


@pytest.mark.parametrize("line", ["/exit", "/bye", "/quit", "/exit  "])
def test_leaving(talk: Talk, line: str) -> None:
    assert talk.run(line) == "" and talk.chat.leaving


def test_system_and_clear(talk: Talk) -> None:
    assert talk.run("/system") == "system prompt: none\n"
    talk.run("/system Be  kind.\nAlways.")
    assert talk.chat.session.system == "Be  kind.\nAlways."
    talk.run("/set system Be brief.")
    talk.ask("hi")
    assert talk.run("/clear") == "forgot the conversation, kept the system prompt\n"
    assert (talk.answers, talk.chat.session.system) == ([], "Be brief.")
    assert talk.run('/system ""') == "system prompt: none\n"
    assert talk.run("/clear") == "forgot the conversation\n"


def test_set_and_show(talk: Talk) -> None:
    assert talk.run("/set temp 0.5") == "temp 0.5\n"
    assert talk.run("/set --top-k 7") == "top-k 7\n"
    assert talk.run("/set n 3") == "predict 3\n"
    shown = {line.split()[0]: line.split()[1:] for line in talk.run("/show").splitlines()}
    assert shown["temp"] == ["0.5", "/set"] and shown["top-k"] == ["7", "/set"]
    assert shown["predict"] == ["3", "/set"] and shown["min-p"] == ["0.05", "default"]
    assert shown["model"] == ["tiny"] and shown["context"] == ["256", "tokens"]
    assert shown["pool"][:2] == ["12", "slots,"] and shown["device"] == ["cpu,", "float32"]
    talk.ask("hi")
    assert talk.chat.turns[-1].completion_tokens == 3
    assert talk.run("/set predict none") == "predict none\n"
    for bad in ("temp", "warmth 1", "", "temp hot", "n 0", "n 1.5", "predict -1", "seed -1"):
        assert re.search(r"/set.*\n  ", talk.run(f"/set {bad}")), bad
    assert talk.chat.sampling.params.temperature == 0.5


def test_think(talk: Talk, session: Session) -> None:
    assert talk.run("/think") == "think: auto\n"
    assert talk.run("/think off") == "think: off\n"
    assert session.think == "off"
    assert "use auto, on or off" in talk.run("/think perhaps")
    assert session.think == "off"


def test_stats(talk: Talk) -> None:
    assert talk.run("/stats") == "no answer yet\n"
    talk.ask("hi")
    talk.ask("more")
    rows = {line[:14].strip(): line[14:].split() for line in talk.run("/stats").splitlines()}
    assert rows[""] == ["last", "all"]
    assert rows["answer"] == ["12", "tok", "24", "tok"]
    assert set(rows) >= {"prompt", "tok/s", "prompt tok/s", "hit", "miss/tok", "fetched", "fetch"}


def test_prefetch_is_in_stats_and_settings(talk: Talk, endless: Path, session: Session) -> None:
    """And the answer is the same as without."""
    assert re.search(r"^prefetch +off *$", talk.run("/show"), re.M)
    talk.ask("hi")
    options = EngineOptions(PoolSize.parse("12slots"), ctx_size=256, prefetch="lookahead")
    engine = Engine.open(endless, options)
    ahead = Talk(engine, Session(session.template, session.tokenizer, 256))
    ahead.ask("hi")
    assert ahead.answers == talk.answers
    for _ in range(9):  # on a busy machine the thread may come too late for a whole answer
        rows = {line[:14].strip(): line[14:].split() for line in ahead.run("/stats").splitlines()}
        if float(rows["prefetched"][0]) > 0:
            break
        ahead.run("/clear")
        ahead.ask("hi")
    assert rows["prefetched"][1::2] == ["MiB", "MiB"] and float(rows["prefetched"][0]) > 0
    assert rows["prefetch hits"][0].isdecimal() and rows["prefetch off"] == ["0", "tok"] * 2
    assert re.search(r"^prefetch +lookahead *$", ahead.run("/show"), re.M)
    assert engine.prefetch is not None
    while not engine.prefetch.switch.rests:
        costs = StepStats("decode", 1, misses=9, prefetches=8, stall_s=1.0, step_s=1.0)
        engine.prefetch.switch.observe(costs)
    ahead.ask("more")
    said = ahead.run("/stats")
    rows = {line[:14].strip(): line[14:].split() for line in said.splitlines()}
    assert 0 < int(rows["prefetch off"][0]) == int(rows["prefetch off"][2])
    assert re.search(r"^prefetch (saved|cost) [\d.]+% of a step .* (copies a|of) use$", said, re.M)
    assert "lookahead, resting: it did not pay" in ahead.run("/show")
    engine.prefetch.thread.died = "gone"
    assert "lookahead, stopped" in ahead.run("/show")
    engine.close()


def test_trust_in_the_predictor_is_in_stats(
    talk: Talk, endless: Path, session: Session, tmp_path: Path
) -> None:
    config = talk.chat.engine.config
    sizes = (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
    shape = PredictorShape(*sizes, config.vocab_size, token_rank=4, width=16)
    StoredPredictor(Predictor(shape), {}).save(tmp_path / "predictor")
    talk.ask("hi")
    assert "trusted" not in talk.run("/stats")
    options = EngineOptions(
        PoolSize.parse("12slots"), ctx_size=256, policy="forecast", predictor=tmp_path / "predictor"
    )
    engine = Engine.open(endless, options)
    foreseeing = Talk(engine, Session(session.template, session.tokenizer, 256))
    foreseeing.ask("hi")
    assert foreseeing.answers == talk.answers
    assert re.search(r"^policy +forecast *$", foreseeing.run("/show"), re.M)
    line = foreseeing.run("/stats").splitlines()[-1]
    shares = re.fullmatch(r"the predictor is trusted (.*)% for the steps 1/2/3-4/5-8 ahead", line)
    assert shares and all(0 <= int(share) <= 100 for share in shares[1].split("%/"))
    assert engine.eviction is not None
    while not engine.eviction.switch.rests:
        missed = {"misses": 9, "missed_by_forecast": 9, "missed_by_counts": 8}
        engine.eviction.switch.observe(StepStats("decode", 1, stall_s=1.0, step_s=1.0, **missed))
    foreseeing.ask("more")
    said = foreseeing.run("/stats")
    rows = {line[:14].strip(): line[14:].split() for line in said.splitlines()}
    assert 0 < int(rows["forecast off"][0]) == int(rows["forecast off"][2])
    assert rows["misses saved"][-1].endswith("/tok")
    assert re.search(r"^the forecast cost [\d.]+ misses .* it cost [\d.]+% of it$", said, re.M)
    assert "forecast, resting: it did not pay" in foreseeing.run("/show")
    engine.close()
