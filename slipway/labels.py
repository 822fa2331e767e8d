"""Tokens and labels of one batch of examples: -100 wherever nothing is to be learned.

The answers of a conversation are found in the rendered chat template as spans of characters, and through the
tokenizer's offsets as spans of tokens. An answer's last label is always the token that ends it.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from slipway.errors import InputError
from slipway.shapes import Example

IGNORE = -100
TRUNCATED = "truncated"
TOO_LONG = "nothing of the answer within max_length"
NO_LABELS = "no label to train on"
SPLIT = "texts split"
END_ADDED = "end token added"

_SENTINEL = "\ue000answer\ue001"


class Sequence(NamedTuple):
    """Tokens of one row, or of one piece of a text, with as many labels; the key is its row's."""

    input_ids: list[int]
    labels: list[int]
    key: int
    piece: int = 0


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its first token before plain text."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


@dataclass
class Labeler:
    """Turns examples into sequences of at most max_length tokens; counts in `tally` what it cut or dropped.

    shortest: tokens of the shortest row among those that lost their whole answer to max_length.
    """

    tokenizer: Any
    max_length: int
    vocab_size: int
    loss_on_all: bool
    tally: Counter
    shortest: int | None = None

    def __call__(self, batch: list[Example]) -> list[Sequence]:
        """Raises InputError, naming the row, for what the template refuses and ids outside the vocabulary."""
        sequences = []
        for kind, group in groupby(batch, key=lambda one: next(iter(one.content))):
            run = list(group)
            if kind == "text":
                sequences += self._texts(run)
                continue
            rows = {"messages": self._chats, "prompt": self._pairs, "input_ids": self._given}[kind](run)
            finished = (self._finish(one, *row) for one, row in zip(run, rows, strict=True))
            sequences += [sequence for sequence in finished if sequence]
        return sequences

    def _given(self, batch: list[Example]) -> list[tuple[list[int], list[int]]]:
        return [(one.content["input_ids"], one.content["labels"]) for one in batch]

    @cached_property
    def _bos(self) -> list[int]:
        return [self.tokenizer.bos_token_id] if adds_bos(self.tokenizer) else []

    @cached_property
    def _eos(self) -> list[int]:
        if self.tokenizer.eos_token_id is None:
            raise InputError("the tokenizer has no end token, so answers would never end", "set its eos_token")
        return [self.tokenizer.eos_token_id]

    @cached_property
    def _special(self) -> set[int]:
        return set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if ids[:1] == self._bos else self._bos + ids

    def _with_eos(self, ids: list[int]) -> list[int]:
        return ids if ids[-1:] == self._eos else ids + self._eos

    def _pairs(self, batch: list[Example]) -> list[tuple[list[int], list[int]]]:
        prompts = self._ids([one.content["prompt"] for one in batch])
        joined = self._ids([one.content["prompt"] + one.content["completion"] for one in batch])
        rows = []
        for one, prompt, both in zip(batch, prompts, joined, strict=True):
            # Where the text's tokens cross the border, the completion is tokenized alone: an answer is
            # generated after the prompt's own tokens.
            same = both[: len(prompt)] == prompt
            completion = both[len(prompt) :] if same else self._ids([one.content["completion"]])[0]
            completion, prompt = self._with_eos(completion), self._with_bos(prompt)
            labels = prompt if self.loss_on_all else [IGNORE] * len(prompt)
            rows.append((prompt + completion, labels + completion))
        return rows

    def _texts(self, batch: list[Example]) -> list[Sequence]:
        sequences = []
        for one, ids in zip(batch, self._ids([one.content["text"] for one in batch]), strict=True):
            ids = self._with_eos(self._with_bos(ids))
            self._check_ids(one, ids)
            if len(ids) < 2:
                self.tally[NO_LABELS] += 1
                continue
            pieces = split(ids, self.max_length)
            self.tally[SPLIT] += len(pieces) > 1
            sequences += [Sequence(ids, [IGNORE, *ids[1:]], one.key, n) for n, ids in enumerate(pieces)]
        return sequences

    def _chats(self, batch: list[Example]) -> list[tuple[list[int], list[int]]]:
        if self.tokenizer.chat_template is None:
            raise InputError(
                f"{batch[0].where}: a conversation, but the tokenizer has no chat template",
                "set its chat_template (slipway.tokenizers has a plain one), or give texts instead",
            )
        if not self.tokenizer.is_fast and not self.loss_on_all:
            raise InputError(
                f"{type(self.tokenizer).__name__} gives no offsets, so answers cannot be told from prompts",
                "use a model with a fast tokenizer (tokenizer.json), or train on everything with loss_on all",
            )
        rendered = [self._render(one) for one in batch]
        if self.loss_on_all:
            return [(ids, ids) for ids in self._ids([text for text, _ in rendered])]
        coded = self.tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        rows = []
        for (text, spans), ids, offsets in zip(rendered, coded["input_ids"], coded["offset_mapping"], strict=True):
            ids, labels = self._label(text, spans, ids, offsets)
            rows.append((ids, labels))
        return rows

    def _label(self, text: str, spans: list, ids: list[int], offsets: list) -> tuple[list, list]:
        """Ids and labels of a conversation whose answers are the `spans` of `text`."""
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        places = []
        for start, end in spans:
            # Offsets may leave out the space that a token starts with. Then a token of spaces is empty at its
            # end (so the end decides here). A token across the border shows as a gap behind the one before.
            first, behind = bisect_right(ends, start), bisect_left(starts, end)
            border = ends[first - 1] if first else 0
            if first < behind and border < start:
                return self._label_apart(text, spans)
            places.append((first, behind))
        labels = [IGNORE] * len(ids)
        for first, behind in places:
            labels[first:behind] = ids[first:behind]
        return self._ended(ids, labels)

    def _label_apart(self, text: str, spans: list) -> tuple[list[int], list[int]]:
        """As `_label`, for a token that crosses the border of prompt and answer.

        Each part is tokenized alone, because an answer is generated after the prompt's own tokens.
        """
        cuts = [0, *(place for span in spans for place in span), len(text)]
        parts = self._ids([text[a:b] for a, b in pairwise(cuts)])
        ids = [token for part in parts for token in part]
        labels = [token if number % 2 else IGNORE for number, part in enumerate(parts) for token in part]
        return self._ended(ids, labels)

    def _ended(self, ids: list[int], labels: list[int]) -> tuple[list[int], list[int]]:
        """With the end token after the last answer, where the template wrote none."""
        last = next((place for place in reversed(range(len(ids))) if labels[place] != IGNORE), None)
        if last is None or ids[last] in self._special:
            return ids, labels
        self.tally[END_ADDED] += 1
        last += 1
        return ids[:last] + self._eos + ids[last:], labels[:last] + self._eos + labels[last:]

    def _finish(self, one: Example, ids: list[int], labels: list[int]) -> Sequence | None:
        self._check_ids(one, ids)
        self._check_ids(one, [label for label in labels if label != IGNORE])
        if len(ids) > self.max_length:
            if not any(label != IGNORE for label in labels[1 : self.max_length]):
                self.tally[TOO_LONG] += 1
                self.shortest = min(len(ids), self.shortest or len(ids))
                return None
            self.tally[TRUNCATED] += 1
        # Nothing stands before the first token that it could be told from.
        labels = [IGNORE, *labels[1 : self.max_length]]
        if all(label == IGNORE for label in labels):
            self.tally[NO_LABELS] += 1
            return None
        return Sequence(list(ids[: self.max_length]), labels, one.key)

    def _check_ids(self, one: Example, ids: list[int]) -> None:
        if ids and (max(ids) >= self.vocab_size or min(ids) < 0):
            worst = max(ids) if max(ids) >= self.vocab_size else min(ids)
            raise InputError(
                f"{one.where}: token id {worst} is outside the model's vocabulary of {self.vocab_size}",
                "use the tokenizer that belongs to the model",
            )

    def _render(self, one: Example) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as the model sees it, and where its answers stand, with their end tokens."""
        messages = one.content["messages"]
        text = self._template(one, messages)
        if self.loss_on_all:
            return text, []
        turns = [
            turn for turn in range(one.content["answers_from"], len(messages)) if messages[turn]["role"] == "assistant"
        ]
        spans = [self._grown(one, messages, turn, text) for turn in turns]
        if None in spans:
            spans = [self._replaced(one, messages, turn, text) for turn in turns]
        return text, [(start, start + len(text[start:end].rstrip())) for start, end in spans]

    def _template(self, one: Example, messages: list[dict], ask: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise InputError(
                f"{one.where}: the chat template refuses the roles {roles} ({error})",
                "mend the row, or use a tokenizer whose template takes it",
            ) from error

    def _grown(self, one: Example, messages: list[dict], turn: int, text: str) -> tuple[int, int] | None:
        """Where `text` grows from this turn's prompt to its end; None if what stood before changes."""
        if turn == 0:
            return None
        before = self._template(one, messages[:turn], ask=True)
        after = text if turn + 1 == len(messages) else self._template(one, messages[: turn + 1])
        grows = after.startswith(before) and text.startswith(after) and len(before) < len(after)
        return (len(before), len(after)) if grows else None

    def _replaced(self, one: Example, messages: list[dict], turn: int, text: str) -> tuple[int, int]:
        """Where `text` changes when this turn's content does, with the special token that follows.

        For templates that write a turn differently when others come after it (Qwen 3 drops older thoughts).
        """
        other = [*messages[:turn], messages[turn] | {"content": _SENTINEL}, *messages[turn + 1 :]]
        head, *tails = self._template(one, other).split(_SENTINEL)
        if len(tails) != 1 or not text.startswith(head) or not text.endswith(tails[0]):
            raise InputError(
                f"{one.where}: the chat template rewrites earlier turns, so answers cannot be found in it",
                "use one turn in a row, another template, or train on everything with loss_on all",
            )
        start, end = len(head), len(text) - len(tails[0])
        names = [re.escape(str(token)) for token in self.tokenizer.added_tokens_decoder.values()]
        marked = re.compile(rf"\s*(?:{'|'.join(names)})").match(text, end) if names else None
        return start, marked.end() if marked else end


def split(ids: list[int], length: int) -> list[list[int]]:
    """Pieces of at most `length` >= 3 tokens with none lost, and no piece of one: it would have no label."""
    cuts = list(range(0, len(ids), length))
    if len(cuts) > 1 and len(ids) - cuts[-1] == 1:
        cuts[-1] -= 1
    return [ids[a:b] for a, b in zip(cuts, [*cuts[1:], len(ids)], strict=True)]
