"""Rendering against transformers, and what happens to templates that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from seqmoe_cli.chat.template import ChatTemplate, opens_thinking
from seqmoe_cli.errors import CheckpointError, PromptError
from tests.checkpoints import CHAT_TEMPLATE

# In the manner of the templates of thinking models, with the features that those use.
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- if tools is not none %}{{ raise_exception('no tools here') }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{{ bos_token }}{{ unk_token }}
{% for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- generation %}{{ '[A]' + content + eos_token }}{% endgeneration %}
    {%- elif message.role == 'system' and not loop.first %}
        {%- continue %}
    {%- else %}
        {{- '[' + message.role[0]|upper + ']' + message.content|trim + '\\n' }}
    {%- endif %}
    {%- if loop.index0 > 90 %}{% break %}{% endif %}
{% endfor %}
{{ {'a': '<é>', 'b': [1, none]} | tojson }}{{ [1] | tojson(indent=2) }}
{%- if add_generation_prompt %}
    {{- '[A]' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
USER = {"role": "user", "content": "  Is 1 < 2? {{ 7 }} <|im_end|> 😀\n"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>hm</think>\n\nhello"},
    USER,
]


def _folder(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("think", ["auto", "on", "off"])
@pytest.mark.parametrize("messages", [[USER], CONVERSATION])
@pytest.mark.parametrize("source", [CHAT_TEMPLATE, THINKING])
def test_same_text_as_transformers(
    endless: Path, tmp_path: Path, source: str, messages: list[dict[str, str]], think: str
) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(endless / "tokenizer.json"), chat_template=source, **tokens
    )
    options = {} if think == "auto" else {"enable_thinking": think == "on"}
    expected = reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    folder = _folder(
        tmp_path,
        chat_template=source,
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        unk_token=None,
    )
    assert ChatTemplate.open(folder).render(messages, think) == expected


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert ChatTemplate.open(_folder(tmp_path / "named", chat_template=named)).render([]) == "D"
    both = _folder(tmp_path / "both", chat_template="old")
    (both / "chat_template.jinja").write_text("new {{ messages | length }}\n", "utf-8")
    assert ChatTemplate.open(both).render([USER]) == "new 1"


def test_no_template_is_not_guessed(tmp_path: Path) -> None:
    for folder in (_folder(tmp_path / "a", eos_token="x"), tmp_path / "b"):
        with pytest.raises(PromptError, match="has no chat template") as caught:
            ChatTemplate.open(folder)
        assert "--raw" in caught.value.hint


@pytest.mark.parametrize(
    "value", [5, {"default": "x"}, [], [{"name": "rag", "template": "x"}], ["x"]]
)
def test_template_of_another_type(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        ChatTemplate.open(_folder(tmp_path, chat_template=value))


def test_malformed_template_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    path = folder / "chat_template.jinja"
    path.write_text("line\n{% for m in messages %}\n{{ m }", "utf-8")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja.*line 3"):
        ChatTemplate.open(folder)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.open(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read"):
        ChatTemplate.open(folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ 1 + 'x' }}", "unsupported operand"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
        ("{% for x in range(999999999) %}{% endfor %}", "[Rr]ange"),
    ],
)
def test_a_template_that_fails(source: str, message: str) -> None:
    template = ChatTemplate(source, "some/chat_template.jinja", {})
    with pytest.raises(PromptError, match=message) as caught:
        template.render([USER])
    assert "some/chat_template.jinja" in caught.value.hint


def test_strftime_now() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}", "x", {}).render([])
    assert len(year) == 4 and year.isdecimal()


@pytest.mark.parametrize(
    ("ending", "possible"), [("", ("auto", "off")), ("<think>\n", ("auto", "on"))]
)
def test_thinking_without_a_switch(ending: str, possible: tuple[str, ...]) -> None:
    template = ChatTemplate("{{ messages[0].content }}" + ending, "x", {})
    for think in ("auto", "on", "off"):
        if think in possible:
            assert opens_thinking(template.render([USER], think)) == bool(ending)
        else:
            with pytest.raises(PromptError, match=f"--think {think}"):
                template.render([USER], think)
