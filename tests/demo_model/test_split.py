"""The split model computes what SmolLM2 computes and reads text as SmolLM2 reads it.

The oracle is transformers, which reads the same GGUF file by its own code.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch

from seqmoe_cli.main import main

transformers = pytest.importorskip("transformers")
Tokenizer = pytest.importorskip("tokenizers").Tokenizer

TEXTS = [
    "Hello world, don't we'll I've: 1234567 is 9.5 % of 13.",
    "  def f(x):\n\treturn x**2  # \u00dcn\u00ef \u2014 \u6f22\u5b57 \U0001f600",
    "\n\n\n   \t a  b   c\u00a0\r\n",
    "<|im_start|>user\nWhat is photosynthesis?<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    pytest.importorskip("gguf")
    from tools.demo_model.source import packaged_gguf

    try:
        return packaged_gguf()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_tokenizer_reads_text_as_transformers_does(gguf_file: Path, demo_checkpoint: Path) -> None:
    oracle = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    ours = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_every_digit_is_its_own_word(demo_checkpoint: Path) -> None:
    # transformers leaves this part of SmolLM's rules out when it reads a GGUF file
    ours = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))
    words = ours.pre_tokenizer.pre_tokenize_str("a 12\u00bd")
    assert [span for _, span in words] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def test_split_model_computes_what_the_dense_one_does(
    gguf_file: Path, demo_checkpoint: Path
) -> None:
    def load(folder: Path, **options: str) -> torch.nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **options
        )

    tokenizer = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))
    dense = load(gguf_file.parent, gguf_file=gguf_file.name)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.copy_(parameter.bfloat16())
        ids = torch.tensor([tokenizer.encode(" ".join(TEXTS)).ids])
        expected = dense(ids).logits
        actual = load(demo_checkpoint)(ids).logits
    assert expected.std() > 1
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)


def test_variable_names_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    from tools.demo_model.source import VARIABLE, packaged_gguf

    named = tmp_path / "somewhere.gguf"
    monkeypatch.setenv(VARIABLE, str(named))
    with pytest.raises(FileNotFoundError, match=re.escape(f"{VARIABLE}={named}")):
        packaged_gguf()
    named.touch()
    assert packaged_gguf() == named


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What is photosynthesis?", {"plants", "light", "energy"}),
        ("What is the capital of France?", {"Paris"}),
    ],
)
def test_converted_model_answers(
    question: str,
    words: set[str],
    demo_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    command = ["chat", str(demo_model), "-p", question, "--temp", "0", "-n", "24"]
    assert main([*command, "--device", "cpu", "--pool", "50%"]) == 0
    answer = capsys.readouterr().out
    assert answer.endswith("\n")
    assert "\n" not in answer[:-1]
    assert words <= set(re.findall(r"\w+", answer))
