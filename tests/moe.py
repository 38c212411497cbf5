# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts for tests: small, random, one for each way in which transformers stores experts."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.glm4_moe import Glm4MoeConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
_GROUPS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**_COMMON, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(
        **_COMMON,
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        mlp_only_layers=[0],
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **_COMMON, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "glm4_moe": Glm4MoeConfig(**_COMMON, **_GROUPS, partial_rotary_factor=0.5),
    "deepseek_v3": DeepseekV3Config(
        **{**_COMMON, **_GROUPS, **_LATENT, "head_dim": 8, "num_key_value_heads": 4},
        routed_scaling_factor=1.5,
    ),
    "gpt_oss": GptOssConfig(**_COMMON, num_local_experts=4, sliding_window=8),
}


def moe_model(family: str) -> PreTrainedModel:
    """A random model; what a router adds to its scores is random, too."""
    torch.manual_seed(3)
    config = type(CONFIGS[family]).from_dict(CONFIGS[family].to_dict())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not name.endswith("inv_freq"):
            torch.nn.init.normal_(tensor, mean=1.0 if "norm" in name else 0.0, std=0.1)
    return model.eval()
