# SPDX-License-Identifier: Apache-2.0
"""Which part of a plain decoder's weights each rank of a rollout group has (tensor parallelism, arXiv:1909.08053).

q_proj, k_proj, v_proj      rows: some of the heads; with fewer key-value heads than ranks, several have the same
o_proj                      columns: of the same heads
gate_proj, up_proj          rows: some of the MLP's width;      down_proj   its columns
embed_tokens, lm_head       rows: some of the vocabulary
norms, o_proj.bias          whole on every rank
"""

from transformers import PreTrainedModel

from quadriga.partition import part_of
from quadriga.rollout.group import RolloutGroup
from quadriga.weight_sync.reshard import Piece


def shards_of(model: PreTrainedModel, group: RolloutGroup) -> dict[str, Piece]:
    """By name the part of each parameter of a model, which may be on "meta", that a rank has."""
    config, rank, size = model.config.get_text_config(), group.rank, group.size
    num_heads, num_keys = config.num_attention_heads, config.num_key_value_heads
    head_size = model.base_model.layers[0].self_attn.head_dim
    heads, keys = num_heads // size * head_size, max(1, num_keys // size) * head_size
    query = rank * heads, heads
    key = rank * num_keys // size * head_size, keys
    width, vocabulary = part_of(config.intermediate_size, size, rank), part_of(config.vocab_size, size, rank)
    cuts: dict[str, tuple[int, tuple[int, int]]] = {
        "q_proj.weight": (0, query), "q_proj.bias": (0, query), "o_proj.weight": (1, query),
        "k_proj.weight": (0, key), "k_proj.bias": (0, key), "v_proj.weight": (0, key), "v_proj.bias": (0, key),
        "gate_proj.weight": (0, width), "gate_proj.bias": (0, width), "down_proj.weight": (1, width),
        "up_proj.weight": (0, width), "up_proj.bias": (0, width),
        "embed_tokens.weight": (0, vocabulary), "lm_head.weight": (0, vocabulary), "lm_head.bias": (0, vocabulary),
    }  # fmt: skip
    found = {}
    for name, parameter in model.named_parameters():
        start, shape = [0] * parameter.dim(), list(parameter.shape)
        if (cut := cuts.get(".".join(name.split(".")[-2:]))) is not None:
            dim, (start[dim], shape[dim]) = cut[0], cut[1]
        found[name] = Piece(tuple(start), tuple(shape))
    return found
