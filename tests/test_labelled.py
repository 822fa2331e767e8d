"""Texts with a class each: which are held out, how classes are ordered and told; and encoders with a head for them."""

import pytest
import torch
from small_bert import WORDS, write_model, write_texts

from slipway import encoders, labelled
from slipway.windows import Windows


def write(path, *rows):
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return str(path)


def test_the_split_is_by_text_and_the_same_in_any_order(tmp_path):
    rows = [(f"text {n % 40}", "even" if n % 2 == 0 else "odd") for n in range(80)]  # each text twice
    one = labelled.prepare(write(tmp_path / "a.csv", *rows))
    other = labelled.prepare(write(tmp_path / "b.csv", *reversed(rows)))
    assert one.classes == ("even", "odd")
    assert sorted(one.held_out) == sorted(other.held_out)
    assert len(one.held_out) == 8  # two texts of each class, twice
    assert not {row.text for row in one.held_out} & {row.text for row in one.train}
    assert len(one.train) + len(one.held_out) == 80


def test_numbers_as_classes_are_ordered_by_value(tmp_path):
    data = labelled.prepare(write(tmp_path / "a.csv", *[(f"text {n}", n % 3 * 5) for n in range(30)]))
    assert data.classes == ("0", "5", "10")


def test_what_is_often_a_slip_is_said_and_what_is_not_is_not(tmp_path):
    rows = [(f"text {n}", ("0", "2", "neg")[n % 3]) for n in range(30)]
    mixed = "some classes are numbers, such as 0, and others words, such as 'neg'"
    assert labelled.prepare(write(tmp_path / "a.csv", *rows)).notes == [mixed]
    rows = [(f"text {n}", "ab"[n % 2]) for n in range(20)]
    assert labelled.prepare(write(tmp_path / "b.csv", *rows, rows[0])).notes == []
    twice = labelled.prepare(write(tmp_path / "c.csv", *rows, ("text 0", "b"), ("text 0", "a"), ("text 3", "a")))
    where = tmp_path / "c.csv"
    assert twice.notes == [f"2 texts are there with more than one class: {where}:2 'a', {where}:22 'b'"]


def test_a_fingerprint_tells_each_change(tmp_path):
    rows = [(f"text {n}", "ab"[n % 2]) for n in range(20)]
    prints = {
        labelled.prepare(write(tmp_path / "a.csv", *changed)).fingerprint
        for changed in (rows, rows[1:], [("text x", "a"), *rows[1:]], [("text 0", "b"), *rows[1:]])
    }
    assert len(prints) == 4


def test_the_embedded_texts_are_of_each_package_and_do_not_name_it():
    data = labelled.prepare(labelled.EMBEDDED)
    assert data.classes == labelled.PACKAGES
    rows = [*data.train, *data.held_out]
    assert len(rows) == labelled.ROWS_EACH * len(data.classes)
    assert not [row.text for row in rows for name in labelled.PACKAGES if name in row.text.lower()]
    assert {row.label for row in data.held_out[:60]} == set(range(len(data.classes)))


def test_scores_by_hand():
    found = labelled.scores(predicted=[0, 0, 1, 2, 2, 2], labels=[0, 1, 1, 1, 2, 0])
    f1 = (2 * 1 / (2 + 2), 2 * 1 / (1 + 3), 2 * 1 / (3 + 1))  # hits, said and true of each class
    assert found == pytest.approx({"accuracy": 3 / 6, "macro_f1": sum(f1) / 3, "majority": 3 / 6, "rows": 6})


def test_a_head_for_other_classes_gives_way_and_one_for_as_many_stays(tmp_path):
    model = encoders.load(encoders.resolve(str(write_model(tmp_path / "bert"))), ("a", "b"), None)
    model.save_pretrained(tmp_path / "trained")
    encoders.tokenizer(encoders.resolve(str(tmp_path / "bert"))).save_pretrained(tmp_path / "trained")
    found = encoders.resolve(str(tmp_path / "trained"))
    same, other = encoders.load(found, ("c", "d"), None), encoders.load(found, ("a", "b", "c"), 0.3)
    assert torch.equal(same.classifier.weight, model.classifier.weight)
    assert same.config.id2label == {0: "c", 1: "d"}
    assert other.classifier.weight.shape == (3, 32)
    assert {module.p for module in other.modules() if isinstance(module, torch.nn.Dropout)} == {0.3}


def test_texts_that_are_cut_are_counted(tmp_path):
    data = labelled.prepare(str(write_texts(tmp_path / "a.csv", 30)))
    assert set(data.classes) == set(WORDS)
    words = encoders.tokenizer(encoders.resolve(str(write_model(tmp_path / "bert"))))
    longest = max(len(row.text) for row in data.train)  # a token a byte
    assert encoders.Encoded(data.train, words, longest).cut == 0
    cut = encoders.Encoded(data.train, words, 20)
    assert cut.cut == sum(len(row.text) > 20 for row in data.train) > 0
    assert max(len(row["input_ids"]) for row in cut) == 20


@pytest.mark.parametrize(("rows", "batch", "accumulation", "ranks"), [(101, 4, 4, 2), (64, 8, 2, 2), (3, 4, 2, 3)])
def test_shares_of_all_ranks_and_micro_batches_are_the_mean_of_each_step(rows, batch, accumulation, ranks):
    losses = torch.rand(rows, dtype=torch.float64)
    windows = [Windows(rows, batch, accumulation, ranks, rank) for rank in range(ranks)]
    rounds = -(-rows // (batch * ranks))
    steps = torch.zeros(windows[0].steps, dtype=torch.float64)
    for micro in range(rounds):
        for rank, window in enumerate(windows):
            places = (torch.arange(batch) + (micro * ranks + rank) * batch) % rows  # filled up from the start
            steps[micro // accumulation] += window.share(losses[places], micro)
    assert torch.allclose(steps, torch.stack([part.mean() for part in losses.split(batch * accumulation * ranks)]))
