"""A tokenizer for synthetic checkpoints, so that a server can be asked in text. Standard library only.

Every byte of UTF-8 is one token, in the byte-level alphabet that the ``tokenizers`` library decodes; there are no
merges. The rest of the vocabulary is named after its ids, so that any id that a random model produces can be printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qualify.errors import Rejected

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def documents(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return file name -> content of ``tokenizer.json`` and ``tokenizer_config.json``.

    Raises ``Rejected`` when the vocabulary of ``config`` has no room for the bytes.
    """
    begin, end, size = config["bos_token_id"], config["eos_token_id"], config["vocab_size"]
    special = {begin: "<|begin|>", end: "<|end|>"}
    if len(special) != 2 or not all(isinstance(token, int) and 0 <= token < size for token in special) or size < 258:
        raise Rejected(f"config.json: bos {begin!r}, eos {end!r} and 256 bytes do not fit vocab_size {size}")
    free = [token for token in range(size) if token not in special]
    vocabulary = {name: token for token, name in special.items()}
    vocabulary.update(zip(_byte_alphabet(), free, strict=False))
    vocabulary.update((f"<|synthetic-{token}|>", token) for token in free[256:])
    added = [
        {"id": token, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token, name in sorted(special.items())
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": special[begin],
            "eos_token": special[end],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte: itself where Latin-1 prints it, otherwise the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]
