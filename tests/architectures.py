# SPDX-License-Identifier: Apache-2.0
"""Small random models of many architectures, made from transformers' own configuration classes."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY, _LEFT_OUT = 97, object()
_PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_MAMBA = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("Llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}),
    "SmolLM3": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "Qwen2.5": ("Qwen2", {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {}),
    "Qwen3-MoE": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "Qwen3-Next": ("Qwen3Next", {
        **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4}),
    "Mistral": ("Mistral", {"sliding_window": 6}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "Gemma 2": ("Gemma2", {
        **_WINDOWS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}),
    "Gemma 3 (text)": ("Gemma3Text", {**_WINDOWS, "query_pre_attn_scalar": 16}),
    "Phi-3": ("Phi3", {"sliding_window": 6, "partial_rotary_factor": 0.5}),
    "GLM-4": ("Glm4", {"partial_rotary_factor": 0.5}),
    "GLM-4-MoE": ("Glm4Moe", {
        **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True}),
    "DeepSeek-V3": ("DeepseekV3", {
        **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8}),
    "gpt-oss": ("GptOss", {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "OLMo 2": ("Olmo2", {}),
    "Granite": ("Granite", {
        "logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    "Falcon-H1": ("FalconH1", {**_MAMBA, "lm_head_multiplier": 0.5, "mamba_expand": 2}),
}  # fmt: skip
"""The architectures of docs/models.md: the prefix of the configuration's class, and what is not as in `_PLAIN`."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {"n_inner": 64, "activation_function": "gelu_new"}),
    "OPT": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    "GPT-NeoX": ("GPTNeoX", {}),
    "Phi": ("Phi", {}),
    "StarCoder 2": ("Starcoder2", {"sliding_window": 6}),
    "Gemma": ("Gemma", {}),
    "OLMo 3": ("Olmo3", _WINDOWS),
    "Cohere": ("Cohere", {"logit_scale": 0.25}),
    "Cohere 2": ("Cohere2", {**_WINDOWS, "logit_scale": 0.25}),
    "EXAONE 4": ("Exaone4", _WINDOWS),
    "Bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "MPT": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "expansion_ratio": 2}),
    "Falcon": ("Falcon", {"head_dim": _LEFT_OUT, "new_decoder_architecture": False, "multi_query": True}),
    "Falcon with ALiBi": ("Falcon", {"head_dim": _LEFT_OUT, "alibi": True, "multi_query": False, "num_kv_heads": 4}),
    "StableLM": ("StableLm", {"partial_rotary_factor": 0.5}),
    "Mamba": ("Mamba", {"state_size": 8}),
    "Mamba 2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 8}),
    "Bamba": ("Bamba", {**_MAMBA, "mamba_d_ssm": _LEFT_OUT, "attn_layer_indices": [1], "mamba_expand": 2}),
    "Granite 4 (hybrid)": ("GraniteMoeHybrid", {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_chunk_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
        "logits_scaling": 2.0}),
    "Llama 4 (text)": ("Llama4Text", {
        "num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 6, "num_hidden_layers": 4}),
    "Jamba": ("Jamba", {
        "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 2,
        "expert_layer_period": 2, "mamba_d_state": 8, "use_mamba_kernels": False}),
    "RecurrentGemma": ("RecurrentGemma", {
        "num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 6}),
    "GPT-J": ("GPTJ", {"n_inner": 64, "rotary_dim": 8}),
    "GPT-Neo": ("GPTNeo", {"attention_types": [[["global", "local"], 1]], "window_size": 6, "num_layers": 2}),
    "CodeGen": ("CodeGen", {"n_inner": 64, "rotary_dim": 8, "n_embd": 64}),
    "BERT as a decoder": ("Bert", {"is_decoder": True}),
    "BERT": ("Bert", {}),
    "Helium": ("Helium", {}),
    "NanoChat": ("NanoChat", {"final_logit_softcapping": 3.0}),
}  # fmt: skip
"""Architectures that docs/models.md does not name: they are computed, or refused, and never wrong."""


def config_of(name: str) -> Any:
    """The configuration of a small model."""
    prefix, own = (MATRIX | OTHERS)[name]
    kind = getattr(transformers, f"{prefix}Config")
    return kind(
        **{key: value for key, value in {**_PLAIN, **own}.items() if value is not _LEFT_OUT}
    )


def make_model(config: Any, attention: str) -> PreTrainedModel:
    """The same random float32 model at each call, with weights of a size at which each part of it matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
        generator = torch.Generator().manual_seed(1)
        for one in model.parameters():
            noise = torch.randn(one.shape, generator=generator)
            one.data = (
                noise * one.shape[-1] ** -0.5 if one.dim() > 1 else one.detach() + 0.2 * noise
            )
    return model.eval()
