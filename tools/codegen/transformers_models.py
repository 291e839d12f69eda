# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers with random weights: all of TorchInductor's dashboard, and other
architectures; `models` judges them.

Names are the dashboard's (huggingface_models_list.txt of pytorch's benchmarks/dynamo) where it has
the model.  Widths are 128, layers two, heads of 64.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

Sizes = dict[str, Any]
VOCABULARY = 512
# Tokens of an example, by device: Triton's interpreter is slow.
LENGTHS = {"cuda": 128, "cpu": 8}

_BERT: Sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 160,
}
_BART: Sizes = {
    "vocab_size": VOCABULARY,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_position_embeddings": 160,
}
_GPT2: Sizes = {
    "vocab_size": VOCABULARY,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 160,
    "n_ctx": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPTNEO: Sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 2,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 16,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5: Sizes = {
    "vocab_size": VOCABULARY,
    "d_model": 128,
    "d_kv": 64,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_LLAMA: Sizes = {
    **_BERT,
    "num_attention_heads": 4,
    "hidden_size": 256,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "pad_token_id": 0,
}
_VIT: Sizes = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "image_size": 64,
    "patch_size": 16,
    "num_labels": 16,
}
_DISTILBERT: Sizes = {
    "vocab_size": VOCABULARY,
    "dim": 128,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 256,
    "max_position_embeddings": 160,
}
_DEBERTA: Sizes = {
    **_BERT,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": -1,
}
_MOE: Sizes = {**_LLAMA, "num_experts_per_tok": 2}


class Row(NamedTuple):
    """One model: its class, its configuration, and what it is given.

    Attributes:
        kind: of what it is given, as `inputs` has it: `tokens` come with a label each, `labels` are
            one for each row, `questions` have a start and an end, `padded` a mask of attention.
        modes: what it is judged in.
    """

    model: str
    sizes: Sizes
    kind: str
    modes: tuple[str, ...] = ("inference", "training")


_INFERENCE, _TRAINING = ("inference",), ("training",)

# The dashboard's, in its order.
DASHBOARD: dict[str, Row] = {
    "AlbertForMaskedLM": Row("AlbertForMaskedLM", {**_BERT, "embedding_size": 64}, "tokens"),
    "AlbertForQuestionAnswering": Row(
        "AlbertForQuestionAnswering", {**_BERT, "embedding_size": 64}, "questions"
    ),
    "AllenaiLongformerBase": Row(
        "LongformerForMaskedLM",
        {**_BERT, "attention_window": [16, 16], "pad_token_id": 1},
        "tokens",
    ),
    "BartForCausalLM": Row("BartForCausalLM", _BART, "tokens"),
    "BartForConditionalGeneration": Row("BartForConditionalGeneration", _BART, "tokens"),
    "BertForMaskedLM": Row("BertForMaskedLM", _BERT, "tokens"),
    "BertForQuestionAnswering": Row("BertForQuestionAnswering", _BERT, "questions"),
    "BlenderbotForCausalLM": Row("BlenderbotForCausalLM", _BART, "tokens"),
    "BlenderbotForConditionalGeneration": Row(
        "BlenderbotForConditionalGeneration", _BART, "tokens"
    ),
    "BlenderbotSmallForCausalLM": Row("BlenderbotSmallForCausalLM", _BART, "tokens"),
    "BlenderbotSmallForConditionalGeneration": Row(
        "BlenderbotSmallForConditionalGeneration", _BART, "tokens"
    ),
    "CamemBert": Row("CamembertForMaskedLM", {**_BERT, "pad_token_id": 1}, "tokens"),
    "DebertaV2ForMaskedLM": Row(
        "DebertaV2ForMaskedLM",
        {**_DEBERTA, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True},
        "tokens",
    ),
    "DebertaV2ForQuestionAnswering": Row("DebertaV2ForQuestionAnswering", _DEBERTA, "questions"),
    "DistilBertForMaskedLM": Row("DistilBertForMaskedLM", _DISTILBERT, "tokens"),
    "DistilBertForQuestionAnswering": Row(
        "DistilBertForQuestionAnswering", _DISTILBERT, "questions"
    ),
    "DistillGPT2": Row("GPT2LMHeadModel", _GPT2, "tokens"),
    "ElectraForCausalLM": Row(
        "ElectraForCausalLM", {**_BERT, "embedding_size": 64, "is_decoder": True}, "tokens"
    ),
    "ElectraForQuestionAnswering": Row(
        "ElectraForQuestionAnswering", {**_BERT, "embedding_size": 64}, "questions"
    ),
    "GPT2ForSequenceClassification": Row(
        "GPT2ForSequenceClassification", {**_GPT2, "pad_token_id": 0}, "labels"
    ),
    "GPTJForCausalLM": Row("GPTJForCausalLM", {**_GPT2, "rotary_dim": 32}, "tokens"),
    "GPTJForQuestionAnswering": Row(
        "GPTJForQuestionAnswering", {**_GPT2, "rotary_dim": 32}, "questions"
    ),
    "GPTNeoForCausalLM": Row("GPTNeoForCausalLM", _GPTNEO, "tokens"),
    "GPTNeoForSequenceClassification": Row(
        "GPTNeoForSequenceClassification", {**_GPTNEO, "pad_token_id": 0}, "labels"
    ),
    "GoogleFnet": Row("FNetForMaskedLM", _BERT, "tokens", _TRAINING),
    "LayoutLMForMaskedLM": Row("LayoutLMForMaskedLM", _BERT, "tokens"),
    "LayoutLMForSequenceClassification": Row("LayoutLMForSequenceClassification", _BERT, "labels"),
    "M2M100ForConditionalGeneration": Row("M2M100ForConditionalGeneration", _BART, "tokens"),
    "MBartForCausalLM": Row("MBartForCausalLM", _BART, "tokens"),
    "MBartForConditionalGeneration": Row("MBartForConditionalGeneration", _BART, "tokens"),
    "MT5ForConditionalGeneration": Row("MT5ForConditionalGeneration", _T5, "tokens"),
    "MegatronBertForCausalLM": Row(
        "MegatronBertForCausalLM", {**_BERT, "is_decoder": True}, "tokens"
    ),
    "MegatronBertForQuestionAnswering": Row("MegatronBertForQuestionAnswering", _BERT, "questions"),
    "MobileBertForMaskedLM": Row(
        "MobileBertForMaskedLM",
        {**_BERT, "embedding_size": 64, "intra_bottleneck_size": 128, "intermediate_size": 128},
        "tokens",
    ),
    "MobileBertForQuestionAnswering": Row(
        "MobileBertForQuestionAnswering",
        {**_BERT, "embedding_size": 64, "intra_bottleneck_size": 128, "intermediate_size": 128},
        "questions",
    ),
    "OPTForCausalLM": Row(
        "OPTForCausalLM", {**_BERT, "ffn_dim": 256, "word_embed_proj_dim": 128}, "tokens"
    ),
    "PLBartForCausalLM": Row("PLBartForCausalLM", _BART, "tokens"),
    "PLBartForConditionalGeneration": Row("PLBartForConditionalGeneration", _BART, "tokens"),
    "PegasusForCausalLM": Row("PegasusForCausalLM", _BART, "tokens"),
    "PegasusForConditionalGeneration": Row("PegasusForConditionalGeneration", _BART, "tokens"),
    "RobertaForCausalLM": Row(
        "RobertaForCausalLM", {**_BERT, "is_decoder": True, "pad_token_id": 0}, "tokens"
    ),
    "RobertaForQuestionAnswering": Row(
        "RobertaForQuestionAnswering", {**_BERT, "pad_token_id": 0}, "questions"
    ),
    "T5ForConditionalGeneration": Row("T5ForConditionalGeneration", _T5, "tokens"),
    "T5Small": Row(
        "T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}, "tokens"
    ),
    "TrOCRForCausalLM": Row("TrOCRForCausalLM", _BART, "tokens"),
    "XGLMForCausalLM": Row(
        "XGLMForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "num_layers": 2,
            "attention_heads": 2,
            "ffn_dim": 256,
        },
        "tokens",
    ),
    "XLNetLMHeadModel": Row(
        "XLNetLMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "n_layer": 2,
            "n_head": 2,
            "d_inner": 256,
            "use_mems_eval": False,
        },
        "tokens",
    ),
    "YituTechConvBert": Row(
        "ConvBertForMaskedLM", {**_BERT, "embedding_size": 64, "num_attention_heads": 4}, "tokens"
    ),
    "Llama-3.2-1B": Row("LlamaForCausalLM", _LLAMA, "tokens"),
    "gemma-2-2b": Row(
        "Gemma2ForCausalLM", {**_LLAMA, "sliding_window": 16, "query_pre_attn_scalar": 64}, "tokens"
    ),
    "gemma-3-4b-it": Row(
        "Gemma3ForCausalLM", {**_LLAMA, "sliding_window": 16, "query_pre_attn_scalar": 64}, "tokens"
    ),
    "whisper-tiny": Row(
        "WhisperForConditionalGeneration",
        {
            **_BART,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 160,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        "speech",
    ),
    "Qwen3-0.6B": Row("Qwen3ForCausalLM", _LLAMA, "tokens"),
    "Mistral-7B-Instruct-v0.3": Row(
        "MistralForCausalLM", {**_LLAMA, "sliding_window": 16}, "tokens"
    ),
    "gpt-oss-20b": Row(
        "GptOssForCausalLM",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
        "tokens",
    ),
}

OTHERS: dict[str, Row] = {
    "BertPadded": Row("BertForMaskedLM", _BERT, "padded"),
    "LlamaPadded": Row("LlamaForCausalLM", _LLAMA, "padded"),
    "Bloom": Row(
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 128, "n_layer": 2, "n_head": 2},
        "tokens",
    ),
    "Clip": Row(
        "CLIPModel",
        {
            "text_config": {**_BERT, "bos_token_id": 1, "eos_token_id": 2},
            "vision_config": {**_VIT, "projection_dim": 64},
            "projection_dim": 64,
        },
        "pair",
    ),
    "Cohere": Row("CohereForCausalLM", _LLAMA, "tokens"),
    "ConvNext": Row(
        "ConvNextForImageClassification",
        {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1], "num_labels": 16},
        "image",
    ),
    "Ctrl": Row("CTRLLMHeadModel", {**_GPT2, "dff": 256}, "tokens"),
    "DeepseekV3": Row(
        "DeepseekV3ForCausalLM",
        {
            **_LLAMA,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 64,
        },
        "tokens",
    ),
    "Deberta": Row("DebertaForMaskedLM", _DEBERTA, "tokens"),
    "Dinov2": Row("Dinov2ForImageClassification", {**_VIT, "mlp_ratio": 2}, "image"),
    "Esm": Row(
        "EsmForMaskedLM",
        {**_BERT, "pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "rotary"},
        "tokens",
    ),
    "Falcon": Row(
        "FalconForCausalLM",
        {**_BERT, "multi_query": True, "parallel_attn": True, "alibi": False, "bias": False},
        "tokens",
    ),
    "Gemma": Row("GemmaForCausalLM", _LLAMA, "tokens"),
    "GptNeoX": Row("GPTNeoXForCausalLM", {**_BERT, "rotary_pct": 0.25}, "tokens"),
    "Granite": Row(
        "GraniteForCausalLM",
        {
            **_LLAMA,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        "tokens",
    ),
    "Led": Row(
        "LEDForConditionalGeneration",
        {
            **_BART,
            "max_encoder_position_embeddings": 160,
            "max_decoder_position_embeddings": 160,
            "attention_window": 16,
        },
        "tokens",
    ),
    "Mamba": Row(
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2},
        "tokens",
    ),
    "Marian": Row(
        "MarianMTModel", {**_BART, "pad_token_id": 0, "decoder_start_token_id": 0}, "tokens"
    ),
    "Mixtral": Row("MixtralForCausalLM", {**_MOE, "num_local_experts": 4}, "tokens"),
    "Mpnet": Row("MPNetForMaskedLM", _BERT, "tokens"),
    "Mpt": Row(
        "MptForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "n_layers": 2,
            "n_heads": 2,
            "expansion_ratio": 2,
            "max_seq_len": 160,
        },
        "tokens",
    ),
    "Nemotron": Row("NemotronForCausalLM", _LLAMA, "tokens"),
    "Olmo2": Row("Olmo2ForCausalLM", _LLAMA, "tokens"),
    "Phi": Row("PhiForCausalLM", {**_BERT, "partial_rotary_factor": 0.5}, "tokens"),
    "Phi3": Row("Phi3ForCausalLM", {**_LLAMA, "bos_token_id": 1, "eos_token_id": 2}, "tokens"),
    "Qwen2": Row("Qwen2ForCausalLM", _LLAMA, "tokens"),
    "Qwen2Moe": Row(
        "Qwen2MoeForCausalLM",
        {
            **_MOE,
            "num_experts": 4,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
        "tokens",
    ),
    "ResNet": Row(
        "ResNetForImageClassification",
        {
            "embedding_size": 32,
            "hidden_sizes": [32, 64, 96, 128],
            "depths": [1, 1, 1, 1],
            "num_labels": 16,
        },
        "image",
    ),
    "RoFormer": Row("RoFormerForMaskedLM", _BERT, "tokens"),
    "Segformer": Row(
        "SegformerForImageClassification",
        {
            "hidden_sizes": [32, 64, 128, 128],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 64,
            "num_labels": 16,
        },
        "image",
    ),
    "SmolLm3": Row("SmolLM3ForCausalLM", {**_LLAMA, "pad_token_id": 1}, "tokens"),
    "SqueezeBert": Row("SqueezeBertForMaskedLM", {**_BERT, "embedding_size": 128}, "tokens"),
    "StableLm": Row("StableLmForCausalLM", {**_LLAMA, "partial_rotary_factor": 0.25}, "tokens"),
    "Starcoder2": Row("Starcoder2ForCausalLM", _LLAMA, "tokens"),
    "Swin": Row(
        "SwinForImageClassification",
        {
            "image_size": 64,
            "patch_size": 4,
            "embed_dim": 64,
            "depths": [2, 2],
            "num_heads": [1, 2],
            "window_size": 4,
            "num_labels": 16,
        },
        "image",
    ),
    "Vit": Row("ViTForImageClassification", _VIT, "image"),
    "Wav2Vec2": Row(
        "Wav2Vec2ForSequenceClassification",
        {
            **_BERT,
            "conv_dim": [64, 64, 64],
            "conv_kernel": [10, 3, 3],
            "conv_stride": [5, 2, 2],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
            "num_labels": 16,
            "classifier_proj_size": 64,
        },
        "audio",
    ),
    "XLMRoberta": Row("XLMRobertaForMaskedLM", {**_BERT, "pad_token_id": 0}, "tokens"),
}
ROWS = DASHBOARD | OTHERS

# As huggingface.yaml of the dashboard has them.
HIGHER_TRAINING = frozenset({"MT5ForConditionalGeneration", "BertForMaskedLM"})
HIGHER_INFERENCE = frozenset({"GPT2ForSequenceClassification"})
LARGER_MULTIPLIER = frozenset({"GPT2ForSequenceClassification", "BertForMaskedLM"})


def build(name: str, device: str) -> torch.nn.Module:
    """Return a model with random weights and without dropout.

    Raises:
        LookupError: this release of transformers has no such model.
    """
    transformers, row = importlib.import_module("transformers"), ROWS[name]
    made = getattr(transformers, row.model, None)
    if made is None:
        raise LookupError(f"transformers {transformers.__version__} has no {row.model}")
    config = made.config_class(**(_quarter(row.sizes) if device == "cpu" else row.sizes))
    for part in (config, *(one for one in vars(config).values() if hasattr(one, "to_dict"))):
        for key, value in vars(part).items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
        if hasattr(part, "use_cache"):
            part.use_cache = False
    model: torch.nn.Module = made(config)
    return model


def _quarter(sizes: Any) -> Any:
    """Return a configuration with a quarter of each size, for the interpreter; what is under 32
    counts things, and images keep their pixels.
    """
    match sizes:
        case dict():
            return {
                key: value if key == "image_size" else _quarter(value)
                for key, value in sizes.items()
            }
        case list():
            return [_quarter(one) for one in sizes]
        case bool() | None:
            return sizes
        case int():
            return sizes // 4 if sizes >= 32 else sizes
        case _:
            return sizes


def modes(name: str) -> tuple[str, ...]:
    """Return what a model is judged in."""
    return ROWS[name].modes


def tolerance(name: str, mode: str) -> tuple[float, bool]:
    """Return the dashboard's tolerance for a model, and whether small tensors may be
    further off.
    """
    higher = name in (HIGHER_TRAINING if mode == "training" else HIGHER_INFERENCE)
    plain, raised = (1e-2, 2e-2) if mode == "training" else (1e-3, 4e-3)
    return raised if higher else plain, name in LARGER_MULTIPLIER


def inputs(name: str, batch: int, device: str) -> dict[str, Any]:
    """Return an example of `batch` rows, on the CPU."""
    length, vocabulary = LENGTHS[device], VOCABULARY if device == "cuda" else VOCABULARY // 4
    draw = torch.Generator().manual_seed(batch)

    def integers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=draw)

    tokens = (
        integers(vocabulary - 3, batch, length) + 3
    )  # the first ones are marks, such as padding
    targets = integers(vocabulary - 3, batch, length) + 3
    pixels = torch.randn(batch, 3, 64, 64, generator=draw)
    return {
        "image": {"pixel_values": pixels, "labels": integers(16, batch)},
        "audio": {
            "input_values": torch.randn(batch, 1600, generator=draw),
            "labels": integers(16, batch),
        },
        "speech": {
            "input_features": torch.randn(
                batch, 16, 64 if device == "cuda" else 16, generator=draw
            ),
            "labels": targets,
        },
        "pair": {"input_ids": tokens, "pixel_values": pixels, "return_loss": True},
        "questions": {
            "input_ids": tokens,
            "start_positions": integers(length, batch),
            "end_positions": integers(length, batch),
        },
        "labels": {"input_ids": tokens, "labels": integers(2, batch)},
        "padded": {
            "input_ids": tokens,
            "labels": targets,
            "attention_mask": (torch.arange(length) <= integers(length, batch)[:, None]).long(),
        },
        "tokens": {"input_ids": tokens, "labels": targets},
    }[ROWS[name].kind]


def loss(outputs: Any, _given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number that is differentiated."""
    found: torch.Tensor = outputs["loss"]
    return found
