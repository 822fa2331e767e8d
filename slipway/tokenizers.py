"""A model's tokenizer, fit for training: a pad token that is not the end token, and a chat template."""

import re
from pathlib import Path
from typing import Any

from slipway.errors import InputError
from slipway.weights import LFS_POINTER, listing

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)
# Tokens that a vocabulary keeps free: a pad token that nobody named, then llama-3's and gemma's spare ones.
SPARE = (
    r"<pad>|\[PAD\]|<\|pad\|>|<\|finetune_right_pad(_id)?\|>",
    r"<\|reserved_special_token_\d+\|>|<unused\d+>",
)

# Plain text, no new tokens. Contents are trimmed: a line break at their border could merge with the marker's
# own. The generation marks tell transformers which tokens the assistant wrote.
PLAIN_TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '### Response:\\n' -}}
{%- generation -%}{{- message['content'] | trim + eos_token -}}{%- endgeneration -%}
{{- '\\n\\n' -}}
{%- elif message['role'] == 'system' -%}
{{- message['content'] | trim + '\\n\\n' -}}
{%- else -%}
{{- '### Instruction:\\n' + message['content'] | trim + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### Response:\\n' -}}{%- endif -%}"""


def load_tokenizer(model: Any, *, token: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of `model` (from resolve), padding on the right.

    Where the pad token is missing or the end token (which would never be learned, as padding is masked),
    another one is named: unk, else a spare token of the vocabulary, else a new `<pad>` (load() then resizes
    the embeddings). A base model without a chat template gets a plain-text one. Both are said in
    `model.notes`. Raises InputError where there is no tokenizer, it has no end token, or its ids lie outside
    the model's vocabulary.
    """
    source = _source(model)
    tokenizer = _open(model, source, token, trust_remote_code)
    rows = model.config.get_text_config().vocab_size
    if last_id(tokenizer) >= rows:
        raise InputError(
            f"MODEL={model.name}: its tokenizer has token ids up to {last_id(tokenizer)}, "
            f"the model's vocabulary ends at {rows - 1}",
            "use the model's own tokenizer, or resize the model's embeddings and save it again",
        )
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"MODEL={model.name}: its tokenizer names no end token (eos_token): it could never learn to stop",
            "name one in tokenizer_config.json",
        )
    tokenizer.padding_side = "right"
    _name_pad_token(tokenizer, model.notes)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = plain_template(tokenizer)
        model.notes.append("no chat template in this base model: chats are written as ### Instruction / ### Response")
    return tokenizer


def last_id(tokenizer: Any) -> int:
    """The highest token id, which may lie beyond len(tokenizer) - 1 where ids have gaps."""
    return max(tokenizer.get_vocab().values())


def _source(model: Any) -> str:
    """Where the tokenizer lies: an adapter without one uses its base's."""
    if model.kind == "adapter" and not any((Path(model.path) / name).is_file() for name in FILES):
        return _source(model.base)
    return model.path


def _open(model: Any, source: str, token: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir():
        there = [folder / name for name in FILES if (folder / name).is_file()]
        if not there:
            raise InputError(
                f"{folder} holds no tokenizer ({', '.join(FILES[:2])}); found: {listing(folder)}",
                "copy the tokenizer's files of the model it came from beside its weights",
            )
        for file in there:
            with file.open("rb") as opened:
                if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                    raise InputError(f"{file} is a git-lfs pointer", "run `git lfs pull` in that clone")
    revision = None if folder.is_dir() else model.revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, token=token, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain Exception for a file that it cannot parse
        raise InputError(
            f"MODEL={model.name}: its tokenizer cannot be loaded: {str(error)[:300]}",
            "look at tokenizer.json and tokenizer_config.json there, or copy them again",
        ) from error
    if not tokenizer("hello world").input_ids:
        raise InputError(f"MODEL={model.name}: its tokenizer makes no token of a text", "copy its files again")
    return tokenizer


def _name_pad_token(tokenizer: Any, notes: list[str]) -> None:
    had, ends = tokenizer.pad_token, {tokenizer.eos_token, tokenizer.bos_token}
    if had is not None and had != tokenizer.eos_token:
        return
    why = "the tokenizer has none" if had is None else f"its own, {had}, is the end token"
    if tokenizer.unk_token is not None and tokenizer.unk_token not in ends:
        tokenizer.pad_token = tokenizer.unk_token
    elif spare := _spare(tokenizer):
        tokenizer.pad_token = spare
    else:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    notes.append(f"pad token: {tokenizer.pad_token} (id {tokenizer.pad_token_id}); {why}")


def _spare(tokenizer: Any) -> str | None:
    """A token of the vocabulary that no text or chat template uses, or None."""
    template = str(tokenizer.chat_template or "")
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    for pattern in SPARE:
        for word, _ in by_id:
            if re.fullmatch(pattern, word) and word not in template and word != tokenizer.eos_token:
                return word
    return None


def plain_template(tokenizer: Any) -> str:
    """Our chat template for a tokenizer; it starts with bos if this tokenizer puts one before texts."""
    first = tokenizer("x").input_ids[0]
    starts = tokenizer.bos_token_id is not None and first == tokenizer.bos_token_id
    return ("{{- bos_token -}}" if starts else "") + PLAIN_TEMPLATE


def end_of_turn(tokenizer: Any) -> list[int]:
    """Ids of the tokens that end an answer: eos, and the special token that the template writes behind it."""
    ends = [tokenizer.eos_token_id]
    if tokenizer.chat_template is not None:
        mark = "a1b2c3"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}], tokenize=False
        )
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        behind = tokenizer(text.rpartition(mark)[2], add_special_tokens=False).input_ids
        ends += [number for number in behind[:1] if number in special]
    return sorted({number for number in ends if number is not None})
