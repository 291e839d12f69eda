# SPDX-License-Identifier: Apache-2.0
"""Models of TorchInductor's dashboard in their own sizes, with random weights: those of
transformers as their configuration is by default, those of timm whole; `models --kind dashboard
--time` measures them.

Batches are a quarter of the dashboard's, so that a dozen processes fit on a GPU, and models of more
than two billion parameters are left out. What the dashboard had in earlier years, and some of
transformers that it never had, are measured in inference alone: no rule was made for them.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from tools.codegen import timm_models, transformers_models


class Row(NamedTuple):
    """One model.

    Attributes:
        batch: rows of an example; images of a model of timm.
        length: tokens of a row; 0 of a model of timm.
        sizes: what its configuration has other than by default.
        modes: what is measured.
    """

    batch: int
    length: int
    sizes: dict[str, Any]
    modes: tuple[str, ...]


_BOTH, _INFERENCE = ("inference", "training"), ("inference",)
_CLASSES = 1000
_LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_OF_TRANSFORMERS = {
    "AlbertForMaskedLM": Row(2, 512, {}, _BOTH),
    "AllenaiLongformerBase": Row(2, 1024, {"max_position_embeddings": 4098}, _BOTH),
    "BartForCausalLM": Row(2, 1024, {}, _BOTH),
    "BartForConditionalGeneration": Row(1, 1024, {}, _BOTH),
    "BertForMaskedLM": Row(8, 512, {}, _BOTH),
    "BertForQuestionAnswering": Row(8, 512, {}, _BOTH),
    "BlenderbotSmallForConditionalGeneration": Row(32, 128, {}, _BOTH),
    "CamemBert": Row(8, 512, {"max_position_embeddings": 514}, _BOTH),
    "DebertaV2ForMaskedLM": Row(2, 512, {}, _INFERENCE),
    "DistilBertForMaskedLM": Row(16, 512, {}, _BOTH),
    "DistilBertForQuestionAnswering": Row(32, 512, {}, _BOTH),
    "DistillGPT2": Row(8, 512, {"n_layer": 6}, _BOTH),
    "ElectraForCausalLM": Row(16, 512, {}, _BOTH),
    "ElectraForQuestionAnswering": Row(32, 512, {}, _BOTH),
    "GPT2ForSequenceClassification": Row(2, 1024, {"pad_token_id": 0}, _BOTH),
    "GoogleFnet": Row(8, 512, {}, _BOTH),
    "LayoutLMForMaskedLM": Row(8, 512, {}, _BOTH),
    "LayoutLMForSequenceClassification": Row(8, 512, {}, _BOTH),
    "M2M100ForConditionalGeneration": Row(16, 128, {}, _INFERENCE),
    "MBartForCausalLM": Row(2, 1024, {}, _BOTH),
    "MT5ForConditionalGeneration": Row(8, 128, {}, _BOTH),
    "MegatronBertForCausalLM": Row(4, 512, {}, _INFERENCE),
    "MobileBertForMaskedLM": Row(64, 128, {}, _BOTH),
    "OPTForCausalLM": Row(1, 2048, {}, _BOTH),
    "PLBartForCausalLM": Row(4, 1024, {}, _BOTH),
    "PegasusForCausalLM": Row(32, 128, {}, _INFERENCE),
    "RobertaForCausalLM": Row(8, 512, {"max_position_embeddings": 514}, _BOTH),
    "T5ForConditionalGeneration": Row(2, 1024, {}, _BOTH),
    "T5Small": Row(2, 1024, {}, _BOTH),
    "TrOCRForCausalLM": Row(16, 256, {}, _INFERENCE),
    "XGLMForCausalLM": Row(8, 128, {}, _INFERENCE),
    "XLNetLMHeadModel": Row(4, 512, {}, _INFERENCE),
    "YituTechConvBert": Row(8, 512, {}, _BOTH),
    "Llama-3.2-1B": Row(2, 512, _LLAMA, _INFERENCE),
    "Qwen3-0.6B": Row(2, 512, _QWEN, _INFERENCE),
    "BioGpt": Row(4, 512, {}, _INFERENCE),
    "Deberta": Row(8, 512, {}, _INFERENCE),
    "GPTNeoForCausalLM": Row(2, 512, {}, _INFERENCE),
    "ModernBert": Row(8, 512, {}, _INFERENCE),
    "Mpnet": Row(8, 512, {"max_position_embeddings": 514}, _INFERENCE),
    "RoFormer": Row(8, 512, {}, _INFERENCE),
    "SqueezeBert": Row(8, 512, {}, _INFERENCE),
}
_IMAGES = 32
#: Name in timm -> pixels of its images.
_OF_TIMM = {
    "adv_inception_v3": 299,
    "beit_base_patch16_224": 224,
    "convnextv2_nano": 224,
    "deit_base_distilled_patch16_224": 224,
    "deit_tiny_patch16_224": 224,
    "dm_nfnet_f0": 192,
    "ghostnet_100": 224,
    "inception_v3": 299,
    "mobilenetv2_100": 224,
    "mobilenetv3_large_100": 224,
    "mobilevit_s": 256,
    "nfnet_l0": 224,
    "repvgg_a2": 224,
    "swin_base_patch4_window7_224": 224,
    "tf_efficientnet_b0": 224,
    "visformer_small": 224,
    "vit_base_patch14_dinov2": 518,
    "vit_base_patch16_siglip_256": 256,
}
_FORMER_OF_TIMM = {
    "botnet26t_256": 256,
    "coat_lite_mini": 224,
    "convit_base": 224,
    "convnext_base": 224,
    "crossvit_9_240": 240,
    "cspdarknet53": 256,
    "dla102": 224,
    "eca_halonext26ts": 256,
    "ese_vovnet19b_dw": 224,
    "gernet_l": 256,
    "gmixer_24_224": 224,
    "gmlp_s16_224": 224,
    "levit_128": 224,
    "mixer_b16_224": 224,
    "mnasnet_100": 224,
    "pit_b_224": 224,
    "poolformer_m36": 224,
    "regnety_002": 224,
    "res2net50_14w_8s": 224,
    "resmlp_12_224": 224,
    "rexnet_100": 224,
    "selecsls42b": 224,
    "tinynet_a": 192,
    "twins_pcpvt_base": 224,
    "volo_d1_224": 224,
}
_PIXELS = _OF_TIMM | _FORMER_OF_TIMM
ROWS = (
    _OF_TRANSFORMERS
    | {name: Row(_IMAGES, 0, {}, _BOTH) for name in _OF_TIMM}
    | {name: Row(_IMAGES, 0, {}, _INFERENCE) for name in _FORMER_OF_TIMM}
)
# The batch that a row's is for; others are in proportion.
_FIRST_BATCH = 8
_SMALL = 4


def build(name: str, _device: str) -> torch.nn.Module:
    """Return a model with random weights, without dropout."""
    row = ROWS[name]
    if not row.length:
        timm = importlib.import_module("timm")
        found: torch.nn.Module = timm.create_model(name, num_classes=_CLASSES)
        return found
    return transformers_models.built(transformers_models.ROWS[name].model, row.sizes)


def modes(name: str) -> tuple[str, ...]:
    """Return what a model is measured in."""
    return ROWS[name].modes


def tolerance(name: str, mode: str) -> tuple[float, bool]:
    """Return the dashboard's tolerance, and whether small tensors may be further off."""
    if ROWS[name].length:
        return transformers_models.tolerance(name, mode)
    return timm_models.tolerance(name, mode)


def inputs(name: str, batch: int, device: str) -> dict[str, Any]:
    """Return an example, on the CPU: `batch` eighths of the row's, or a small one."""
    row, draw = ROWS[name], torch.Generator().manual_seed(batch)
    count = batch if device == "cpu" else max(1, row.batch * batch // _FIRST_BATCH)
    if not row.length:
        pixels = _PIXELS[name]
        return {
            "x": torch.randn(count, 3, pixels, pixels, generator=draw),
            "labels": torch.randint(_CLASSES, (count,), generator=draw),
        }
    kind = transformers_models.ROWS[name].kind
    length = row.length // _SMALL if device == "cpu" else row.length
    return transformers_models.example(kind, count, length, transformers_models.VOCABULARY, draw)


def loss(outputs: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number that is differentiated."""
    if hasattr(outputs, "keys"):
        return transformers_models.loss(outputs, given)
    return timm_models.loss(outputs, given)
