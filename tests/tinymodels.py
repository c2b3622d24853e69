"""Tiny models with random weights, one per kind of attention: no downloads, no real models."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def build(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # the usual initialisation leaves biases and norms at 0 or 1 and logits flat
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model


def gemma3():
    kinds = ["sliding_attention", "full_attention"] * 2
    return build(
        transformers.Gemma3TextConfig(
            **COMMON, num_hidden_layers=4, head_dim=16, sliding_window=6, layer_types=kinds, query_pre_attn_scalar=10
        )
    )


def gemma2():
    return build(
        transformers.Gemma2Config(
            **COMMON, num_hidden_layers=2, head_dim=16, sliding_window=6, attn_logit_softcapping=2.0,
            query_pre_attn_scalar=16,
        )
    )  # fmt: skip


def llama(**changes):
    return build(transformers.LlamaConfig(**(COMMON | changes), num_hidden_layers=2))


def qwen2():
    return build(transformers.Qwen2Config(**COMMON, num_hidden_layers=2))


def qwen3_next(**changes):
    return build(
        transformers.Qwen3NextConfig(
            **(COMMON | changes), num_hidden_layers=4, head_dim=8, num_experts=2, num_experts_per_tok=1,
            moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_key_heads=2,
            linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        )
    )  # fmt: skip


def jamba():
    """Its recurrent layers forget their state when they are given several tokens after it."""
    return build(
        transformers.JambaConfig(
            **COMMON, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
            num_experts_per_tok=1, use_mamba_kernels=False,
        )
    )  # fmt: skip


def recurrent_gemma():
    """Keeps its recurrent state in the model, not in the cache."""
    return build(transformers.RecurrentGemmaConfig(**COMMON, num_hidden_layers=3, attention_window_size=6))


def deepseek_v3():
    options = {**COMMON, "num_key_value_heads": 4}
    return build(
        transformers.DeepseekV3Config(
            **options, num_hidden_layers=2, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=8, first_k_dense_replace=2, n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=1,
            moe_intermediate_size=16,
        )
    )  # fmt: skip


def gpt_oss():
    return build(
        transformers.GptOssConfig(
            **COMMON, num_hidden_layers=2, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
        )
    )


def word_tokenizer():
    """One token per word `w1` ... `w63`."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, 64)}}
    tokenizer = Tokenizer(kinds.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_tokenizer():
    """One token per byte; knows any text."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(kinds.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_folder(path, model=None, tokenizer=None):
    """A model folder as Hugging Face saves it; by default a llama and a tokenizer of one token per word."""
    (model or llama()).save_pretrained(path)
    (tokenizer or word_tokenizer()).save_pretrained(path)
    return path
