"""The contract of one-shot answers that scripts rely on."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.main import main
from seqmoe_cli.text.tokenizer import Tokenizer
from tests.chat.models import endless_model
from tests.chat.screen import Program

SEQMOE = [sys.executable, "-m", "seqmoe_cli", "chat"]
KEYS = {
    "text", "token_ids", "prompt_tokens", "prompt_token_ids", "completion_tokens",
    "finish_reason", "hit_rate", "decode_hit_rate", "misses", "fetched_bytes",
    "tokens_per_second", "fallbacks", "thinking", "seed", "num_slots", "device", "dtype",
}  # fmt: skip


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_model(tmp_path_factory.mktemp("endless"))


class Runner:
    """Runs `seqmoe chat` in this process, with a pipe on standard input."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
    ) -> None:
        self.capsys, self.monkeypatch, self.model = capsys, monkeypatch, model

    def __call__(self, *flags: str, stdin: bytes = b"", model: Path | None = None) -> str:
        """The standard output of a run that succeeds."""
        code, out, err = self.run(*flags, stdin=stdin, model=model)
        assert (code, err) == (0, "")
        return out

    def run(
        self, *flags: str, stdin: bytes = b"", model: Path | None = None
    ) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self.monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(["chat", str(model or self.model), *flags])
        return (code, *self.capsys.readouterr())

    def json(self, *flags: str, stdin: bytes = b"", model: Path | None = None) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self("--json", *flags, stdin=stdin, model=model))
        return result


@pytest.fixture
def chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, endless: Path
) -> Runner:
    return Runner(capsys, monkeypatch, endless)


def test_json_says_what_happened(chat: Runner, endless: Path) -> None:
    answer = chat.json("-p", "hi there", "-s", "Be kind.", "-n", "24")
    assert set(answer) >= KEYS
    tokenizer = Tokenizer.open(endless)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi there"},
    ]
    prompt = tokenizer.encode(ChatTemplate.open(endless).render(messages))
    assert answer["prompt_token_ids"] == prompt
    assert answer["prompt_tokens"] == len(prompt)
    assert answer["completion_tokens"] == len(answer["token_ids"]) == 24
    assert answer["finish_reason"] == "length"
    assert tokenizer.decode(answer["token_ids"]).startswith(answer["text"])
    assert answer["text"] and answer["thinking"] == ""
    lookups = answer["hits"] + answer["misses"]
    assert answer["hit_rate"] == pytest.approx(answer["hits"] / lookups)
    assert 0 < answer["hit_rate"] < answer["decode_hit_rate"] <= 1
    assert answer["misses"] > 0 and answer["fetched_bytes"] % answer["misses"] == 0
    # generation_config.json's values, and a seed that repeats the answer
    assert (answer["temperature"], answer["top_k"], answer["top_p"]) == (0.7, 20, 0.8)
    again = chat.json("-p", "hi there", "-s", "Be kind.", "-n", "24", "--seed", str(answer["seed"]))
    assert again["token_ids"] == answer["token_ids"]


def test_stdout_is_the_answer_and_one_newline(chat: Runner) -> None:
    flags = ("-n", "40", "--seed", "3", "--temp", "1", "-p", "hi")
    text = chat.json(*flags)["text"]
    assert chat(*flags) == text.rstrip("\n") + "\n"
    assert "\x1b" in text or "\ufffd" in text  # as the model said it: this one babbles


def test_the_same_text_at_every_pool_size(chat: Runner) -> None:
    flags = ("-n", "30", "--seed", "4", "--temp", "1", "-p", "hi")
    runs = [chat.json(*flags, "--pool", pool) for pool in ("all", "45%", "2slots")]
    assert [run["num_slots"] for run in runs] == [24, 10, 2]
    assert runs[0]["token_ids"] == runs[1]["token_ids"] == runs[2]["token_ids"]
    assert runs[0]["misses"] < runs[1]["misses"] < runs[2]["misses"]


def test_greedy(chat: Runner) -> None:
    runs = [chat("-p", "hi", "-n", "20", "--temp", "0", "--seed", seed) for seed in "12"]
    assert runs[0] == runs[1]


def test_every_eos_id_stops_and_is_no_part_of_the_answer(
    chat: Runner, packed: Callable[..., Path]
) -> None:
    model = packed("qwen3_moe")
    stop_ids = Tokenizer.open(model).stop_ids
    assert len(stop_ids) == 2
    flags = ("-n", "300", "--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    runs = [chat.json(*flags, "-p", "x", "--seed", str(n), model=model) for n in range(4)]
    stopped = [run for run in runs if run["finish_reason"] == "stop"]
    assert stopped
    for run in stopped:
        assert not stop_ids & set(run["token_ids"])
        assert run["completion_tokens"] == len(run["token_ids"]) < 300
    assert not any("<|" in run["text"] for run in runs)


def test_raw_adds_nothing(chat: Runner, endless: Path, tmp_path: Path) -> None:
    text = " Once upon\r\n a <|im_start|>time\n\n"
    file = tmp_path / "f"
    file.write_bytes(text.encode())
    encode = Tokenizer.open(endless).encode
    assert chat.json("--raw", "-n", "2", "-f", str(file))["prompt_token_ids"] == encode(text)
    piped = chat.json("--raw", "-n", "2", stdin=text.encode())
    assert piped["prompt_token_ids"] == encode(text)


def test_where_the_prompt_comes_from(chat: Runner, endless: Path, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("two\n")
    template, encode = ChatTemplate.open(endless), Tokenizer.open(endless).encode

    def expected(text: str) -> list[int]:
        return encode(template.render([{"role": "user", "content": text}]))

    ids = chat.json("-n", "1", "-p", "one", "-f", str(file), stdin=b"three\n")["prompt_token_ids"]
    assert ids == expected("one\n\ntwo\n\nthree")
    assert chat.json("-n", "1", stdin=b"hi\n")["prompt_token_ids"] == expected("hi")
    conversation = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    file.write_text(json.dumps(conversation))
    ids = chat.json("-n", "1", "--messages", str(file))["prompt_token_ids"]
    assert ids == encode(template.render(conversation))


def test_thoughts_are_not_on_stdout(chat: Runner, tmp_path: Path) -> None:
    model = endless_model(tmp_path, "{{ messages[-1].content }}<think>\n")
    answer = chat.json("-p", "hi", "-n", "9", model=model)
    assert answer["text"] == "" and answer["thinking"]
    assert chat("-p", "hi", "-n", "9", model=model) == "\n"
    code, out, err = chat.run("-p", "hi", "--think", "off", model=model)
    assert (code, out) == (1, "") and "--think off" in err


def test_think_off_reaches_the_template(chat: Runner, endless: Path) -> None:
    ids = chat.json("-p", "hi", "-n", "1", "--think", "off")["prompt_token_ids"]
    assert ids[-4:] == Tokenizer.open(endless).encode("<think>\n\n</think>\n\n")[-4:]


def test_stats_go_to_stderr(chat: Runner) -> None:
    code, out, err = chat.run("-p", "hi", "-n", "5", "--stats", "--temp", "0")
    assert code == 0 and out == chat("-p", "hi", "-n", "5", "--temp", "0")
    assert err.startswith("5 tokens, ") and err.endswith("(cold pool)\n") and err.count("\n") == 1


def test_a_prompt_longer_than_the_context(chat: Runner) -> None:
    for flags in (("-p", "long " * 200), ("--raw", "-p", "long " * 200)):
        code, out, err = chat.run(*flags, "-c", "100")
        assert (code, out) == (1, "")
        assert "tokens, the context holds 100\n" in err and "-c" in err


def test_an_interrupted_answer_ends_with_a_newline(endless: Path) -> None:
    argv = [*SEQMOE, str(endless), "-p", "hi", "-c", "30000", "--temp", "0"]
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        begun = process.stdout.read(20)  # it streams into a pipe
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert begun and out.endswith(b"\n") and not out.endswith(b"\n\n")


def test_standard_output_that_fails(endless: Path) -> None:
    argv = [*SEQMOE, str(endless), "-p", "hi", "-c", "30000"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == b"seqmoe: cannot write the output: No space left on device\n"
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(10)
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        error = process.stderr.read()
        assert error.startswith(b"seqmoe: cannot write the output: ") and error.count(b"\n") == 1


def test_one_shot_on_a_terminal(endless: Path) -> None:
    program = Program([*SEQMOE, str(endless), "-p", "hi", "-n", "12", "--temp", "0", "--stats"])
    try:
        assert program.finish(60) == 0
        lines = program.screen.lines
        assert lines[-1].startswith("12 tokens, ")
        assert not any("prompt " in line for line in lines[:-1])  # progress has been taken away
        assert b"prompt " in program.output
    finally:
        program.close()


def test_a_pool_begins_with_what_earlier_answers_used(chat: Runner, seqmoe_home: Path) -> None:
    """The text is the same; --no-profile neither reads nor writes one."""
    flags = ("-p", "hello", "-n", "12", "--seed", "1", "--pool", "12slots", "--json")
    cold = json.loads(chat(*flags, "--no-profile"))
    assert not (seqmoe_home / "profiles").exists() and not cold["warm_start"]
    first = json.loads(chat(*flags))
    assert not first["warm_start"] and first["misses"] == cold["misses"]
    (file,) = (seqmoe_home / "profiles").iterdir()
    warm = json.loads(chat(*flags))
    assert warm["warm_start"] and warm["misses"] < cold["misses"]
    assert warm["text"] == first["text"] == cold["text"]
    file.write_bytes(b"damaged")
    assert not json.loads(chat(*flags))["warm_start"]
