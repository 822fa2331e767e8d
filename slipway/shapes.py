"""What rows mean: finds the shape from the columns, checks each row, and brings it into one of four forms.

messages            {"messages": [{"role", "content"}, ...]}           loss on every assistant turn
prompt_completion   {"prompt", "completion"}, texts or message lists   loss on the completion
alpaca              {"instruction", "input", "output"}                 loss on the output
text                {"text"}                                           loss on all of it
input_ids           {"input_ids", "labels"}, tokenized before          loss where the labels are not -100
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slipway.errors import InputError, nearest
from slipway.files import Row

# Columns that make the shape. Of several that fit the first counts: a `text` beside others may render them.
SHAPES = {
    "input_ids": ("input_ids",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL = {"input_ids": ("labels",), "alpaca": ("input",)}
ROLES = ("system", "developer", "user", "assistant", "tool")
_LOOKED_AT = 1000  # rows that the shape is looked for in

# The prompt of Stanford Alpaca (tatsu-lab/stanford_alpaca), for tokenizers without a chat template.
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
ALPACA = _ALPACA.format("") + "### Instruction:\n{instruction}\n\n### Response:\n"
ALPACA_INPUT = (
    _ALPACA.format(", paired with an input that provides further context")
    + "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


@dataclass(slots=True)
class Example:
    """One checked row; equal contents have equal keys (64 bits).

    content: messages and answers_from (index of the first message that can be an answer), or prompt and
    completion, or text, or input_ids and labels.
    """

    where: str
    content: dict
    key: int


def examples(
    rows: Iterator[Row],
    *,
    shape: str | None,
    columns: dict[str, str] | None,
    chat: bool,
    seed: int,
    tally: Counter,
    found: dict,
) -> Iterator[Example]:
    """Yields the usable rows; counts the others in `tally` by the rule that dropped them.

    chat: alpaca rows become messages, else texts. `found` gets "shape" and "ignored_columns" before the first
    row comes. InputError for a row of another shape, a wrong type, and columns that fit no shape.
    """
    shape = _known_shape(shape)
    rows, columns = iter(rows), columns or {}
    head = list(itertools.islice(rows, _LOOKED_AT))
    _check_columns(columns, head)
    first = [_rename(row, columns) for row in head]
    model, shape = _find_shape(first, shape)
    used = SHAPES[shape] + OPTIONAL.get(shape, ())
    names = {name for row in first for name in row.data}
    found["shape"], found["ignored_columns"] = shape, sorted(names - set(used))
    check = _CHECKS[shape]
    for row in itertools.chain(first, (_rename(row, columns) for row in rows)):
        tally["read"] += 1
        if not any(name in row.data for name in SHAPES[shape]):
            raise _mixed(row, model, shape)
        content = check(row, chat)
        if isinstance(content, str):
            tally[content] += 1
        else:
            yield Example(row.where, content, _key(row, content, seed))


def _key(row: Row, content: dict, seed: int) -> int:
    # A named row keeps its side under every seed, so that runs with other seeds share their held-out rows.
    text = f"name {row.name}" if row.name else f"{seed} {json.dumps(content, sort_keys=True, default=str)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _known_shape(shape: str | None) -> str | None:
    name = shape.replace("/", "_") if shape else None
    if name is not None and name not in SHAPES:
        raise InputError(f"no shape {shape}{nearest(name, SHAPES)}", f"shapes: {', '.join(SHAPES)}")
    return name


def _check_columns(columns: dict[str, str], rows: list[Row]) -> None:
    """Raises InputError for a column name that is not ours on the left, or not theirs on the right."""
    known = {name for names in (*SHAPES.values(), *OPTIONAL.values()) for name in names}
    there = dict.fromkeys(name for row in rows for name in row.data)
    for ours, theirs in columns.items():
        if ours not in known:
            raise InputError(f"columns: no column {ours} is used here{nearest(ours, known)}", _ACCEPTED)
        if theirs not in there:
            raise InputError(
                f"columns: {ours} is to be {theirs}, but {rows[0].where} has {', '.join(there)}",
                f"mend the name{nearest(theirs, there)}",
            )


def _rename(row: Row, columns: dict[str, str]) -> Row:
    """The row with the user's column names replaced by ours; `columns` maps ours to theirs."""
    if not columns:
        return row
    back = {theirs: ours for ours, theirs in columns.items()}
    # A column of theirs that has one of our names but was not meant makes room for the one that was.
    kept = {name: value for name, value in row.data.items() if name in back or name not in columns}
    return row._replace(data={back.get(name, name): value for name, value in kept.items()})


_ACCEPTED = "accepted are: " + "; ".join(
    f"{shape} ({', '.join(names)}{''.join(f', [{name}]' for name in OPTIONAL.get(shape, ()))})"
    for shape, names in SHAPES.items()
)


def _find_shape(rows: list[Row], shape: str | None) -> tuple[Row, str]:
    """(first row that has all columns of a shape, that shape)."""
    for row in rows:
        for name in [shape] if shape else SHAPES:
            if all(column in row.data for column in SHAPES[name]):
                return row, name
    first = rows[0]
    names = ", ".join(dict.fromkeys(name for row in rows for name in row.data)) or "none"
    if shape:
        needs = ", ".join(SHAPES[shape])
        raise InputError(f"{first.where}: shape {shape} needs {needs}; found: {names}", _HOW_TO_NAME)
    for prompt, answer in (SHAPES["prompt_completion"], SHAPES["alpaca"]):
        if prompt in first.data:
            raise InputError(
                f"{first.where}: prompts without answers: a column {prompt} but no {answer}; found: {names}",
                _HOW_TO_NAME,
            )
    raise InputError(f"{first.where}: the columns fit no shape; found: {names}", f"{_HOW_TO_NAME}; {_ACCEPTED}")


_HOW_TO_NAME = """rename the columns, or say which is which: --columns '{"prompt": "yours", "completion": "yours"}'"""


def _mixed(row: Row, model: Row, shape: str) -> InputError:
    fits = [name for name, names in SHAPES.items() if all(column in row.data for column in names)]
    return InputError(
        f"mixed shapes: {row.where} has the columns {', '.join(row.data) or '(none)'}"
        f"{f' (shape {fits[0]})' if fits else ' (no shape)'}, "
        f"but {model.where} has {', '.join(model.data)} (shape {shape})",
        "give rows of one shape; move other files out of the folder",
    )


def _wrong_type(where: str, column: str, expected: str, value: object) -> InputError:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    kind = "null" if value is None else kinds.get(type(value), type(value).__name__)
    shown = json.dumps(value, default=str, ensure_ascii=False)[:40]
    return InputError(
        f"{where}: column {column}: expected {expected}, found {kind} ({shown})", "mend or delete the row"
    )


def _text(where: str, column: str, value: object) -> str:
    """The text of a column, "" for null. InputError for other types and for characters that are none."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong_type(where, column, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: column {column}: half of a character (\\u{ord(value[error.start]):04x}) at place {error.start}",
            "mend or delete the row",
        ) from error
    return value


def _messages(where: str, column: str, value: object) -> list[dict]:
    """Checked chat messages, without keys that are null (Parquet gives each message the keys of all)."""
    if not isinstance(value, list):
        raise _wrong_type(where, column, "a list of messages", value)
    clean = []
    for number, message in enumerate(value):
        place = f"{column}[{number}]"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise _wrong_type(where, place, 'an object with "role" and "content"', message)
        if message["role"] not in ROLES:
            known = nearest(str(message["role"]), ROLES)
            raise InputError(f"{where}: {place}: no role {message['role']!r}{known}", f"roles: {', '.join(ROLES)}")
        content = _text(where, f"{place}.content", message["content"])
        clean.append({name: item for name, item in message.items() if item is not None} | {"content": content})
    return clean


def _has_answer(messages: list[dict]) -> bool:
    return any(m["role"] == "assistant" and (m["content"].strip() or m.get("tool_calls")) for m in messages)


NO_ANSWER, NO_PROMPT, NO_TEXT, NO_TOKENS = "no answer", "no prompt", "no text", "no tokens"


def _check_messages(row: Row, chat: bool) -> dict | str:
    if row.data["messages"] is None:
        return NO_ANSWER
    messages = _messages(row.where, "messages", row.data["messages"])
    return {"messages": messages, "answers_from": 0} if _has_answer(messages) else NO_ANSWER


def _check_pair(row: Row, chat: bool) -> dict | str:
    prompt, completion = row.data.get("prompt"), row.data.get("completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        if not prompt or not completion:
            return NO_ANSWER if prompt else NO_PROMPT
        before = _messages(row.where, "prompt", prompt)
        after = _messages(row.where, "completion", completion)
        return {"messages": before + after, "answers_from": len(before)} if _has_answer(after) else NO_ANSWER
    prompt = _text(row.where, "prompt", prompt)
    completion = _text(row.where, "completion", completion)
    if not completion.strip():
        return NO_ANSWER
    return {"prompt": prompt, "completion": completion} if prompt.strip() else NO_PROMPT


def _check_alpaca(row: Row, chat: bool) -> dict | str:
    names = ("instruction", "input", "output")
    instruction, extra, output = (_text(row.where, name, row.data.get(name)) for name in names)
    if not output.strip():
        return NO_ANSWER
    if not instruction.strip():
        return NO_PROMPT
    if chat:
        asked = f"{instruction}\n\n{extra}" if extra.strip() else instruction
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
        return {"messages": turns, "answers_from": 1}
    form = ALPACA_INPUT if extra.strip() else ALPACA
    return {"prompt": form.format(instruction=instruction, input=extra), "completion": output}


def _check_text(row: Row, chat: bool) -> dict | str:
    text = _text(row.where, "text", row.data["text"])
    return {"text": text} if text.strip() else NO_TEXT


def _check_ids(row: Row, chat: bool) -> dict | str:
    ids, labels = row.data["input_ids"], row.data.get("labels")
    if not ids:
        return NO_TOKENS
    for name, value in (("input_ids", ids), ("labels", ids if labels is None else labels)):
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise _wrong_type(row.where, name, "a list of whole numbers", value)
        if len(value) != len(ids):
            raise InputError(f"{row.where}: {len(ids)} input_ids but {len(value)} {name}", "give one label a token")
    return {"input_ids": ids, "labels": ids if labels is None else labels}


_CHECKS: dict[str, Callable[[Row, bool], dict | str]] = {
    "input_ids": _check_ids,
    "messages": _check_messages,
    "prompt_completion": _check_pair,
    "alpaca": _check_alpaca,
    "text": _check_text,
}
