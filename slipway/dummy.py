"""The dummy job: random embeddings around two means, and a BERT of bert-base's widths that tells them apart.

No hub, no tokenizer, no file: what a first `make train-bert` runs, and what the tests measure the loop with.
"""

from typing import Any

import torch
from torch.utils.data import Dataset

WIDTH = 768
CLASSES = ("0", "1")
ROWS = 1024
_APART = 0.1  # how far the two means lie from zero, in each of WIDTH directions, beside noise of standard deviation 1


class Embeddings(Dataset):
    """Rows of {"inputs_embeds": (1, 768) float32, "labels": 0 or 1}; a seed fixes all of them."""

    def __init__(self, rows: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        mean = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0)) * _APART  # the same for every seed
        self.labels = torch.randint(0, 2, (rows,), generator=generator)
        noise = torch.randn(rows, 1, WIDTH, generator=generator)
        self.embeddings = noise + mean * (2 * self.labels - 1).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"inputs_embeds": self.embeddings[row], "labels": self.labels[row]}


def model(layers: int, dropout: float | None) -> Any:
    """A BertForSequenceClassification with random weights from torch's seed: bert-base's widths, `layers` layers."""
    from transformers import BertConfig, BertForSequenceClassification

    settings = {} if dropout is None else {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = BertConfig(
        hidden_size=WIDTH, num_hidden_layers=layers, vocab_size=1, pad_token_id=0, num_labels=2, **settings
    )
    built = BertForSequenceClassification(config)
    # inputs_embeds go past the table of words: without a gradient for it, DDP would wait for one and stop.
    built.get_input_embeddings().weight.requires_grad_(False)
    return built
