"""Tokens, labels and cuts, on tokenizers small enough to read by eye."""

import pytest
from small_data import CHATS, ends, own_cache, prepare, trained, turns, write
from tiny_tokenizers import FORGETS, LLAMA2, NO_END, REWRITES, byte_level, llama2
from transformers import ByT5Tokenizer

from slipway import encode, labels, tokenizers
from slipway.errors import InputError
from slipway.labels import IGNORE

pytestmark = pytest.mark.usefixtures(own_cache.__name__)


def test_answers_are_trained_up_to_their_end_token(tmp_path):
    tokenizer = byte_level()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id  # the trap: a mask over pad would hide the end
    data = prepare(write(tmp_path, CHATS), tokenizer)
    found = [trained(tokenizer, row) for row in data.train]
    assert found == [
        ["Hello there<|im_end|>"],
        ["First<|im_end|>", " second, with a space<|im_end|>"],
        ["Çödé 🙂\n\nend\n<|im_end|>"],
    ]
    for row, source in zip(data.train, CHATS, strict=True):
        text = tokenizer.apply_chat_template(source["messages"], tokenize=False)
        assert row["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_llama_2s_template_has_one_bos_a_turn_and_trains_each_eos(tmp_path):
    tokenizer = llama2()
    rows = [{"messages": turns("hi", "hello there", "and?", "this")}, {"messages": turns("a b", "<0x41>é")}]
    data = prepare(write(tmp_path, rows), tokenizer)
    found = [trained(tokenizer, row) for row in data.train]
    assert found == [["hello there </s>", "this </s>"], ["<0x41>é </s>"]]
    first = data.train[0]["input_ids"]
    assert first.count(tokenizer.bos_token_id) == 2
    assert first[0] == tokenizer.bos_token_id != first[1]
    assert ends(data.train[0]) == [tokenizer.eos_token_id] * 2
    # What an answer is generated after is what it was trained after.
    prompt = tokenizer.apply_chat_template(rows[0]["messages"][:1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert first[: len(ids)] == ids
    assert data.train[0]["labels"][len(ids)] != IGNORE


def test_only_the_completion_of_message_lists_is_trained(tmp_path):
    row = {"prompt": turns("a", "earlier", "b"), "completion": [{"role": "assistant", "content": "later"}]}
    tokenizer = byte_level()
    assert trained(tokenizer, prepare(write(tmp_path, [row]), tokenizer).train[0]) == ["later<|im_end|>"]


def test_loss_on_all_trains_on_prompts_too(tmp_path):
    tokenizer = byte_level()
    data = prepare(write(tmp_path, CHATS[:1]), tokenizer, loss_on="all")
    row = data.train[0]
    assert row["labels"] == [IGNORE, *row["input_ids"][1:]]


def test_text_pairs_are_prompt_completion_eos(tmp_path):
    tokenizer = llama2(template=None)
    rows = [{"prompt": "ask this", "completion": " so"}, {"prompt": "x:", "completion": "y</s>"}]
    data = prepare(write(tmp_path, rows), tokenizer)
    for row, source in zip(data.train, rows, strict=True):
        prompt = tokenizer(source["prompt"])["input_ids"]  # with its <s>, as generation gives it
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["labels"][: len(prompt)] == [IGNORE] * len(prompt)
        assert row["labels"][len(prompt) :] == row["input_ids"][len(prompt) :]
        assert row["input_ids"].count(tokenizer.bos_token_id) == 1
        assert row["input_ids"].count(tokenizer.eos_token_id) == 1
        assert row["labels"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode(data.train[0]["input_ids"]) == "<s> ask this so</s>"
    assert tokenizer.chat_template is None  # texts need none


def test_a_bos_in_the_text_is_not_doubled(tmp_path):
    tokenizer = llama2(template=None)
    rows = [{"prompt": "<s> ask", "completion": " so"}]
    (row,) = prepare(write(tmp_path, rows), tokenizer).train
    assert row["input_ids"].count(tokenizer.bos_token_id) == 1
    (row,) = prepare(write(tmp_path, [{"text": "<s> text"}], "texts.jsonl"), tokenizer).train
    assert row["input_ids"].count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("shape", ["pair", "chat"])
def test_a_token_across_the_border_is_cut_there(tmp_path, shape):
    # The tokenizer would make one token of both line ends, but no answer starts inside a token.
    tokenizer = byte_level()
    row = {"prompt": "Q\n", "completion": "\n\nso"} if shape == "pair" else {"messages": turns("Q", "\n\nso")}
    (found,) = prepare(write(tmp_path, [row]), tokenizer).train
    assert trained(tokenizer, found) == ["\n\nso<|im_end|>"]
    both = tokenizer("\n\n\nso")["input_ids"]
    assert both[1] == tokenizer("\n")["input_ids"][0] != both[0]  # so the border would have been inside both[0]


def test_a_template_that_changes_earlier_turns_is_still_labelled_right(tmp_path):
    tokenizer = byte_level(FORGETS)
    data = prepare(write(tmp_path, [{"messages": turns("a", "first", "b", "second")}]), tokenizer)
    assert trained(tokenizer, data.train[0]) == ["first<|im_end|>", "second<|im_end|>"]


def test_a_template_that_rewrites_answers_is_refused(tmp_path):
    source = write(tmp_path, [{"messages": turns("a", "first")}])
    with pytest.raises(InputError, match=r"rows.jsonl:1: the chat template rewrites earlier turns"):
        prepare(source, byte_level(REWRITES))
    assert len(prepare(source, byte_level(REWRITES), loss_on="all").train) == 1


def test_a_template_that_refuses_the_roles_names_the_row(tmp_path):
    source = write(tmp_path, [{"messages": turns("a", "b")}, {"messages": turns("a", "b", system="s")}])
    with pytest.raises(InputError, match=r"rows.jsonl:2: .*system, user, assistant .*must alternate"):
        prepare(source, llama2(LLAMA2))


def test_answers_get_the_end_token_that_the_template_forgot(tmp_path):
    tokenizer = byte_level(NO_END)
    data = prepare(write(tmp_path, [{"messages": turns("a", "first", "b", "second")}]), tokenizer)
    assert trained(tokenizer, data.train[0])[-1] == "second<|im_end|>"
    assert data.facts["end_added"] == 1
    assert any("1 answers got an end token" in line for line in encode.describe(data.facts))


def test_the_plain_template_of_base_models_is_labelled_right(tmp_path):
    tokenizer = llama2(template=None)
    source = write(tmp_path, [{"messages": turns("a", "first", "b", " second\n")}])
    with pytest.raises(InputError, match=r"rows.jsonl:1: a conversation, but the tokenizer has no chat template"):
        prepare(source, tokenizer)
    tokenizer.chat_template = tokenizers.plain_template(tokenizer)
    (row,) = prepare(source, tokenizer).train
    assert trained(tokenizer, row) == ["first</s>", "second</s>"]
    assert row["input_ids"].count(tokenizer.bos_token_id) == 1


def test_slow_tokenizers_are_refused_where_offsets_are_needed(tmp_path):
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = NO_END
    source = write(tmp_path, [{"messages": turns("a", "b")}])
    with pytest.raises(InputError, match="ByT5Tokenizer gives no offsets"):
        prepare(source, tokenizer)
    assert len(prepare(source, tokenizer, loss_on="all").train) == 1


# --- lengths


def test_long_texts_are_split_and_no_token_is_lost(tmp_path):
    tokenizer = llama2(template=None)
    texts = ["abc " * n for n in (1, 9, 10, 11, 33)]
    data = prepare(write(tmp_path, [{"text": text} for text in texts]), tokenizer, max_length=16)
    whole = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert sum(data.train["input_ids"], []) == sum(whole, [])  # noqa: RUF017
    sizes = [len(row) for row in data.train["input_ids"]]
    assert max(sizes) == 16
    assert min(sizes) > 1
    assert data.facts["texts_split"] == sum(len(ids) > 16 for ids in whole) > 0
    assert data.facts["truncated"] == 0
    assert any("texts longer than 16 tokens split" in line for line in encode.describe(data.facts))


@pytest.mark.parametrize("count", range(2, 40))
def test_no_piece_has_one_token(count):
    pieces = labels.split(list(range(count)), 4)
    assert sum(pieces, []) == list(range(count))  # noqa: RUF017
    assert all(2 <= len(piece) <= 4 for piece in pieces)


def test_answers_are_cut_at_the_end_and_rows_without_any_are_dropped(tmp_path):
    rows = [
        {"prompt": "abc", "completion": "defg"},  # 8 tokens with the end
        {"prompt": "abc", "completion": "defgh"},  # 9
        {"prompt": "abcdefgh", "completion": "i"},  # the answer is beyond
        {"prompt": "abc", "completion": ""},
    ]
    tokenizer = byte_level()
    data = prepare(write(tmp_path, rows), tokenizer, max_length=8)
    assert [trained(tokenizer, row) for row in data.train] == [["defg<|im_end|>"], ["defgh"]]
    assert data.facts["truncated"] == 1
    assert data.facts["dropped"] == {"no answer": 1, labels.TOO_LONG: 1}
    lines = "\n".join(encode.describe(data.facts))
    assert "1 rows truncated at max_length 8" in lines
    assert "1 rows dropped: no answer" in lines


def test_nothing_left_says_which_rule_and_how_many_tokens(tmp_path):
    tokenizer = byte_level()
    long = {"prompt": "p" * 20, "completion": "c" * 10}
    with pytest.raises(InputError, match=r"all 40 rows are longer than max_length 16 .* the shortest needs 31"):
        prepare(write(tmp_path, [long] * 40), tokenizer, max_length=16)
    mixed = [long, long, {"prompt": "p", "completion": None}, {"prompt": " ", "completion": "c"}]
    with pytest.raises(InputError) as caught:
        prepare(write(tmp_path, mixed), tokenizer, max_length=16)
    for part in (
        "no usable row: 4 rows read",
        "1 with no answer",
        "1 with no prompt",
        "2 with nothing",
        "needs 31",
    ):
        assert part in str(caught.value)
    with pytest.raises(InputError, match="2 rows read, 2 with no answer"):
        prepare(write(tmp_path, [{"prompt": "p", "completion": ""}] * 2), tokenizer)


def test_no_trainable_token_is_refused(tmp_path):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 5
    with pytest.raises(InputError, match="0 trainable tokens in 5 rows"):
        prepare(write(tmp_path, rows), byte_level())


def test_ids_outside_the_vocabulary_name_the_row(tmp_path):
    rows = [{"input_ids": [1, 2, 99]}, {"input_ids": [1, 100, 3]}]
    with pytest.raises(InputError, match=r"rows.jsonl:2: token id 100 is outside the model's vocabulary of 100"):
        prepare(write(tmp_path, rows), byte_level(), vocab_size=100)
    with pytest.raises(InputError, match=r"rows.jsonl:1: token id -3 is"):
        prepare(write(tmp_path, [{"input_ids": [1, 5], "labels": [-100, -3]}]), byte_level())
    last = len(byte_level()) - 1
    with pytest.raises(InputError, match=rf"rows.jsonl:2: token id {last} is outside .* of {last}"):
        prepare(write(tmp_path, [{"text": "a"}, {"text": "b</s>c"}]), byte_level(), vocab_size=last)


def test_tokenized_rows_pass_through(tmp_path):
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}]
    data = prepare(write(tmp_path, rows), byte_level())
    assert data.train["input_ids"][:] == [[5, 6, 7], [1, 2, 3, 4]]
    assert data.train["labels"][:] == [[IGNORE, 6, 7], [IGNORE, IGNORE, 3, 4]]


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ({"max_length": 2}, "max_length is 2"),
        ({"held_out_rows": -1}, "held_out_rows is -1"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"loss_on": "answers"}, "loss_on is 'answers'"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path, option, part):
    with pytest.raises(InputError, match=part):
        prepare(write(tmp_path, CHATS), byte_level(), **option)
