"""A tokenizer of words, `w0` to `w199` unless told otherwise, with a chat template."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(folder: Path, *, words: int = 200, template: str | None = TEMPLATE) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<eos>", "<end>", "<user>", "<assistant>", "<system>", "<unknown>"]
    vocabulary = {word: number for number, word in enumerate([*special, *(f"w{i}" for i in range(words))])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", chat_template=template)
    fast.save_pretrained(folder)
    return folder
