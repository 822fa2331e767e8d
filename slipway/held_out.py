"""Which rows are held out: always the same ones, and never a row that is also trained on."""

from collections import Counter
from typing import Any

from slipway.labels import IGNORE
from slipway.pack import Encoded
from slipway.shapes import Example

PROMPTS = 3
CANDIDATES = 16  # rows with the smallest keys, kept for prompts until it is known which are held out
FEWEST_ROWS = 10  # a tenth of the rows is held out at most, so below this number one
_TEXT_TOKENS, _REFERENCE_TOKENS = 32, 64


def divide(encoded: Encoded, asked: int) -> tuple[list[int], list[int]]:
    """(held-out places, training places) of the sequences: `asked` rows held out, a tenth of all at most.

    The rows with the smallest keys are held out, so that added rows or another order move few of them.
    Equal rows, and the pieces of one text, are on the same side. Of fewer than ten texts it is pieces.
    """
    if len(set(encoded.keys)) < FEWEST_ROWS and not all(encoded.starts):
        encoded.make_pieces_rows()
    places = range(len(encoded))
    sizes = Counter()
    for key, start in zip(encoded.keys, encoded.starts, strict=True):
        sizes[key] += start
    left = min(asked, max(1, sizes.total() // FEWEST_ROWS))
    chosen = set()
    for key in sorted(sizes)[:-1]:  # the last is left to train on
        if sizes[key] <= left:
            chosen.add(key)
            left -= sizes[key]
    held = [place for place in places if encoded.keys[place] in chosen]
    return held, [place for place in places if encoded.keys[place] not in chosen]


def remember(candidates: list[Example], batch: list[Example], usable: set[int]) -> None:
    """Keeps in `candidates` the usable examples with the smallest keys, each key once."""
    known = {one.key for one in candidates}
    for one in batch:
        if one.key in usable and one.key not in known:
            known.add(one.key)
            candidates.append(one)
    candidates.sort(key=lambda one: one.key)
    del candidates[CANDIDATES:]


def without(train: Encoded, other: Encoded) -> list[int]:
    """The places of `train` whose tokens are not in `other`."""
    taken = set(other.own_keys)
    return [place for place, key in enumerate(train.own_keys) if key not in taken]


def prompts(encoded: Encoded, chosen: list[int], candidates: list[Example], tokenizer: Any) -> list[dict]:
    """Up to three held-out prompts with their answers: as messages, as text, or the start of a text."""
    inside = {encoded.keys[place] for place in chosen}
    asked = [_question(one.content) for one in candidates if one.key in inside]
    asked = [one for one in asked if one]
    if not asked and chosen:
        asked = [_start(row, tokenizer) for row in encoded.rows(chosen[:PROMPTS])]
    return asked[:PROMPTS]


def _question(content: dict) -> dict | None:
    """The prompt of the first answer; None for text, for tokens, and where the answer comes first."""
    if "prompt" in content:
        return {"text": content["prompt"], "reference": content["completion"]}
    for place, turn in enumerate(content.get("messages", ())):
        if place >= content["answers_from"] and turn["role"] == "assistant":
            return {"messages": content["messages"][:place], "reference": turn["content"]} if place else None
    return None


def _start(row: dict, tokenizer: Any) -> dict:
    """A prompt out of tokens: those before the first label, or of a text the first few."""
    ids = row["input_ids"]
    first = next(place for place, label in enumerate(row["labels"]) if label != IGNORE)
    is_text = first == 1
    cut = max(1, min(_TEXT_TOKENS, len(ids) // 2)) if is_text else first
    end = cut + _REFERENCE_TOKENS if is_text else len(ids)
    text, reference = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:cut], ids[cut:end]))
    return {"text": text, "reference": reference}
