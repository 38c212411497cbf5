# SPDX-License-Identifier: Apache-2.0
"""Small models that vLLM takes, with a tokenizer of single characters, and what transformers makes of them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

EOS = 1
VOCAB = 256


def model(
    seed: int, *, is_tied: bool = True, num_heads: int = 2, width: int = 96
) -> PreTrainedModel:
    """Random, and decided enough that rounding does not choose tokens. vLLM's CPU kernels want heads of 32 or more."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32 * num_heads,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=0,
        max_position_embeddings=512,
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config).eval()


def wide_model(seed: int) -> PreTrainedModel:
    """One that four ranks may share, which then repeat its key-value heads."""
    return model(seed, num_heads=4, width=192)


def save(one: PreTrainedModel, folder: Path) -> str:
    """The model in a folder, with a tokenizer in which every token is one character."""
    one.save_pretrained(folder)
    characters = ["<pad>", "<eos>"] + [chr(0x100 + number) for number in range(VOCAB - 2)]
    plain = Tokenizer(
        models.BPE(vocab={text: number for number, text in enumerate(characters)}, merges=[])
    )
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return str(folder)


def greedy(
    one: PreTrainedModel, prompt: list[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    """The likeliest tokens by transformers, up to the end-of-text token, and their log-probabilities."""
    row = torch.tensor([prompt])
    with torch.no_grad():
        row = one.generate(row, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        log_probs = one(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    tokens = row[0, len(prompt) :]
    return tokens.tolist(), log_probs.gather(1, tokens[:, None])[:, 0].tolist()
