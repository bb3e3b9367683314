"""Models of the `transformers` library at tiny size, built from their configurations (nothing is downloaded).

`transformers` is imported when an entry is built, so that the registry can be listed without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .entry import Batch, Entry
from .sizes import sized

VOCAB, SEQ, BATCH = sized((99, 16, 2), (4000, 128, 4))
HIDDEN, LAYERS, HEADS, INNER = sized((32, 2, 4, 64), (256, 4, 4, 1024))
IMAGE, CLASSES = sized((32, 5), (64, 50))
POSITIONS, HEAD, WINDOW = sized((64, 8, 8), (256, 64, 64))
#: channels of convolutional networks with two and three stages, and of one layer of the smallest
STAGES, WIDTHS, DEPTHS, WIDTH = sized(
    ([16, 32], [16, 24, 32], [1, 1, 2], 16), ([128, 256], [64, 128, 256], [2, 2, 4], 64)
)

TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=INNER,
    max_position_embeddings=POSITIONS,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED: dict[str, Any] = dict(TEXT, num_key_value_heads=2)
VISION: dict[str, Any] = dict(
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=INNER,
    image_size=IMAGE,
    patch_size=8,
    num_channels=3,
    num_labels=CLASSES,
)
SPEECH: dict[str, Any] = dict(
    vocab_size=32,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=INNER,
    conv_dim=(32, 32),
    conv_stride=(4, 4),
    conv_kernel=(8, 8),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=2,
    num_labels=CLASSES,
    classifier_proj_size=HIDDEN,
    apply_spec_augment=False,
    mask_time_prob=0.0,
    mask_feature_prob=0.0,
)


def without_dropout(config: Any) -> Any:
    """Sets every dropout, layer-drop and stochastic-depth probability of a configuration (and its parts) to 0."""
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
        elif "drop" in key and isinstance(value, (list, tuple)):
            setattr(config, key, [0.0 for _ in value])
        elif hasattr(value, "to_dict"):
            without_dropout(value)
    return config


def build_model(model_class: str, config: Any, attention: str | None = None) -> nn.Module:
    """The model of that class with dropout off; `attention` asks for another attention than the library's default."""
    import transformers

    config = without_dropout(config)
    if attention is not None:
        config._attn_implementation = attention
    model = getattr(transformers, model_class)(config)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    fill_zero_weights(model)
    return model


def fill_zero_weights(model: nn.Module) -> None:
    """Gives random values to weights that start as all zeros.

    LayerNorm of a token that is exactly zero multiplies rounding errors by a million: nothing can be compared there.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)


def make_config(config_class: str, **options: Any) -> Any:
    """A configuration object of `transformers` by the name of its class."""
    import transformers

    return getattr(transformers, config_class)(**options)


def tokens(length: int = SEQ, low: int = 3, high: int = VOCAB) -> torch.Tensor:
    """Token ids that avoid the special ones."""
    return torch.randint(low, high, (BATCH, length))


def classes(count: int = CLASSES) -> torch.Tensor:
    """One class per sample."""
    return torch.randint(0, count, (BATCH,))


def causal_batch() -> Batch:
    """Language modelling: the labels are the inputs, shifted by the model."""
    ids = tokens()
    return dict(input_ids=ids, labels=ids.clone())


def masked_batch() -> Batch:
    """Masked language modelling with padding in the second sample and ignored labels."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    labels = torch.where(torch.arange(SEQ) % 3 == 0, ids, -100)
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def padded_causal_batch() -> Batch:
    """Language modelling with padding on the right of the second sample."""
    batch = masked_batch()
    assert isinstance(batch, dict)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def sentence_batch() -> Batch:
    """Sequence classification with a padding mask."""
    batch = masked_batch()
    assert isinstance(batch, dict)
    return dict(batch, labels=classes())


def tagging_batch() -> Batch:
    """A label per token."""
    return dict(input_ids=tokens(), labels=torch.randint(0, CLASSES, (BATCH, SEQ)))


def span_batch() -> Batch:
    """Question answering: where the answer starts and ends."""
    starts, ends = torch.tensor([1, 3] * (BATCH // 2)), torch.tensor([4, 9] * (BATCH // 2))
    return dict(input_ids=tokens(), start_positions=starts, end_positions=ends)


def pair_batch() -> Batch:
    """Sequence to sequence: source, its mask, and target labels with some ignored."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    labels = tokens(12)
    labels[1, -2:] = -100
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def shifted_pair_batch() -> Batch:
    """Sequence to sequence with the decoder's inputs given, so that the model need not shift the labels."""
    batch = pair_batch()
    assert isinstance(batch, dict)
    start = torch.zeros(BATCH, 1, dtype=torch.long)
    return dict(batch, decoder_input_ids=torch.cat([start, batch["labels"][:, :-1].clamp(min=0)], 1))


def image_batch(size: int = IMAGE, count: int = BATCH) -> Batch:
    """Image classification."""
    return dict(pixel_values=torch.randn(count, 3, size, size), labels=torch.randint(0, CLASSES, (count,)))


def large_image_batch() -> Batch:
    """Image classification with enough pixels per channel for the last BatchNorm to be well conditioned."""
    return image_batch(size=64, count=8)


def segmentation_batch(size: int = IMAGE) -> Batch:
    """A class per pixel."""
    return dict(pixel_values=torch.randn(BATCH, 3, size, size), labels=torch.randint(0, CLASSES, (BATCH, size, size)))


def speech_batch(samples: int = 800) -> Batch:
    """Classification of raw audio."""
    return dict(input_values=torch.randn(BATCH, samples), labels=classes())


def ctc_batch(samples: int = 800) -> Batch:
    """Transcription of raw audio, aligned by CTC."""
    return dict(input_values=torch.randn(BATCH, samples), labels=torch.randint(1, 32, (BATCH, 5)))


def entry(
    name: str,
    family: str,
    model_class: str,
    config_class: str,
    options: dict[str, Any],
    batch: Callable[[], Batch],
    attention: str | None = None,
    **details: Any,
) -> Entry:
    """An entry for a model class with one flat configuration; `details` are further fields of `Entry`."""

    def make() -> tuple[nn.Module, Batch]:
        return build_model(model_class, make_config(config_class, **options), attention), batch()

    return Entry(name, family, make, **details)


LM, ENC, ED, CONV, VIT, AUDIO = (
    "decoder LM",
    "encoder LM",
    "encoder-decoder",
    "vision conv",
    "vision transformer",
    "audio",
)
MOE, SSM, MULTI = "mixture of experts", "state space", "multimodal"

GPT2: dict[str, Any] = dict(
    vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=POSITIONS, bos_token_id=1, eos_token_id=2
)
BART: dict[str, Any] = dict(
    vocab_size=VOCAB,
    d_model=HIDDEN,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=INNER,
    decoder_ffn_dim=INNER,
    max_position_embeddings=POSITIONS,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=None,
)
T5: dict[str, Any] = dict(
    vocab_size=VOCAB,
    d_model=HIDDEN,
    d_kv=HEAD,
    d_ff=INNER,
    num_layers=LAYERS,
    num_decoder_layers=LAYERS,
    num_heads=HEADS,
    relative_attention_num_buckets=8,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
)
MAMBA: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    state_size=8,
    conv_kernel=4,
    expand=2,
    time_step_rank=4,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

# fmt: off
DECODERS = [
    entry("gpt2", LM, "GPT2LMHeadModel", "GPT2Config", GPT2, causal_batch, note="tied weights"),
    entry("gpt2-eager", LM, "GPT2LMHeadModel", "GPT2Config", GPT2, padded_causal_batch, attention="eager"),
    entry("gpt-neo", LM, "GPTNeoForCausalLM", "GPTNeoConfig", dict(vocab_size=VOCAB, hidden_size=HIDDEN,
        num_layers=LAYERS, num_heads=HEADS, max_position_embeddings=POSITIONS,
        attention_types=[[["global", "local"], LAYERS // 2]], window_size=8, bos_token_id=1, eos_token_id=2),
        causal_batch),
    entry("gpt-neox", LM, "GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, causal_batch),
    entry("gptj", LM, "GPTJForCausalLM", "GPTJConfig", dict(GPT2, rotary_dim=4), causal_batch),
    entry("gpt-bigcode", LM, "GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT2, causal_batch),
    entry("llama", LM, "LlamaForCausalLM", "LlamaConfig", GROUPED, causal_batch),
    entry("llama-eager", LM, "LlamaForCausalLM", "LlamaConfig", GROUPED, padded_causal_batch, attention="eager"),
    entry("mistral", LM, "MistralForCausalLM", "MistralConfig", dict(GROUPED, sliding_window=WINDOW), causal_batch),
    entry("qwen2", LM, "Qwen2ForCausalLM", "Qwen2Config", GROUPED, causal_batch),
    entry("qwen3", LM, "Qwen3ForCausalLM", "Qwen3Config", dict(GROUPED, head_dim=HEAD), causal_batch),
    entry("gemma", LM, "GemmaForCausalLM", "GemmaConfig", dict(GROUPED, head_dim=HEAD), causal_batch,
        note="tied weights"),
    entry("gemma2", LM, "Gemma2ForCausalLM", "Gemma2Config", dict(GROUPED, head_dim=HEAD, sliding_window=WINDOW),
        causal_batch, note="tied weights"),
    entry("gemma3", LM, "Gemma3ForCausalLM", "Gemma3TextConfig", dict(GROUPED, head_dim=HEAD, sliding_window=WINDOW),
        causal_batch, note="tied weights"),
    entry("phi", LM, "PhiForCausalLM", "PhiConfig", TEXT, causal_batch),
    entry("phi3", LM, "Phi3ForCausalLM", "Phi3Config", GROUPED, causal_batch),
    entry("olmo2", LM, "Olmo2ForCausalLM", "Olmo2Config", GROUPED, causal_batch),
    entry("stablelm", LM, "StableLmForCausalLM", "StableLmConfig", GROUPED, causal_batch),
    entry("cohere", LM, "CohereForCausalLM", "CohereConfig", GROUPED, causal_batch),
    entry("opt", LM, "OPTForCausalLM", "OPTConfig", dict(vocab_size=VOCAB, hidden_size=HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=INNER, max_position_embeddings=POSITIONS,
        word_embed_proj_dim=HIDDEN, pad_token_id=0, bos_token_id=1, eos_token_id=2), causal_batch,
        note="layer drop in Python"),
    entry("bloom", LM, "BloomForCausalLM", "BloomConfig", dict(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS,
        n_head=HEADS, pad_token_id=0, bos_token_id=1, eos_token_id=2), padded_causal_batch, note="ALiBi"),
    entry("falcon", LM, "FalconForCausalLM", "FalconConfig", dict(vocab_size=VOCAB, hidden_size=HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        causal_batch, note="multi-query attention"),
    entry("mpt", LM, "MptForCausalLM", "MptConfig", dict(vocab_size=VOCAB, d_model=HIDDEN, n_layers=LAYERS,
        n_heads=HEADS, expansion_ratio=2, max_seq_len=POSITIONS), causal_batch, note="ALiBi"),
    entry("codegen", LM, "CodeGenForCausalLM", "CodeGenConfig", dict(GPT2, rotary_dim=4), causal_batch),
    entry("xglm", LM, "XGLMForCausalLM", "XGLMConfig", dict(vocab_size=VOCAB, d_model=HIDDEN, num_layers=LAYERS,
        attention_heads=HEADS, ffn_dim=INNER, max_position_embeddings=POSITIONS, pad_token_id=0, bos_token_id=1,
        eos_token_id=2), causal_batch, note="layer drop in Python"),
    entry("ctrl", LM, "CTRLLMHeadModel", "CTRLConfig", dict(GPT2, dff=INNER), causal_batch),
    entry("xlnet", LM, "XLNetLMHeadModel", "XLNetConfig", dict(vocab_size=VOCAB, d_model=HIDDEN, n_layer=LAYERS,
        n_head=HEADS, d_inner=INNER, pad_token_id=0, bos_token_id=1, eos_token_id=2), causal_batch,
        note="relative attention by shifting"),
    entry("diffllama", LM, "DiffLlamaForCausalLM", "DiffLlamaConfig", GROUPED, causal_batch,
        note="differential attention"),
]

ENCODERS = [
    entry("bert", ENC, "BertForMaskedLM", "BertConfig", TEXT, masked_batch, note="tied weights"),
    entry("bert-classifier", ENC, "BertForSequenceClassification", "BertConfig", dict(TEXT, num_labels=CLASSES),
        sentence_batch),
    entry("bert-qa-eager", ENC, "BertForQuestionAnswering", "BertConfig", TEXT, span_batch, attention="eager",
        null_gradients=("qa_outputs.bias", "*.layer.1.output.LayerNorm.bias")),
    entry("roberta", ENC, "RobertaForMaskedLM", "RobertaConfig", TEXT, masked_batch),
    entry("distilbert", ENC, "DistilBertForMaskedLM", "DistilBertConfig", dict(vocab_size=VOCAB, dim=HIDDEN,
        n_layers=LAYERS, n_heads=HEADS, hidden_dim=INNER, max_position_embeddings=POSITIONS), masked_batch),
    entry("albert", ENC, "AlbertForMaskedLM", "AlbertConfig", dict(TEXT, embedding_size=16), masked_batch,
        note="layers share weights"),
    entry("electra", ENC, "ElectraForMaskedLM", "ElectraConfig", dict(TEXT, embedding_size=16), masked_batch),
    entry("electra-tagger", ENC, "ElectraForTokenClassification", "ElectraConfig", dict(TEXT, embedding_size=16,
        num_labels=CLASSES), tagging_batch),
    entry("deberta-v2", ENC, "DebertaV2ForMaskedLM", "DebertaV2Config", dict(TEXT, relative_attention=True,
        position_buckets=8, pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm"), masked_batch,
        note="disentangled attention"),
    entry("mobilebert", ENC, "MobileBertForMaskedLM", "MobileBertConfig", dict(TEXT, embedding_size=16,
        intra_bottleneck_size=16, hidden_size=HIDDEN, true_hidden_size=16, num_feedforward_networks=2), masked_batch),
    entry("fnet", ENC, "FNetForMaskedLM", "FNetConfig", dict(vocab_size=VOCAB, hidden_size=HIDDEN,
        num_hidden_layers=LAYERS, intermediate_size=INNER, max_position_embeddings=POSITIONS, tpu_short_seq_length=SEQ,
        pad_token_id=0), causal_batch, note="complex FFT instead of attention"),
    entry("squeezebert", ENC, "SqueezeBertForMaskedLM", "SqueezeBertConfig", dict(TEXT, embedding_size=HIDDEN),
        masked_batch, note="grouped 1x1 convolutions"),
    entry("roformer", ENC, "RoFormerForMaskedLM", "RoFormerConfig", TEXT, masked_batch),
    entry("modernbert", ENC, "ModernBertForMaskedLM", "ModernBertConfig", dict(TEXT, global_attn_every_n_layers=2,
        local_attention=8, cls_token_id=1, sep_token_id=2), masked_batch),
    entry("esm", ENC, "EsmForMaskedLM", "EsmConfig", dict(TEXT, mask_token_id=3, position_embedding_type="rotary"),
        masked_batch, note="protein language model"),
    entry("canine", ENC, "CanineForSequenceClassification", "CanineConfig", dict(TEXT, num_hash_functions=4,
        num_hash_buckets=sized(16, 256), local_transformer_stride=8, downsampling_rate=4, upsampling_kernel_size=3,
        num_labels=CLASSES), sentence_batch, note="characters, hashed embeddings"),
    entry("convbert", ENC, "ConvBertForMaskedLM", "ConvBertConfig", dict(TEXT, embedding_size=16, conv_kernel_size=3,
        head_ratio=2), masked_batch, note="dynamic convolution"),
    entry("funnel", ENC, "FunnelForMaskedLM", "FunnelConfig", dict(vocab_size=VOCAB, d_model=HIDDEN, d_head=8,
        n_head=HEADS, d_inner=INNER, block_sizes=[1, 1], num_decoder_layers=1, initializer_std=0.02), masked_batch,
        note="pooled sequences"),
]

ENCODER_DECODERS = [
    entry("t5", ED, "T5ForConditionalGeneration", "T5Config", T5, pair_batch, note="tied weights"),
    entry("t5-gated", ED, "T5ForConditionalGeneration", "T5Config", dict(T5, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False), pair_batch),
    entry("bart", ED, "BartForConditionalGeneration", "BartConfig", BART, pair_batch,
        note="tied weights, layer drop in Python"),
    entry("pegasus", ED, "PegasusForConditionalGeneration", "PegasusConfig", BART, pair_batch,
        note="layer drop in Python"),
    entry("m2m100", ED, "M2M100ForConditionalGeneration", "M2M100Config", BART, pair_batch,
        note="layer drop in Python"),
    entry("longt5", ED, "LongT5ForConditionalGeneration", "LongT5Config", dict(T5, local_radius=3), pair_batch,
        note="block-local attention"),
    entry("prophetnet", ED, "ProphetNetForConditionalGeneration", "ProphetNetConfig", dict(vocab_size=VOCAB,
        hidden_size=HIDDEN, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, num_encoder_layers=LAYERS,
        num_decoder_layers=LAYERS, num_encoder_attention_heads=HEADS, num_decoder_attention_heads=HEADS,
        max_position_embeddings=POSITIONS, ngram=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=0), shifted_pair_batch, note="predicts two tokens ahead"),
]

VISION_CONVS = [
    entry("resnet", CONV, "ResNetForImageClassification", "ResNetConfig", dict(embedding_size=WIDTH,
        hidden_sizes=STAGES, depths=[1, 2], layer_type="bottleneck", num_labels=CLASSES), image_batch),
    entry("regnet", CONV, "RegNetForImageClassification", "RegNetConfig", dict(embedding_size=WIDTH,
        hidden_sizes=STAGES, depths=[1, 2], groups_width=8, num_labels=CLASSES), image_batch),
    entry("efficientnet", CONV, "EfficientNetForImageClassification", "EfficientNetConfig", dict(image_size=IMAGE,
        width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320, in_channels=[32, 16, 24], out_channels=[16,
        24, 40], kernel_sizes=[3, 3, 5], strides=[1, 2, 2], num_block_repeats=[1, 2, 2], expand_ratios=[1, 6, 6],
        depthwise_padding=[], num_labels=CLASSES), image_batch,
        null_gradients=("*.project_bn.bias",)),
    entry("mobilenet-v1", CONV, "MobileNetV1ForImageClassification", "MobileNetV1Config", dict(image_size=IMAGE,
        depth_multiplier=sized(0.25, 1.0), initializer_range=0.2, layer_norm_eps=1.0, num_labels=CLASSES), image_batch),
    entry("mobilenet-v2", CONV, "MobileNetV2ForImageClassification", "MobileNetV2Config", dict(image_size=IMAGE,
        depth_multiplier=sized(0.25, 1.0), initializer_range=0.2, layer_norm_eps=1.0, num_labels=CLASSES), image_batch,
        null_gradients=("*.reduce_1x1.normalization.bias",)),
    entry("convnext", CONV, "ConvNextForImageClassification", "ConvNextConfig", dict(image_size=IMAGE,
        hidden_sizes=WIDTHS, depths=DEPTHS, num_stages=3, num_labels=CLASSES), image_batch),
    entry("convnext-v2", CONV, "ConvNextV2ForImageClassification", "ConvNextV2Config", dict(image_size=IMAGE,
        hidden_sizes=WIDTHS, depths=DEPTHS, num_stages=3, num_labels=CLASSES), image_batch),
    entry("poolformer", CONV, "PoolFormerForImageClassification", "PoolFormerConfig", dict(hidden_sizes=[16, 16, 32,
        32], depths=[1, 1, 1, 1], num_labels=CLASSES), image_batch),
    entry("focalnet", CONV, "FocalNetForImageClassification", "FocalNetConfig", dict(image_size=IMAGE, patch_size=4,
        embed_dim=WIDTH, hidden_sizes=STAGES, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3],
        num_labels=CLASSES), image_batch, note="focal modulation"),
    entry("bit", CONV, "BitForImageClassification", "BitConfig", dict(embedding_size=WIDTH, hidden_sizes=STAGES,
        depths=[1, 2], num_groups=sized(2, 32), num_labels=CLASSES), large_image_batch,
        note="weight-standardised convolutions, group norm",
        lr=(1e-4, 1e-3)),
    entry("hgnet-v2", CONV, "HGNetV2ForImageClassification", "HGNetV2Config", dict(stem_channels=[3, 16, 16],
        embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], stage_in_channels=[16, 32], stage_mid_channels=[8,
        8], stage_out_channels=[32, 64], stage_num_blocks=[1, 1], stage_downsample=[False, True],
        stage_light_block=[False, True], stage_kernel_size=[3, 5], stage_numb_of_layers=[2, 2], num_labels=CLASSES),
        large_image_batch,
        lr=(1e-5, 1e-4)),
]

VISION_TRANSFORMERS = [
    entry("vit", VIT, "ViTForImageClassification", "ViTConfig", VISION, image_batch),
    entry("deit", VIT, "DeiTForImageClassification", "DeiTConfig", VISION, image_batch),
    entry("swin", VIT, "SwinForImageClassification", "SwinConfig", dict(image_size=IMAGE, patch_size=4,
        embed_dim=sized(16, 96), depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES), image_batch,
        note="shifted windows"),
    entry("swinv2", VIT, "Swinv2ForImageClassification", "Swinv2Config", dict(image_size=IMAGE, patch_size=4,
        embed_dim=sized(16, 96), depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES), image_batch),
    entry("beit", VIT, "BeitForImageClassification", "BeitConfig", dict(VISION, use_relative_position_bias=True),
        image_batch),
    entry("dinov2", VIT, "Dinov2ForImageClassification", "Dinov2Config", VISION, image_batch),
    entry("pvt-v2", VIT, "PvtV2ForImageClassification", "PvtV2Config", dict(image_size=IMAGE, hidden_sizes=[16, 16,
        32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], sr_ratios=[4, 2, 1, 1], mlp_ratios=[2, 2, 2,
        2], num_labels=CLASSES), image_batch),
    entry("segformer", VIT, "SegformerForSemanticSegmentation", "SegformerConfig", dict(hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], sr_ratios=[4, 2, 1, 1], mlp_ratios=[2, 2, 2, 2],
        decoder_hidden_size=32, num_labels=CLASSES), segmentation_batch, note="semantic segmentation",
        null_gradients=("decode_head.linear_projections.*.bias",)),
    entry("mobilevit", VIT, "MobileViTForImageClassification", "MobileViTConfig", dict(image_size=IMAGE,
        hidden_sizes=WIDTHS, neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 48], num_attention_heads=4,
        num_labels=CLASSES), image_batch,
        null_gradients=("*.output.dense.bias",)),
    entry("siglip", VIT, "SiglipForImageClassification", "SiglipConfig", dict(vision_config=VISION, text_config=TEXT,
        num_labels=CLASSES), image_batch, note="attention pooling",
        null_gradients=("*.k_proj.bias",)),
    entry("levit", VIT, "LevitForImageClassification", "LevitConfig", dict(image_size=64, hidden_sizes=WIDTHS,
        num_attention_heads=[2, 3, 4], key_dim=[8, 8, 8], depths=[1, 1, 1], num_labels=CLASSES),
        large_image_batch, note="BatchNorm in attention",
        lr=(1e-5, 1e-5), null_gradients=("*.batch_norm.bias",)),
    entry("cvt", VIT, "CvtForImageClassification", "CvtConfig", dict(embed_dim=[16, 16, 32], num_heads=[1, 2, 4],
        depth=[1, 2, 3], num_labels=CLASSES), image_batch, note="convolutional projections",
        lr=(1e-4, 1e-3)),
    entry("dpt", VIT, "DPTForSemanticSegmentation", "DPTConfig", dict(VISION, num_hidden_layers=4,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, is_hybrid=False),
        segmentation_batch, note="semantic segmentation",
        lr=(1e-5, 1e-2)),
    entry("timesformer", VIT, "TimesformerForVideoClassification", "TimesformerConfig", dict(VISION, num_frames=2),
        lambda: dict(pixel_values=torch.randn(BATCH, 2, 3, IMAGE, IMAGE), labels=classes()), note="video"),
    entry("perceiver", VIT, "PerceiverForImageClassificationLearned", "PerceiverConfig", dict(num_latents=8,
        d_latents=HIDDEN, d_model=HIDDEN, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=HEADS,
        num_cross_attention_heads=HEADS, image_size=16, num_labels=CLASSES), lambda: dict(inputs=torch.randn(BATCH, 3,
        16, 16), labels=classes()), note="latent cross attention"),
]
# fmt: on


def make_wav2vec2_ctc() -> tuple[nn.Module, Batch]:
    """Wav2Vec2 with a CTC head; the loss is computed outside, on labels of equal length."""
    return build_model("Wav2Vec2ForCTC", make_config("Wav2Vec2Config", **SPEECH)), (
        torch.randn(BATCH, 800),
        torch.randint(1, 32, (BATCH, 5)),
    )


def ctc_loss(model: nn.Module, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """CTC loss of the model's logits, every sample using all its frames and labels."""
    scores = model(input_values=values).logits.log_softmax(-1).transpose(0, 1)
    frames, count = scores.shape[:2]
    return F.ctc_loss(scores, labels, (frames,) * count, (labels.shape[1],) * count, zero_infinity=True)


# fmt: off
AUDIO_MODELS = [
    entry("wav2vec2-classifier", AUDIO, "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", SPEECH, speech_batch,
        note="weight norm, layer drop in Python"),
    entry("hubert", AUDIO, "HubertForSequenceClassification", "HubertConfig", SPEECH, speech_batch,
        note="weight norm, layer drop in Python"),
    entry("wavlm", AUDIO, "WavLMForSequenceClassification", "WavLMConfig", SPEECH, speech_batch,
        note="layer drop in Python"),
    entry("ast", AUDIO, "ASTForAudioClassification", "ASTConfig", dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, intermediate_size=INNER, patch_size=8, frequency_stride=8, time_stride=8,
        max_length=32, num_mel_bins=16, num_labels=CLASSES), lambda: dict(input_values=torch.randn(BATCH, 32, 16),
        labels=classes())),
    entry("whisper", AUDIO, "WhisperForConditionalGeneration", "WhisperConfig", dict(BART, num_mel_bins=16,
        max_source_positions=16, max_target_positions=32, suppress_tokens=None, begin_suppress_tokens=None),
        lambda: dict(input_features=torch.randn(BATCH, 16, 32), labels=tokens(12)),
        note="tied weights, layer drop in Python"),
    entry("sew", AUDIO, "SEWForSequenceClassification", "SEWConfig", dict(SPEECH, squeeze_factor=2), speech_batch),
    entry("speech-to-text", AUDIO, "Speech2TextForConditionalGeneration", "Speech2TextConfig", dict(BART,
        num_conv_layers=2, conv_kernel_sizes=(5, 5), conv_channels=16, input_feat_per_channel=8, input_channels=1,
        max_source_positions=32, max_target_positions=32), lambda: dict(input_features=torch.randn(BATCH, 32, 8),
        labels=tokens(12)), note="layer drop in Python"),
]

TIME_SERIES = [
    entry("patchtst", "time series", "PatchTSTForPrediction", "PatchTSTConfig", dict(num_input_channels=2,
        context_length=16, prediction_length=4, patch_length=4, patch_stride=4, d_model=HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=INNER, loss="mse"),
        lambda: dict(past_values=torch.randn(BATCH, 16, 2), future_values=torch.randn(BATCH, 4, 2))),
    entry("patchtsmixer", "time series", "PatchTSMixerForPrediction", "PatchTSMixerConfig", dict(num_input_channels=2,
        context_length=16, prediction_length=4, patch_length=4, patch_stride=4, d_model=16, num_layers=LAYERS),
        lambda: dict(past_values=torch.randn(BATCH, 16, 2), future_values=torch.randn(BATCH, 4, 2))),
]

EXPERTS = [
    entry("mixtral", MOE, "MixtralForCausalLM", "MixtralConfig", dict(GROUPED, num_local_experts=4,
        num_experts_per_tok=2, output_router_logits=True), causal_batch),
    entry("qwen3-moe", MOE, "Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(GROUPED, head_dim=HEAD, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32), causal_batch),
    entry("olmoe", MOE, "OlmoeForCausalLM", "OlmoeConfig", dict(GROUPED, num_experts=4, num_experts_per_tok=2),
        causal_batch),
    entry("gpt-oss", MOE, "GptOssForCausalLM", "GptOssConfig", dict(GROUPED, head_dim=HEAD, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=WINDOW), causal_batch, note="attention sinks"),
    entry("deepseek-v3", MOE, "DeepseekV3ForCausalLM", "DeepseekV3Config", dict(TEXT, num_key_value_heads=HEADS,
        n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=32, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=HEAD, qk_nope_head_dim=HEAD,
        v_head_dim=HEAD), causal_batch, note="latent attention"),
]

STATE_SPACES = [
    entry("mamba", SSM, "MambaForCausalLM", "MambaConfig", MAMBA, causal_batch, note="scan unrolled in Python"),
    entry("mamba2", SSM, "Mamba2ForCausalLM", "Mamba2Config", dict(vocab_size=VOCAB, hidden_size=HIDDEN,
        num_hidden_layers=LAYERS, state_size=8, conv_kernel=4, expand=2, num_heads=8,
        head_dim=2 * HIDDEN // 8, n_groups=2, chunk_size=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2), causal_batch, note="chunked scan"),
    entry("rwkv", SSM, "RwkvForCausalLM", "RwkvConfig", dict(vocab_size=VOCAB, hidden_size=HIDDEN,
        num_hidden_layers=LAYERS, attention_hidden_size=HIDDEN, intermediate_size=INNER, context_length=32,
        bos_token_id=1, eos_token_id=2), causal_batch, note="linear recurrence unrolled in Python"),
    entry("recurrent-gemma", SSM, "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", dict(TEXT, num_hidden_layers=3,
        num_key_value_heads=1, lru_width=HIDDEN, attention_window_size=8), causal_batch,
        note="gated linear recurrence"),
    entry("qwen3-next", SSM, "Qwen3NextForCausalLM", "Qwen3NextConfig", dict(GROUPED, head_dim=HEAD, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=HEAD, linear_value_head_dim=HEAD, layer_types=["linear_attention",
        "full_attention"] * (LAYERS // 2)), causal_batch, note="gated delta net with attention and experts"),
    entry("jamba", SSM, "JambaForCausalLM", "JambaConfig", dict(GROUPED, num_experts=4, num_experts_per_tok=2,
        expert_layer_period=2, expert_layer_offset=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
        mamba_dt_rank=4, use_mamba_kernels=False), causal_batch, note="hybrid with attention and experts"),
]
# fmt: on


def make_clip() -> tuple[nn.Module, Batch]:
    """CLIP: text and image towers with the contrastive loss."""
    text = dict(TEXT, projection_dim=HIDDEN)
    vision = dict(VISION, projection_dim=HIDDEN)
    config = make_config("CLIPConfig", text_config=text, vision_config=vision, projection_dim=HIDDEN)
    ids = tokens()
    ids[:, -1] = 2
    return build_model("CLIPModel", config), (ids, torch.randn(BATCH, 3, IMAGE, IMAGE))


def clip_loss(model: nn.Module, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """The contrastive loss that CLIP computes itself when asked."""
    return model(input_ids=ids, pixel_values=images, return_loss=True).loss


def make_vision_encoder_decoder() -> tuple[nn.Module, Batch]:
    """An image captioner: ViT encoder and GPT-2 decoder with cross attention."""
    from transformers import VisionEncoderDecoderConfig

    decoder = make_config("GPT2Config", **GPT2, add_cross_attention=True, is_decoder=True)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(make_config("ViTConfig", **VISION), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    batch = dict(pixel_values=torch.randn(BATCH, 3, IMAGE, IMAGE), labels=tokens(12))
    return build_model("VisionEncoderDecoderModel", config), batch


def make_llava() -> tuple[nn.Module, Batch]:
    """A vision language model: image features written in place of image tokens."""
    text = make_config("LlamaConfig", **GROUPED)
    vision = make_config("CLIPVisionConfig", **VISION, projection_dim=HIDDEN)
    config = make_config("LlavaConfig", text_config=text, vision_config=vision, image_token_index=VOCAB - 1)
    ids = tokens(length=2 * SEQ, high=VOCAB - 1)
    ids[:, 1 : 1 + (IMAGE // 8) ** 2] = VOCAB - 1
    labels = ids.masked_fill(ids == VOCAB - 1, -100)
    return build_model("LlavaForConditionalGeneration", config), dict(
        input_ids=ids, pixel_values=torch.randn(BATCH, 3, IMAGE, IMAGE), labels=labels
    )


# fmt: off
MULTIMODAL = [
    Entry("llava", MULTI, make_llava, note="masked scatter of image features"),
    Entry("clip", MULTI, make_clip, clip_loss, note="contrastive loss",
        lr=(1e-5, 1e-5), null_gradients=("*.k_proj.bias",)),
    Entry("vit-gpt2", MULTI, make_vision_encoder_decoder, note="image captioning, cross attention"),
]
# fmt: on

TRANSFORMERS: list[Entry] = [
    *DECODERS,
    *ENCODERS,
    *ENCODER_DECODERS,
    *VISION_CONVS,
    *VISION_TRANSFORMERS,
    *AUDIO_MODELS,
    *TIME_SERIES,
    *EXPERTS,
    *STATE_SPACES,
    *MULTIMODAL,
    entry(
        "yoso",
        ENC,
        "YosoForMaskedLM",
        "YosoConfig",
        dict(TEXT, use_expectation=True),
        masked_batch,
        note="an autograd.Function whose backward is not the derivative of its forward",
    ),
]

# fmt: off
# Kept to show that the reason is still true and that the error is a clear one. None of these is in the zoo.
UNCAPTURABLE: list[Entry] = [
    entry("longformer", ENC, "LongformerForMaskedLM", "LongformerConfig", dict(TEXT, attention_window=4),
        masked_batch, failure="branches in Python on whether any token has global attention (`mask.any().item()`)"),
    entry("switch", MOE, "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", dict(T5,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=4, expert_capacity=8,
        router_jitter_noise=0.0), pair_batch,
        failure="its router calls `self.classifier.to(dtype)` in forward; parameters cannot be swapped while exported"),
    entry("wav2vec2-ctc-inner-loss", AUDIO, "Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, ctc_batch,
        failure="checks `labels.max() >= vocab_size` in Python to refuse wrong labels"),
    Entry("wav2vec2-ctc", AUDIO, make_wav2vec2_ctc, ctc_loss,
        failure="`aten._ctc_loss` has no shape rule: no loss with CTC can be traced"),
]
# fmt: on
