"""The models: how each is made in tiny form, and a batch for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Shard

from .tiny import VOCABULARY, tiny

ROWS, LENGTH = 4, 12
BY_DIM_0 = ", all by dim 0"
_FIRST_DIM = {"*": {"tp": Shard(0)}}


@dataclass
class Case:
    """A model with dropout on, a batch of four rows, and the loss of what the model returns."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[[Any, dict[str, Tensor]], Tensor] = lambda made, _: made.loss
    plan: Any = field(default="auto")


def causal_types() -> list[str]:
    """Every type of causal language model that transformers knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def make_case(name: str) -> Case:
    """A causal language model by its type, or one of `OTHERS`; with `BY_DIM_0` at the end every
    parameter is sharded, by its first dim."""
    torch.manual_seed(0)
    kind = name.removesuffix(BY_DIM_0)
    case = OTHERS[kind]() if kind in OTHERS else _causal(kind)
    if kind != name:
        case.plan = _FIRST_DIM
    case.model.train()
    return case


# --- causal language models ----------------------------------------------------------------------

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
_HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_INDEXER = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 8, "compress_ratio": 2}
_QWEN4 = _HYBRID | {f"indexer_{key}": value for key, value in _INDEXER.items()}
_FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE["rope_parameters"]}},
    "diffllama": {"attention_dropout": 0.0},
    "blt": {"use_cache": False},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"head_dim": 16},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "olmo_hybrid": _HYBRID,
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (3, 4)},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "chunk_size": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA | {"attention_head_dim": 16, "attention_hidden_size": 64},
    "zamba2": _ZAMBA,
}
"""Fields of types whose usual ones are missing, or whose sizes depend on each other."""


def _causal(kind: str) -> Case:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    made_by = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    config_class = transformers.CONFIG_MAPPING[kind]
    if not issubclass(config_class, made_by.config_class):
        config_class = type(config_class().get_text_config(decoder=True))
    config = tiny(config_class, **_FIELDS.get(kind, {}))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    model = made_by(config)
    ids = torch.randint(3, VOCABULARY - 3, (ROWS, LENGTH))
    present = torch.ones_like(ids)
    present[1, -3:] = 0  # a shorter text
    batch = {"input_ids": ids, "attention_mask": present, "labels": ids.where(present > 0, -100)}
    if kind == "git":
        size = config.vision_config.image_size
        batch["pixel_values"] = torch.randn(ROWS, 3, size, size)
    takes = inspect.signature(model.forward).parameters
    return Case(model, {key: value for key, value in batch.items() if key in takes}, _causal_loss)


def _causal_loss(made: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = getattr(made, "loss", None)
    if loss is None:
        scores, ids = made.logits[:, :-1], batch["input_ids"][:, 1:]
        loss = F.cross_entropy(scores.flatten(0, 1), ids.flatten())
    return loss


# --- the others ----------------------------------------------------------------------------------

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_LAYERS = {key: _TEXT[key] for key in list(_TEXT)[1:5]}
_PICTURES = _LAYERS | {"image_size": 32, "patch_size": 8}


def _hf(name: str, batch: dict[str, Tensor], **fields: Any) -> Case:
    import transformers

    made_by = getattr(transformers, name)
    return Case(made_by(made_by.config_class(**fields)), batch)


def _masked_text() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    present = torch.ones_like(ids)
    present[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": present, "labels": ids.where(present > 0, -100)}


def _labelled_pictures(size: int = 32) -> dict[str, Tensor]:
    labels = torch.randint(0, 2, (ROWS,))
    return {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": labels}


def _t5() -> Case:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    return _hf(
        "T5ForConditionalGeneration",
        _masked_text(),
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        **sizes,
    )


def _bart() -> Case:
    sizes = {
        f"{part}_{what}": size
        for part in ("encoder", "decoder")
        for what, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    return _hf(
        "BartForConditionalGeneration",
        _masked_text(),
        vocab_size=VOCABULARY,
        d_model=32,
        max_position_embeddings=64,
        **sizes,
    )


def _clip() -> Case:
    import transformers as hf

    config = hf.CLIPConfig(
        text_config=_TEXT | {"projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=_PICTURES | {"projection_dim": 16},
        projection_dim=16,
    )
    batch = _masked_text() | {"pixel_values": torch.randn(ROWS, 3, 32, 32)}
    del batch["labels"]
    model = hf.CLIPModel(config)
    return Case(
        model, batch, lambda made, _: F.cross_entropy(made.logits_per_text, _diagonal(made))
    )


def _diagonal(made: Any) -> Tensor:
    return torch.arange(ROWS)


def _whisper() -> Case:
    sizes = {
        f"{part}_{what}": size
        for part in ("encoder", "decoder")
        for what, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    batch = {
        "input_features": torch.randn(ROWS, 16, 40),
        "labels": torch.randint(3, VOCABULARY, (ROWS, LENGTH)),
    }
    return _hf(
        "WhisperForConditionalGeneration",
        batch,
        vocab_size=VOCABULARY,
        d_model=32,
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=32,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dropout=0.1,
        **sizes,
    )


def _wav2vec2() -> Case:
    batch = {
        "input_values": torch.randn(ROWS, 800),
        "labels": torch.randint(1, 20, (ROWS, 4)),
    }
    return _hf(
        "Wav2Vec2ForCTC",
        batch,
        vocab_size=24,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_length=2,
        layerdrop=0.0,
        mask_time_prob=0.0,
        **_LAYERS,
    )


def _swin() -> Case:
    return _hf(
        "SwinForImageClassification",
        _labelled_pictures(),
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    )


def _convnext() -> Case:
    case = _hf(
        "ConvNextForImageClassification",
        _labelled_pictures(),
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_stages=2,
        drop_path_rate=0.1,
    )
    case.plan = _FIRST_DIM
    return case


def _timm(name: str, plan: Any, size: int = 32, **fields: Any) -> Case:
    import timm

    model = timm.create_model(name, num_classes=10, drop_rate=0.1, **fields)
    batch = {"x": torch.randn(ROWS, 3, size, size), "labels": torch.randint(0, 10, (ROWS,))}
    case = Case(model, batch, lambda made, b: F.cross_entropy(made, b["labels"]))
    case.plan = plan
    return case


class _Denoiser(nn.Module):
    """A diffusion model with its loss: noise and what the model makes of noise and pictures."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: Tensor, times: Tensor, **more: Tensor) -> Tensor:
        noise = torch.randn_like(pictures)
        made = self.model(pictures + noise, timestep=times, **more).sample
        return F.mse_loss(made[:, : pictures.shape[1]], noise)


def _unet() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
        dropout=0.1,
    )
    batch = {
        "pictures": torch.randn(ROWS, 4, 16, 16),
        "times": torch.randint(0, 1000, (ROWS,)),
        "encoder_hidden_states": torch.randn(ROWS, 6, 16),
    }
    return Case(_Denoiser(model), batch, lambda made, _: made)


def _dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        norm_num_groups=8,
        dropout=0.1,
        num_embeds_ada_norm=20,
    )
    batch = {
        "pictures": torch.randn(ROWS, 4, 16, 16),
        "times": torch.randint(0, 20, (ROWS,)),
        "class_labels": torch.randint(0, 20, (ROWS,)),
    }
    return Case(_Denoiser(model), batch, lambda made, _: made)


OTHERS: dict[str, Callable[[], Case]] = {
    "bert (masked)": lambda: _hf("BertForMaskedLM", _masked_text(), **_TEXT),
    "roberta (masked)": lambda: _hf("RobertaForMaskedLM", _masked_text(), **_TEXT),
    "distilbert (masked)": lambda: _hf(
        "DistilBertForMaskedLM",
        _masked_text(),
        vocab_size=VOCABULARY,
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
    ),
    "modernbert (masked)": lambda: _hf(
        "ModernBertForMaskedLM", _masked_text(), **_TEXT, pad_token_id=0, mlp_dropout=0.1
    ),
    "t5": _t5,
    "bart (sequence to sequence)": _bart,
    "vit": lambda: _hf("ViTForImageClassification", _labelled_pictures(), **_PICTURES),
    "dinov2": lambda: _hf(
        "Dinov2ForImageClassification", _labelled_pictures(), **(_PICTURES | {"mlp_ratio": 2})
    ),
    "clip": _clip,
    "swin": _swin,
    "convnext": _convnext,
    "whisper (speech)": _whisper,
    "wav2vec2": _wav2vec2,
    "timm resnet18": lambda: _timm("resnet18", _FIRST_DIM),
    "timm convnext_atto": lambda: _timm("convnext_atto", _FIRST_DIM),
    "timm efficientnet_b0": lambda: _timm("efficientnet_b0", _FIRST_DIM),
    "timm mobilenetv3": lambda: _timm("mobilenetv3_small_050", _FIRST_DIM),
    "timm vit_tiny": lambda: _timm(
        "vit_tiny_patch16_224",
        "auto",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
    ),
    "diffusers UNet2DCondition": _unet,
    "diffusers DiT": _dit,
}
