"""Fine-tuning of a causal language model in a folder of transformers, and text that it generates.

python examples/finetune_causal.py my_model text.txt                    # your folder, your text
python examples/finetune_causal.py my_model README.md --make            # makes a tiny one first
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import asyncpipe


def make(folder: str, text: str) -> None:
    """Writes a Llama of 0.2 M random parameters, and a tokenizer with the words of a text."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ByteLevelBPETokenizer()
    words.train_from_iterator([text], vocab_size=512, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer, eos_token="<end>", pad_token="<end>"
    )
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        eos_token_id=0,
        bos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(options: argparse.Namespace) -> float:
    """Trains, saves and exports; every rank runs this function. Returns the last loss."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = torch.tensor(tokenizer(options.text.read_text())["input_ids"])
    samples = ids[: len(ids) // options.length * options.length].reshape(-1, options.length)
    order = torch.Generator().manual_seed(0)  # alike on all ranks, which read the same batches
    loader = DataLoader(samples, options.batch, shuffle=True, drop_last=True, generator=order)
    pipe = asyncpipe.Pipeline(options.folder, micro_batches=4, clip=1.0)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.lr)
    for epoch in range(options.epochs):
        for batch in loader:
            result = pipe.step({"input_ids": batch, "labels": batch}, optimizer=optimizer)
        if pipe.rank == 0:
            print(f"epoch {epoch + 1}  loss {result.loss:.4f}")
    pipe.save(f"{options.output}/checkpoint")
    weights = pipe.state_dict(full=True)
    if pipe.rank == 0:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        model.load_state_dict(weights)
        model.save_pretrained(f"{options.output}/hf")
        tokenizer.save_pretrained(f"{options.output}/hf")
    return result.loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="folder of a causal language model and its tokenizer")
    parser.add_argument("text", type=Path)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--folder", default="generated_models/causal")
    parser.add_argument("--output", default="finetuned")
    for name, default in {"epochs": 3, "batch": 8, "length": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    chosen = parser.parse_args()
    if chosen.make:
        make(chosen.model, chosen.text.read_text())
    model = AutoModelForCausalLM.from_pretrained(chosen.model, use_safetensors=True)
    one = torch.zeros(2, chosen.length, dtype=torch.int64)
    inputs = {"input_ids": one, "labels": one}
    asyncpipe.partition(model, inputs, stages=2, output=chosen.folder, force=True)
    asyncpipe.launch(train, chosen, ranks=2)
    tuned = AutoModelForCausalLM.from_pretrained(f"{chosen.output}/hf")
    tokenizer = AutoTokenizer.from_pretrained(f"{chosen.output}/hf")
    begin = tokenizer("the ", return_tensors="pt")
    print(tokenizer.decode(tuned.generate(**begin, max_new_tokens=20, do_sample=False)[0]))
