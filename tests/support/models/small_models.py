"""Architectures of timm and transformers at small sizes, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynaxla.bench.suites import calibrate_batch_norms, import_package

Inputs = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]


def timm_model(name: str) -> tuple[nn.Module, Inputs]:
    settings = dict(TIMM[name])
    size = settings.pop("picture", settings.get("img_size", 64))
    model = import_package("timm").create_model(name, **settings).eval()
    for parameter in model.parameters():  # with a layer of zeros, results would not depend on the layers before it
        if parameter.dim() > 1 and not parameter.any():
            nn.init.trunc_normal_(parameter, std=0.02)
    inputs = (torch.randn(2, 3, size, size),)
    calibrate_batch_norms(model, inputs)
    return model, (inputs, {})


def transformers_model(name: str) -> tuple[nn.Module, Inputs]:
    kind, settings = TRANSFORMERS[name]
    family = getattr(import_package("transformers"), name)
    model = family(family.config_class(**settings)).eval()
    tokens = torch.randint(3, 90, (2, 12))
    size = getattr(model.config, "image_size", 64)
    size = size if isinstance(size, int) else size[0]
    first = {
        "tokens": tokens,
        "pictures": torch.randn(2, 3, min(size, 64), min(size, 64)),
        "sound": torch.randn(2, 800),
        "spectrogram": torch.randn(2, 8, 40),
    }[kind]
    keywords = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    if name == "ViTMAEModel":  # otherwise, each call would hide other patches at random
        keywords["noise"] = torch.rand(2, (size // model.config.patch_size) ** 2)
    return model, ((first,), keywords)


# Eager mode does not support these in float64: grouped matrix products lack float64, and XGLM writes the lowest float64 to a float32.
FLOAT32 = {"MixtralModel", "OlmoeModel", "Qwen3MoeModel", "XGLMModel"}


# timm: settings by name. "picture" is the image size of models without a setting for it.
TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"img_size": 64, "depth": 2},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "coatnet_nano_rw_224": {"img_size": 64},
    "convnextv2_atto": {},
    "crossvit_tiny_240": {},
    "cspdarknet53": {},
    "davit_tiny": {},
    "deit3_small_patch16_224": {"img_size": 64, "depth": 2},
    "densenetblur121d": {},
    "dla34": {},
    "dpn48b": {},
    "eca_nfnet_l0": {},
    "edgenext_xx_small": {},
    "efficientnetv2_rw_t": {},
    "efficientformerv2_s0": {"img_size": 224},
    "efficientvit_b0": {},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "fastvit_t8": {},
    "fbnetv3_b": {},
    "focalnet_tiny_srf": {},
    "gcvit_xxtiny": {"img_size": 224},
    "gernet_s": {},
    "ghostnetv2_100": {},
    "hardcorenas_a": {},
    "hgnet_tiny": {},
    "hiera_tiny_224": {"img_size": 224},
    "hrnet_w18_small": {},
    "inception_next_tiny": {},
    "inception_v3": {"picture": 128},
    "lambda_resnet26t": {"picture": 128, "img_size": 128},
    "maxvit_pico_rw_256": {"img_size": 256},
    "mobilenetv4_conv_small": {},
    "mobileone_s0": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "mvitv2_tiny": {"img_size": 64},
    "nest_tiny_jx": {"img_size": 224},
    "nf_resnet50": {},
    "pit_ti_224": {"img_size": 224},
    "poolformer_s12": {},
    "pvt_v2_b0": {},
    "regnety_002": {},
    "regnetz_b16": {},
    "repghostnet_050": {},
    "repvgg_a0": {},
    "repvit_m0_9": {},
    "res2net50_26w_4s": {},
    "resmlp_12_224": {"img_size": 224},
    "resnetv2_50": {},
    "rexnet_100": {},
    "sebotnet33ts_256": {"picture": 256},
    "selecsls42": {},
    "seresnext26d_32x4d": {},
    "skresnet18": {},
    "swinv2_tiny_window8_256": {"img_size": 256},
    "tiny_vit_5m_224": {"picture": 224},
    "test_efficientnet": {},
    "tinynet_e": {},
    "tnt_s_patch16_224": {"img_size": 224},
    "tresnet_m": {},
    "twins_pcpvt_small": {"img_size": 64},
    "vgg11_bn": {},
    "visformer_tiny": {"img_size": 224},
    "volo_d1_224": {"img_size": 224},
    "vovnet39a": {},
    "xception41": {"picture": 128},
    "xcit_nano_12_p16_224": {"img_size": 64},
}

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
DECODER = {**SMALL, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
MOE = {**DECODER, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 40,
}

# transformers: the kind of input and the settings of the configuration, by model class.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BartModel": ("tokens", SEQ2SEQ),
    "BigBirdModel": ("tokens", {**SMALL, "attention_type": "original_full"}),
    "BloomModel": ("tokens", {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "CamembertModel": ("tokens", SMALL),
    "CodeGenModel": (
        "tokens",
        {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "n_inner": 64},
    ),
    "CohereModel": ("tokens", DECODER),
    "ConvBertModel": ("tokens", {**SMALL, "embedding_size": 32}),
    "ConvNextModel": ("pictures", {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]}),
    "DebertaV2Model": ("tokens", {**SMALL, "relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}),
    "DeiTModel": ("pictures", VISION),
    "Dinov2Model": ("pictures", VISION),
    "ElectraModel": ("tokens", {**SMALL, "embedding_size": 32}),
    "ErnieModel": ("tokens", SMALL),
    "FNetModel": ("tokens", {k: v for k, v in SMALL.items() if k != "num_attention_heads"}),
    "FalconModel": ("tokens", {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}),
    "FunnelModel": ("tokens", {"vocab_size": 100, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "block_sizes": [1, 1]}),
    "Gemma2Model": ("tokens", {**DECODER, "head_dim": 16}),
    "GPTNeoModel": (
        "tokens",
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
    ),
    "GPTJModel": ("tokens", {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 4}),
    "GraniteModel": ("tokens", DECODER),
    "HubertModel": ("sound", AUDIO),
    "IBertModel": ("tokens", SMALL),
    "LayoutLMModel": ("tokens", SMALL),
    "MambaModel": ("tokens", {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "Mamba2Model": (
        "tokens",
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 4,
        },
    ),
    "MarianModel": ("tokens", SEQ2SEQ),
    "MBartModel": ("tokens", SEQ2SEQ),
    "MegatronBertModel": ("tokens", SMALL),
    "MixtralModel": ("tokens", {**DECODER, "num_local_experts": 4}),
    "MobileBertModel": ("tokens", {**SMALL, "embedding_size": 32, "intra_bottleneck_size": 32}),
    "MobileViTModel": ("pictures", {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 16, 16, 16], "image_size": 64}),
    "ModernBertModel": ("tokens", {**SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}),
    "MPNetModel": ("tokens", SMALL),
    "MptModel": ("tokens", {"vocab_size": 100, "d_model": 32, "n_layers": 2, "n_heads": 2}),
    "NystromformerModel": ("tokens", {**SMALL, "segment_means_seq_len": 12, "num_landmarks": 12}),
    "Olmo2Model": ("tokens", DECODER),
    "OlmoeModel": ("tokens", MOE),
    "PegasusModel": ("tokens", SEQ2SEQ),
    "PersimmonModel": ("tokens", SMALL),
    "PhiModel": ("tokens", SMALL),
    "Phi3Model": ("tokens", DECODER),
    "PoolFormerModel": ("pictures", {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]}),
    "Qwen3Model": ("tokens", {**DECODER, "head_dim": 16}),
    "Qwen3MoeModel": ("tokens", {**MOE, "head_dim": 16}),
    "RemBertModel": ("tokens", {**SMALL, "input_embedding_size": 32}),
    "ResNetModel": ("pictures", {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}),
    "RoFormerModel": ("tokens", SMALL),
    "RobertaModel": ("tokens", SMALL),
    "RwkvModel": ("tokens", {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}),
    "SegformerModel": ("pictures", {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 8]}),
    "SplinterModel": ("tokens", SMALL),
    "SqueezeBertModel": ("tokens", {**SMALL, "embedding_size": 32}),
    "StableLmModel": ("tokens", DECODER),
    "Starcoder2Model": ("tokens", DECODER),
    "SwinModel": ("pictures", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}),
    "T5Model": ("tokens", T5),
    "UMT5Model": ("tokens", T5),
    "ViTMAEModel": ("pictures", VISION),
    "Wav2Vec2Model": ("sound", AUDIO),
    "WhisperModel": ("spectrogram", {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20}),
    "XGLMModel": (
        "tokens",
        {"vocab_size": 100, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 2, "max_position_embeddings": 64},
    ),
    "XLMRobertaModel": ("tokens", SMALL),
    "XLNetModel": ("tokens", {"vocab_size": 100, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}),
    "YolosModel": ("pictures", {**VISION, "image_size": [32, 32], "num_detection_tokens": 4}),
}
