"""Well-known architectures of the transformers library at a tiny size, with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass
class Case:
    """A model in train mode and the arguments of one forward."""

    model: nn.Module
    inputs: dict[str, Any]
    args: tuple[Any, ...] = ()


Builder = Callable[[], Case]
TRANSFORMERS: dict[str, Builder] = {}


def architecture(builder: Builder) -> Builder:
    TRANSFORMERS[builder.__name__] = builder
    return builder


def hub() -> Any:
    import transformers

    return transformers


# ---------------------------------------------------------------- inputs

VOCABULARY = 50
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    **SPECIAL,
}
SIZES = {key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}


def tokens(length: int = 7) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length))


def padded(length: int = 7) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -2:] = 0
    return mask


def causal(model: nn.Module, **more: Any) -> Case:
    return Case(model, {"input_ids": (ids := tokens()), "labels": ids.clone(), **more})


def masked(model: nn.Module, **more: Any) -> Case:
    return Case(model, {"input_ids": tokens(), "labels": tokens(), "attention_mask": padded(), **more})


def pixels(size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size)


def pictures(model: nn.Module, size: int = 16) -> Case:
    return Case(model, {"pixel_values": pixels(size), "labels": torch.tensor([0, 1])})


# ---------------------------------------------------------------- text, encoders


@architecture
def bert() -> Case:
    return masked(hub().BertForMaskedLM(hub().BertConfig(**SMALL)))


@architecture
def roberta() -> Case:
    model = hub().RobertaForSequenceClassification(hub().RobertaConfig(**SMALL))
    return Case(model, {"input_ids": tokens(), "attention_mask": padded(), "labels": torch.tensor([0, 1])})


@architecture
def distilbert() -> Case:
    config = hub().DistilBertConfig(vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=24)
    model = hub().DistilBertForQuestionAnswering(config)
    spans = {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 3])}
    return Case(model, {"input_ids": tokens(), "attention_mask": padded(), **spans})


@architecture
def albert() -> Case:
    return masked(hub().AlbertForMaskedLM(hub().AlbertConfig(**SMALL, embedding_size=8)))


@architecture
def electra() -> Case:
    model = hub().ElectraForPreTraining(hub().ElectraConfig(**SMALL, embedding_size=8))
    return Case(model, {"input_ids": tokens(), "labels": torch.randint(0, 2, (2, 7))})


@architecture
def deberta_v2() -> Case:
    config = hub().DebertaV2Config(
        **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4, conv_kernel_size=3
    )
    return masked(hub().DebertaV2ForMaskedLM(config))


@architecture
def longformer() -> Case:
    config = hub().LongformerConfig(**SMALL, attention_window=4, max_position_embeddings=20)
    glance = torch.zeros(2, 7, dtype=torch.long)
    glance[:, 0] = 1
    return masked(hub().LongformerForMaskedLM(config), global_attention_mask=glance)


@architecture
def fnet() -> Case:
    sizes = {key: SMALL[key] for key in SMALL if key != "num_attention_heads"}
    model = hub().FNetForMaskedLM(hub().FNetConfig(**sizes))
    return Case(model, {"input_ids": tokens(), "labels": tokens()})


@architecture
def modernbert() -> Case:
    config = hub().ModernBertConfig(**SMALL, cls_token_id=1, sep_token_id=2, local_attention=4)
    return masked(hub().ModernBertForMaskedLM(config))


# ---------------------------------------------------------------- text, decoders


@architecture
def gpt2() -> Case:
    config = hub().GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return causal(hub().GPT2LMHeadModel(config))


@architecture
def gpt_neox() -> Case:
    return causal(hub().GPTNeoXForCausalLM(hub().GPTNeoXConfig(**SMALL)))


@architecture
def opt() -> Case:
    config = hub().OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
        word_embed_proj_dim=8,
        layerdrop=0.3,
    )
    return causal(hub().OPTForCausalLM(config), attention_mask=padded())


@architecture
def bloom() -> Case:
    return causal(hub().BloomForCausalLM(hub().BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2)))


@architecture
def falcon() -> Case:
    return causal(hub().FalconForCausalLM(hub().FalconConfig(**SMALL, alibi=True)))


@architecture
def llama() -> Case:
    config = hub().LlamaConfig(**SMALL, num_key_value_heads=1, attention_dropout=0.1)
    return causal(hub().LlamaForCausalLM(config), attention_mask=padded())


@architecture
def llama_with_checkpoints() -> Case:
    model = hub().LlamaForCausalLM(hub().LlamaConfig(**SMALL))
    model.gradient_checkpointing_enable()
    return causal(model, use_cache=False)


@architecture
def gemma() -> Case:
    return causal(hub().GemmaForCausalLM(hub().GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=8)))


@architecture
def qwen3() -> Case:
    return causal(hub().Qwen3ForCausalLM(hub().Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8)))


@architecture
def phi() -> Case:
    return causal(hub().PhiForCausalLM(hub().PhiConfig(**SMALL)))


@architecture
def mixtral() -> Case:
    config = hub().MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=3, output_router_logits=True)
    return causal(hub().MixtralForCausalLM(config))


@architecture
def qwen2_moe() -> Case:
    config = hub().Qwen2MoeConfig(
        **SMALL,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        output_router_logits=True,
    )
    return causal(hub().Qwen2MoeForCausalLM(config))


@architecture
def mamba() -> Case:
    config = hub().MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4)
    return causal(hub().MambaForCausalLM(config))


@architecture
def rwkv() -> Case:
    config = hub().RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2, context_length=16
    )
    # Its cache is written in place, which its own backward pass does not survive.
    return causal(hub().RwkvForCausalLM(config), use_cache=False)


# ---------------------------------------------------------------- text, encoder and decoder


@architecture
def t5() -> Case:
    config = hub().T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return masked(hub().T5ForConditionalGeneration(config))


def both_halves() -> dict[str, Any]:
    """Sizes of an encoder and a decoder, as BART and its kin name them."""
    halves = ("encoder", "decoder")
    sizes: dict[str, Any] = {f"{half}_layers": 2 for half in halves}
    sizes |= {f"{half}_attention_heads": 2 for half in halves}
    return sizes | {f"{half}_ffn_dim": 24 for half in halves} | {"d_model": 16}


@architecture
def bart() -> Case:
    config = hub().BartConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        **both_halves(),
        **SPECIAL,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    return masked(hub().BartForConditionalGeneration(config))


# ---------------------------------------------------------------- pictures


@architecture
def vit() -> Case:
    return pictures(hub().ViTForImageClassification(hub().ViTConfig(**SIZES, image_size=16, patch_size=8)))


@architecture
def deit() -> Case:
    return pictures(hub().DeiTForImageClassification(hub().DeiTConfig(**SIZES, image_size=16, patch_size=8)))


@architecture
def beit() -> Case:
    config = hub().BeitConfig(**SIZES, image_size=16, patch_size=8, drop_path_rate=0.3, use_relative_position_bias=True)
    return pictures(hub().BeitForImageClassification(config))


@architecture
def dinov2() -> Case:
    config = hub().Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8, drop_path_rate=0.3
    )
    return pictures(hub().Dinov2ForImageClassification(config))


@architecture
def swin() -> Case:
    config = hub().SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=4, drop_path_rate=0.3
    )
    return pictures(hub().SwinForImageClassification(config))


@architecture
def convnext() -> Case:
    config = hub().ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 2], num_stages=2, drop_path_rate=0.3)
    return pictures(hub().ConvNextForImageClassification(config))


def tiny_resnet() -> Any:
    return hub().ResNetConfig(
        embedding_size=4,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        layer_type="basic",
        num_labels=2,
        out_features=["stage2"],
    )


@architecture
def resnet() -> Case:
    return pictures(hub().ResNetForImageClassification(tiny_resnet()), 32)


@architecture
def regnet() -> Case:
    config = hub().RegNetConfig(embedding_size=4, hidden_sizes=[8, 8], depths=[1, 2], groups_width=4)
    return pictures(hub().RegNetForImageClassification(config), 32)


@architecture
def mobilenet_v2() -> Case:
    config = hub().MobileNetV2Config(depth_multiplier=0.1, depth_divisible_by=4, min_depth=4, num_labels=2)
    return pictures(hub().MobileNetV2ForImageClassification(config), 32)


@architecture
def mobilevit() -> Case:
    config = hub().MobileViTConfig(
        image_size=32, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[4, 4, 4, 8, 8, 8, 8], num_attention_heads=2
    )
    return pictures(hub().MobileViTForImageClassification(config), 32)


@architecture
def segformer() -> Case:
    config = hub().SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        drop_path_rate=0.3,
        num_labels=3,
    )
    model = hub().SegformerForSemanticSegmentation(config)
    return Case(model, {"pixel_values": pixels(), "labels": torch.randint(0, 3, (2, 16, 16))})


@architecture
def detr() -> Case:
    config = hub().DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config=tiny_resnet(),
        num_queries=4,
        **both_halves(),
    )
    return Case(hub().DetrModel(config), {"pixel_values": pixels(32)})


# ---------------------------------------------------------------- sound


@architecture
def whisper() -> Case:
    config = hub().WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
        decoder_start_token_id=1,
        encoder_layerdrop=0.3,
        **both_halves(),
        **SPECIAL,
    )
    model = hub().WhisperForConditionalGeneration(config)
    return Case(model, {"input_features": torch.randn(2, 8, 16), "labels": tokens()})


@architecture
def wav2vec2() -> Case:
    config = hub().Wav2Vec2Config(
        **SMALL,
        conv_dim=[8, 8],
        conv_kernel=[4, 3],
        conv_stride=[2, 2],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_length=2,
        mask_time_prob=0.3,
        layerdrop=0.3,
    )
    return Case(hub().Wav2Vec2ForCTC(config), {"input_values": torch.randn(2, 100), "labels": tokens(4)})


@architecture
def audio_spectrogram_transformer() -> Case:
    config = hub().ASTConfig(**SIZES, patch_size=4, max_length=16, num_mel_bins=8, frequency_stride=4, time_stride=4)
    model = hub().ASTForAudioClassification(config)
    return Case(model, {"input_values": torch.randn(2, 16, 8), "labels": torch.tensor([0, 1])})


@architecture
def encodec() -> Case:
    config = hub().EncodecConfig(
        num_filters=2, hidden_size=8, codebook_dim=8, codebook_size=8, upsampling_ratios=[2, 2], num_lstm_layers=1
    )
    return Case(hub().EncodecModel(config), {"input_values": torch.randn(2, 1, 64)})


# ---------------------------------------------------------------- several kinds of data


@architecture
def clip() -> Case:
    text = hub().CLIPTextConfig(**SMALL, max_position_embeddings=16)
    vision = hub().CLIPVisionConfig(**SIZES, image_size=16, patch_size=8)
    config = hub().CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
    inputs = {"input_ids": tokens(), "attention_mask": padded(), "pixel_values": pixels(), "return_loss": True}
    return Case(hub().CLIPModel(config), inputs)


@architecture
def vilt() -> Case:
    config = hub().ViltConfig(**SMALL, image_size=16, patch_size=8, num_labels=3)
    inputs = {"input_ids": tokens(), "pixel_values": pixels(), "labels": torch.rand(2, 3)}
    return Case(hub().ViltForQuestionAnswering(config), inputs)


@architecture
def time_series_transformer() -> Case:
    config = hub().TimeSeriesTransformerConfig(
        prediction_length=3, context_length=4, lags_sequence=[1, 2], num_time_features=1, **both_halves()
    )
    past, future = torch.randn(2, 6), torch.randn(2, 3)
    inputs = {
        "past_values": past,
        "past_time_features": past[..., None],
        "past_observed_mask": torch.ones(2, 6),
        "future_values": future,
        "future_time_features": future[..., None],
    }
    return Case(hub().TimeSeriesTransformerForPrediction(config), inputs)
