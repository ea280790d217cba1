"""tokenizer.json and tokenizer_config.json out of the tokenizer fields of a GGUF file."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL = 3  # GGUF's token type of special tokens


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE of GPT-2 with every digit on its own, which GGUF calls `smollm`."""
    if (fields["ggml.model"], fields["ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {fields['ggml.model']}/{fields['ggml.pre']} is not SmolLM's")
    tokens = fields["ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def tokenizer_config(fields: dict[str, Any], max_length: int) -> dict[str, Any]:
    """What stands beside tokenizer.json: the names of the special tokens and the chat template."""
    tokens = fields["ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": fields["ggml.add_bos_token"],
        "bos_token": tokens[fields["ggml.bos_token_id"]],
        "eos_token": tokens[fields["ggml.eos_token_id"]],
        "pad_token": tokens[fields["ggml.padding_token_id"]],
        "unk_token": tokens[fields["ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": fields["chat_template"],
    }
