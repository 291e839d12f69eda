# SPDX-License-Identifier: Apache-2.0
"""Small models of timm with random weights: all of TorchInductor's dashboard, past and present, and
other families; `models` judges them.

Names of the dashboard (timm_models_list.txt of pytorch's benchmarks/dynamo) stand for a small
relative of the same architecture: fewer layers, narrower, images of 64 to 224 pixels.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch.nn import functional

CLASSES = 16
_NARROW: dict[str, Any] = {"img_size": 64, "embed_dim": 128, "depth": 2, "num_heads": 2}
_FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (32, 64, 128, 256)}
_ONE_EACH: dict[str, Any] = {"layers": (1, 1, 1, 1)}
_SWIN: dict[str, Any] = {
    "img_size": 64,
    "window_size": 4,
    "embed_dim": 64,
    "depths": (2, 2),
    "num_heads": (1, 2),
}


class Row(NamedTuple):
    """One model: its name in timm, the pixels of its images, what is smaller than timm's own, and
    of how many blocks the first are kept, if not all.
    """

    model: str
    pixels: int
    smaller: dict[str, Any]
    blocks: int | None = None


# The 18 of today's list, in its order.
DASHBOARD: dict[str, Row] = {
    "adv_inception_v3": Row("inception_v3", 96, {"aux_logits": False}),
    "beit_base_patch16_224": Row("beit_base_patch16_224", 64, _NARROW),
    "convnextv2_nano": Row("convnextv2_nano", 64, _FOUR),
    "deit_base_distilled_patch16_224": Row("deit_base_distilled_patch16_224", 64, _NARROW),
    "deit_tiny_patch16_224": Row("deit_tiny_patch16_224", 64, {"img_size": 64, "depth": 2}),
    "dm_nfnet_f0": Row("dm_nfnet_f0", 64, {}),
    "ghostnet_100": Row("ghostnet_100", 64, {}),
    "inception_v3": Row("inception_v3", 299, {"aux_logits": True}),
    "mobilenetv2_100": Row("mobilenetv2_100", 64, {}),
    "mobilenetv3_large_100": Row("mobilenetv3_large_100", 64, {}),
    "mobilevit_s": Row("mobilevit_s", 64, {}),
    "nfnet_l0": Row("nfnet_l0", 64, {}),
    "repvgg_a2": Row("repvgg_a0", 64, {}),
    "swin_base_patch4_window7_224": Row("swin_base_patch4_window7_224", 64, _SWIN),
    "tf_efficientnet_b0": Row("tf_efficientnet_b0", 64, {}),
    "visformer_small": Row(
        "visformer_small", 64, {"img_size": 64, "embed_dim": 96, "depth": (1, 1, 1)}
    ),
    "vit_base_patch14_dinov2": Row("vit_base_patch14_dinov2", 70, {**_NARROW, "img_size": 70}),
    "vit_base_patch16_siglip_256": Row("vit_base_patch16_siglip_256", 64, _NARROW),
}

# Of the list of 60 that came before it.
FORMER: dict[str, Row] = {
    "botnet26t_256": Row("botnet26t_256", 128, {"img_size": 128}),
    "cait_m36_384": Row("cait_xxs24_224", 64, {"img_size": 64, "depth": 2}),
    "coat_lite_mini": Row("coat_lite_tiny", 64, {"img_size": 64, "serial_depths": (1, 1, 1, 1)}),
    "convit_base": Row("convit_tiny", 64, {"img_size": 64, "depth": 3, "local_up_to_layer": 2}),
    "convnext_base": Row("convnext_atto", 64, {"depths": (1, 1, 1, 1)}),
    "crossvit_9_240": Row("crossvit_9_240", 240, {"depth": ((1, 1, 0), (1, 1, 0), (1, 1, 0))}),
    "cspdarknet53": Row("cspdarknet53", 64, {}),
    "dla102": Row("dla46_c", 64, {}),
    "dpn107": Row("dpn48b", 64, {}),
    "eca_botnext26ts_256": Row("eca_botnext26ts_256", 128, {"img_size": 128}),
    "eca_halonext26ts": Row("eca_halonext26ts", 256, {}),
    "ese_vovnet19b_dw": Row("ese_vovnet19b_dw", 64, {}),
    "fbnetc_100": Row("fbnetc_100", 64, {}),
    "fbnetv3_b": Row("fbnetv3_b", 64, {}),
    "gernet_l": Row("gernet_s", 64, {}),
    "gmixer_24_224": Row("gmixer_12_224", 224, {}, blocks=2),
    "gmlp_s16_224": Row("gmlp_ti16_224", 224, {}, blocks=2),
    "hrnet_w18": Row("hrnet_w18_small", 64, {}),
    "jx_nest_base": Row("nest_tiny_jx", 224, {}),
    "lcnet_050": Row("lcnet_050", 64, {}),
    "levit_128": Row("levit_128s", 64, {"img_size": 64}),
    "mixer_b16_224": Row("mixer_s32_224", 224, {}, blocks=2),
    "mixnet_l": Row("mixnet_s", 64, {}),
    "mnasnet_100": Row("mnasnet_small", 64, {}),
    "pit_b_224": Row("pit_ti_224", 64, {"img_size": 64}),
    "pnasnet5large": Row("pnasnet5large", 96, {}),
    "poolformer_m36": Row("poolformer_s12", 64, {}),
    "regnety_002": Row("regnety_002", 64, {}),
    "res2net50_14w_8s": Row("res2net50_14w_8s", 64, _ONE_EACH),
    "res2next50": Row("res2next50", 64, _ONE_EACH),
    "resmlp_12_224": Row("resmlp_12_224", 224, {}, blocks=2),
    "resnest101e": Row("resnest14d", 64, {}),
    "rexnet_100": Row("rexnet_100", 64, {}),
    "sebotnet33ts_256": Row("sebotnet33ts_256", 128, {"img_size": 128}),
    "selecsls42b": Row("selecsls42b", 64, {}),
    "spnasnet_100": Row("spnasnet_100", 64, {}),
    "swsl_resnext101_32x16d": Row("resnext50_32x4d", 64, _ONE_EACH),
    "tf_mixnet_l": Row("tf_mixnet_s", 64, {}),
    "tinynet_a": Row("tinynet_e", 64, {}),
    "tnt_s_patch16_224": Row("tnt_s_patch16_224", 64, {"img_size": 64, "depth": 2}),
    "twins_pcpvt_base": Row("twins_pcpvt_small", 64, {"img_size": 64, "depths": (1, 1, 1, 1)}),
    "vit_base_patch16_224": Row("vit_tiny_patch16_224", 64, {"img_size": 64, "depth": 2}),
    "volo_d1_224": Row("volo_d1_224", 64, {"img_size": 64}),
    "xcit_large_24_p8_224": Row("xcit_nano_12_p16_224", 64, {"img_size": 64, "depth": 2}),
}

OTHERS: dict[str, Row] = {
    "caformer": Row("caformer_s18", 64, {}),
    "coatnet": Row("coatnet_pico_rw_224", 64, {"img_size": 64}),
    "davit": Row(
        "davit_tiny",
        64,
        {"depths": (1, 1, 1, 1), "embed_dims": (32, 64, 128, 256), "num_heads": (1, 2, 4, 8)},
    ),
    "densenet": Row("densenet121", 64, {"block_config": (2, 2, 2, 2)}),
    "edgenext": Row("edgenext_xx_small", 64, {"depths": (2, 2, 2, 2)}),
    "efficientformer": Row("efficientformer_l1", 224, {"depths": (1, 1, 1, 2)}),
    "efficientvit": Row("efficientvit_b0", 64, {}),
    "eva02": Row("eva02_tiny_patch14_224", 70, {"img_size": 70, "depth": 2}),
    "fastvit": Row("fastvit_t8", 64, {}),
    "gcvit": Row("gcvit_xxtiny", 64, {"img_size": 64}),
    "hgnet": Row("hgnetv2_b0", 64, {}),
    "hiera": Row("hiera_tiny_224", 64, {"img_size": 64, "stages": (1, 1, 1, 1)}),
    "inception_next": Row("inception_next_atto", 64, {"depths": (1, 1, 1, 1)}),
    "mambaout": Row("mambaout_femto", 64, {"depths": (1, 1, 1, 1)}),
    "maxvit": Row("maxvit_rmlp_pico_rw_256", 64, {"img_size": 64}),
    "pvt_v2": Row("pvt_v2_b0", 64, {"depths": (1, 1, 1, 1)}),
    "repvit": Row("repvit_m0_9", 64, {}),
    "resnet18": Row("resnet18", 64, {}),
    "resnetv2": Row("resnetv2_50", 64, _ONE_EACH),
    "sequencer": Row("sequencer2d_s", 64, {"layers": (1, 1, 1, 1), "img_size": 64}),
    "seresnet": Row("legacy_seresnet18", 64, {}),
    "shvit": Row("shvit_s1", 64, {}),
    "sknet": Row("skresnet18", 64, {}),
    "starnet": Row("starnet_s1", 64, {}),
    "swinv2": Row("swinv2_tiny_window8_256", 64, _SWIN),
    "vgg": Row("vgg11", 64, {}),
    "vit_relpos": Row("vit_relpos_small_patch16_224", 64, {"img_size": 64, "depth": 2}),
    "xception": Row("xception41", 96, {}),
}
ROWS = DASHBOARD | FORMER | OTHERS

# As the dashboard has them: its timm_models.yaml of today, and its list of 60 for those of FORMER.
HIGHER_TRAINING = {
    "inception_v3": 4e-2,
    "mobilenetv3_large_100": 4e-2,
    "deit_base_distilled_patch16_224": 8e-2,
    "vit_base_patch16_siglip_256": 8e-2,
    "beit_base_patch16_224": 16e-2,
    "crossvit_9_240": 4e-2,
    "fbnetv3_b": 4e-2,
    "gmixer_24_224": 4e-2,
    "hrnet_w18": 4e-2,
    "mixer_b16_224": 4e-2,
    "selecsls42b": 4e-2,
    "convnext_base": 4e-2,
    "cait_m36_384": 4e-2,
    "levit_128": 8e-2,
    "sebotnet33ts_256": 8e-2,
    "cspdarknet53": 8e-2,
}
LARGER_MULTIPLIER = frozenset(
    {
        "inception_v3",
        "mobilenetv3_large_100",
        "vit_base_patch14_dinov2",
        "cspdarknet53",
        "cait_m36_384",
    }
)


def build(name: str, _device: str) -> torch.nn.Module:
    """Return a model with random weights.

    Raises:
        LookupError: this release of timm has no such model.
    """
    timm, row = importlib.import_module("timm"), ROWS[name]
    if not timm.is_model(row.model):
        raise LookupError(f"timm {timm.__version__} has no {row.model}")
    model: torch.nn.Module = timm.create_model(row.model, num_classes=CLASSES, **row.smaller)
    if row.blocks:
        model.blocks = model.blocks[: row.blocks]
    return model


def modes(_name: str) -> tuple[str, ...]:
    """Return what a model is judged in."""
    return ("inference", "training")


def tolerance(name: str, mode: str) -> tuple[float, bool]:
    """Return the dashboard's tolerance for a model, and whether small tensors may be
    further off.
    """
    found = HIGHER_TRAINING.get(name, 1e-2) if mode == "training" else 1e-3
    return found, name in LARGER_MULTIPLIER


def inputs(name: str, batch: int, device: str) -> dict[str, torch.Tensor]:
    """Return an example of `batch` images, on the CPU."""
    row, draw = ROWS[name], torch.Generator().manual_seed(batch)
    halved = device == "cpu" and row.pixels == 64 and "img_size" not in row.smaller
    pixels = 32 if halved else row.pixels
    return {
        "x": torch.randn(batch, 3, pixels, pixels, generator=draw),
        "labels": torch.randint(CLASSES, (batch,), generator=draw),
    }


def loss(outputs: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number that is differentiated."""
    parts = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return torch.stack([functional.cross_entropy(one, given["labels"]) for one in parts]).sum()
