"""ChatTemplate: renders a conversation with the Jinja template that the checkpoint brought along.

The environment is the one that such templates are written for (Hugging Face's), sandboxed, since a
template is code from a stranger. Nothing is guessed: no template, no chat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from seqmoe_cli.errors import CheckpointError, PromptError
from seqmoe_cli.text.files import COPY_HINT, read_checkpoint_file, read_json_object

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
THINK_CHOICES = ("auto", "on", "off")
_TEMPLATE_FILE, _CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplate:
    """A compiled template. `where` names its file in messages; `special_tokens` are passed to it
    by name (bos_token, eos_token, ...)."""

    def __init__(self, source: str, where: str, special_tokens: Mapping[str, str]) -> None:
        self.where = where
        self._special_tokens = dict(special_tokens)
        self._thinking_switch = "enable_thinking" in source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{where}: the chat template is malformed at line {error.lineno}: {error.message}",
                COPY_HINT,
            ) from error

    @classmethod
    def open(cls, folder: Path) -> ChatTemplate:
        """The template of a model folder: chat_template.jinja, else tokenizer_config.json's.

        Raises `PromptError` when there is none, `CheckpointError` for a malformed one.
        """
        config = read_json_object(folder / _CONFIG_FILE)
        path = folder / _TEMPLATE_FILE
        if path.is_file():
            source, where = read_checkpoint_file(path), str(path)
        else:
            source, where = _template_of(config, folder), str(folder / _CONFIG_FILE)
        return cls(source, where, _special_tokens(config))

    def render(self, messages: Sequence[Mapping[str, str]], think: str = "auto") -> str:
        """The text that asks for the next answer; messages have the keys role and content.

        `think` is auto (the template's own choice), on or off. Raises `PromptError` when the
        template refuses the conversation or cannot do what `think` asks.
        """
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        if think != "auto":
            variables["enable_thinking"] = think == "on"
        try:
            text = self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, **variables
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise PromptError(
                f"the chat template refuses this conversation: {error}",
                f"it is in {self.where}; --raw sends a text without it",
            ) from error
        if not self._thinking_switch and think == ("off" if opens_thinking(text) else "on"):
            raise PromptError(
                f"--think {think}: the model's chat template has no switch for thinking",
                "use --think auto",
            )
        return text


def opens_thinking(rendered: str) -> bool:
    """True when the answer starts inside a thought, as the prompt ends with an open tag."""
    return rendered.rstrip().endswith(OPEN_TAG)


def _template_of(config: Mapping[str, Any], folder: Path) -> str:
    """The template in tokenizer_config.json: a string, or a list of named ones."""
    value = config.get("chat_template")
    if value is None:
        raise PromptError(
            f"{folder} has no chat template, so it is no chat model",
            "use --raw to continue a text without one",
        )
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    if not isinstance(value, str):
        raise CheckpointError(
            f"{folder / _CONFIG_FILE}: chat_template holds no text and no default template",
            COPY_HINT,
        )
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Token texts by name; the file holds them as a string or as an object with `content`."""
    tokens = {}
    for name in _TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's words for training; here it is
    its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON; jinja2's own filter would escape it for HTML."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
