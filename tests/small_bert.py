"""A BERT of a few thousand weights, and texts with a class each for it to learn."""

import csv
import random
from pathlib import Path

import model_zoo
import torch
from transformers import BertConfig, BertModel

WORDS = {"sea": "ship wave salt tide harbour sail", "land": "hill road field stone forest plough"}


def write_model(folder: Path, **settings: object) -> Path:
    """An encoder with random weights and a tokenizer of bytes, as a folder that from_pretrained takes."""
    words = model_zoo.tokenizer(["[PAD]", "[CLS]"], pad_token="[PAD]", cls_token="[CLS]")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=128, pad_token_id=0, **small | settings)
    BertModel(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def write_texts(path: Path, rows: int) -> Path:
    """A CSV of `rows` texts, each of words of one class."""
    chance = random.Random(0)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["text", "label"])
        for number in range(rows):
            label = chance.choice(sorted(WORDS))
            words = chance.choices(WORDS[label].split(), k=chance.randint(2, 9))
            out.writerow([f"{' '.join(words)} {number}", label])
    return path
