from __future__ import annotations

from dataclasses import replace

import pytest

from seqmoe_cli.chat.session import Exchange, Session, check_length, check_vocabulary
from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.errors import PackedModelError, PromptError
from seqmoe_cli.text.tokenizer import Tokenizer


@pytest.fixture
def session(template: ChatTemplate, tokenizer: Tokenizer) -> Session:
    return Session(template, tokenizer, ctx_size=256, system="Be kind.")


def _text(session: Session, ids: list[int]) -> str:
    return session.tokenizer.backend.decode(ids, skip_special_tokens=False)


def test_prompt_renders_the_conversation_without_thoughts(session: Session) -> None:
    session.exchanges.append(Exchange("hi", "hello", thought="they greet me"))
    assert _text(session, session.prompt("bye", 1).ids) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    )
    session.exchanges.clear()
    session.system = ""
    assert _text(session, session.prompt("x", 1).ids) == (
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )


def test_think_reaches_the_template(session: Session) -> None:
    session.set_think("off")
    prompt = session.prompt("x", 1)
    assert _text(session, prompt.ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert not prompt.in_thought
    tokenizer = session.tokenizer
    fixed = Session(ChatTemplate("{{ messages[0].content }}<think>\n", "x", {}), tokenizer, 256)
    assert fixed.prompt("x", 1).in_thought
    with pytest.raises(PromptError, match="--think off"):
        fixed.set_think("off")
    assert fixed.think == "auto"


def test_oldest_exchanges_are_dropped_whole(session: Session) -> None:
    for n in range(8):
        session.exchanges.append(Exchange(f"question {n}", f"answer {n}", num_ctx=100))
    roomy = replace(session, ctx_size=4096, exchanges=session.exchanges[:])
    whole = len(roomy.prompt("now", 64).ids)
    assert len(roomy.exchanges) == 8
    prompt = session.prompt("now", 64)
    text = _text(session, prompt.ids)
    assert prompt.num_dropped > 0
    assert prompt.dropped_tokens == whole - len(prompt.ids)
    assert len(prompt.ids) + 64 <= 256
    assert [e.user for e in session.exchanges] == [
        f"question {n}" for n in range(prompt.num_dropped, 8)
    ]
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nquestion")
    assert f"answer {prompt.num_dropped - 1}" not in text
    # One more exchange would not have fitted.
    per_exchange = prompt.dropped_tokens // prompt.num_dropped
    assert len(prompt.ids) + per_exchange + 64 > 256


def test_a_message_that_never_fits_changes_nothing(session: Session) -> None:
    session.exchanges.append(Exchange("question", "answer"))
    with pytest.raises(PromptError, match=r"the prompt has \d+ tokens, the context holds 256"):
        session.prompt("long " * 300, 64)
    assert len(session.exchanges) == 1


def test_the_last_message_may_use_the_room_of_the_answer(session: Session) -> None:
    session.exchanges.append(Exchange("question", "answer"))
    prompt = session.prompt("ab" * 80, 250)
    assert prompt.num_dropped == 1 and session.exchanges == []


def test_undo_and_clear(session: Session) -> None:
    assert session.undo() is None and session.num_ctx == 0
    session.exchanges.append(Exchange("a", "b", num_ctx=40))
    session.exchanges.append(Exchange("c", "d", num_ctx=80))
    last = session.undo()
    assert last is not None and last.user == "c" and session.num_ctx == 40
    session.exchanges.clear()
    assert session.exchanges == [] and session.system == "Be kind."


def test_limits() -> None:
    check_length([1] * 7, 8)
    with pytest.raises(PromptError, match="8 tokens, the context holds 8") as caught:
        check_length([1] * 8, 8)
    assert "-c" in caught.value.hint
    check_vocabulary([0, 319], 320)
    with pytest.raises(PackedModelError, match=r"tokenizer\.json gives the token id 320"):
        check_vocabulary([0, 320], 320)
