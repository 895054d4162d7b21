"""Models of packages outside transformers, tiny where the package permits it, with their inputs.

A package is a function that yields `Case`s and imports its own dependencies, so that a missing
package costs only its own rows. torchvision's compiled operators load only with some builds of
torch; otherwise their schemas are declared, so that models without these operators can be imported.
AlexNet and VGG are left out: they have at least 60 and 130 million parameters.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from trials import Case, Inputs

CAPTURED, SMALLER, LARGER = 4, 2, 9
# The smallest model of each family of timm, by parameters.
TIMM = (
    "beit3_base_patch16_224", "beit_base_patch16_224", "caformer_s18", "cait_xxs24_224",
    "coat_tiny", "coatnet_pico_rw_224", "convit_tiny", "convmixer_1024_20_ks9_p14",
    "convnext_atto_rms", "crossvit_tiny_240", "cs3darknet_focus_s", "davit_tiny",
    "deit_tiny_patch16_224", "densenet121", "dla102x", "dpn48b", "eca_botnext26ts_256",
    "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0", "efficientnet_lite0",
    "efficientvit_b0", "efficientvit_m0", "ese_vovnet19b_slim_dw", "eva02_tiny_patch14_224",
    "fasternet_s", "fastvit_t8", "focalnet_tiny_srf", "gcvit_xxtiny", "ghostnet_050",
    "gmlp_ti16_224", "hardcorenas_b", "hgnetv2_b0", "hiera_tiny_224", "hrnet_w18_small",
    "inception_next_atto", "inception_resnet_v2", "inception_v3", "inception_v4", "lcnet_035",
    "legacy_seresnet18", "legacy_xception", "levit_256", "mobilenetv5_base", "mobilevit_xxs",
    "mvitv2_tiny", "naflexvit_base_patch16_parfac_gap", "nasnetalarge", "nest_tiny",
    "nextvit_small", "pit_ti_224", "pnasnet5large", "pvt_v2_b0", "rdnet_tiny",
    "repghostnet_050", "repvit_m0_9", "res2net50_14w_8s", "resnest14d", "resnet10t",
    "resnetv2_18", "rexnet_100", "sam2_hiera_tiny", "samvit_base_patch16_224", "selecsls42",
    "sequencer2d_s", "shvit_s1", "skresnet18", "starnet_s100", "swiftformer_xs",
    "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_224", "swinv2_tiny_window8_256",
    "test_byobnet", "test_mambaout", "test_nfnet", "tiny_vit_5m_224",
    "tnt_s_legacy_patch16_224", "tresnet_m", "twins_svt_small", "vgg11", "visformer_tiny",
    "vit_srelpos_small_patch16_224", "vit_tiny_r_s16_p8_224", "vitamin_small_224",
    "volo_d1_224", "xception41p", "xcit_nano_12_p8_224",
)  # fmt: skip
BLOCKS = 4  # of a family whose blocks are all alike and whose smallest member is large
IMAGE_SIZES = (64, 96, 128, 160, 224, 256)


def image(*shape: int) -> tuple[Callable[[], Inputs], ...]:
    """Batches of random tensors of this shape."""
    return batches(lambda batch, source: (torch.randn(batch, *shape, generator=source),))


def tokens(length: int, vocabulary: int = 50) -> tuple[Callable[[], Inputs], ...]:
    return batches(
        lambda batch, source: (torch.randint(0, vocabulary, (batch, length), generator=source),)
    )


def batches(
    make: Callable[[int, torch.Generator], Inputs],
) -> tuple[Callable[[], Inputs], ...]:
    """The inputs at the captured, a smaller and a larger batch size."""

    def made(batch: int) -> Inputs:
        return make(batch, torch.Generator().manual_seed(batch))

    return tuple(functools.partial(made, batch) for batch in (CAPTURED, SMALLER, LARGER))


@functools.cache
def declare_operators() -> list[torch.library.Library]:
    """Declares torchvision's operators without kernels if its library cannot be loaded."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return []
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return [library]
    return []


class Graph(nn.Module):
    """A network of nodes and edges, and the mean of its outputs for the nodes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.network(x, edge_index).log_softmax(-1)


def graphs(features: int = 8) -> tuple[Callable[[], Inputs], ...]:
    def made(nodes: int, edges: int) -> Inputs:
        source = torch.Generator().manual_seed(nodes)
        return (
            torch.randn(nodes, features, generator=source),
            torch.randint(0, nodes, (2, edges), generator=source),
        )

    sizes = ((12, 30), (5, 9), (31, 77))
    return tuple(functools.partial(made, nodes, edges) for nodes, edges in sizes)


def timm_models() -> Iterator[Case]:
    import timm

    def attempts(name: str) -> Iterator[tuple[int, Callable[[], nn.Module]]]:
        chosen = ("img_size", "depth", "drop_path_rate"), ("img_size", "depth"), ("img_size",
                  "drop_path_rate"), ("img_size",), ("drop_path_rate",), ()  # fmt: skip
        for size in IMAGE_SIZES:
            values = {"img_size": size, "depth": BLOCKS, "drop_path_rate": 0.1}
            for options in chosen:
                more = {option: values[option] for option in options}
                yield size, functools.partial(timm.create_model, name, num_classes=10, **more)

    @functools.cache
    def first(name: str) -> tuple[int, Callable[[], nn.Module]]:
        """The smallest image for which the model can be built and runs."""
        for size, build in attempts(name):
            try:
                with torch.random.fork_rng():  # So that each build draws the same weights.
                    build().train()(torch.randn(2, 3, size, size))
                return size, build
            except Exception:
                continue
        raise ValueError(f"no image of {IMAGE_SIZES} fits")

    def inputs(name: str, batch: int) -> Inputs:
        size = first(name)[0]
        return (torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch)),)

    for name in TIMM:
        yield Case(
            "timm",
            name,
            functools.partial(lambda name: first(name)[1](), name),
            tuple(functools.partial(inputs, name, batch) for batch in (CAPTURED, SMALLER, LARGER)),
        )


def torchvision_models() -> Iterator[Case]:
    from torchvision import models

    plain = {
        "convnext_tiny": 32, "densenet121": 32, "efficientnet_b0": 32,
        "efficientnet_v2_s": 32, "mnasnet0_5": 32, "mobilenet_v2": 32, "mobilenet_v3_small": 32,
        "regnet_y_400mf": 32, "regnet_x_400mf": 32, "resnet18": 32, "resnext50_32x4d": 32,
        "shufflenet_v2_x0_5": 32, "squeezenet1_1": 64, "swin_t": 32, "swin_v2_t": 32,
    }  # fmt: skip
    for name, size in plain.items():
        build = functools.partial(getattr(models, name), num_classes=10)
        yield Case("torchvision", name, build, image(3, size, size))
    for name, aux in (("googlenet", False), ("googlenet", True), ("inception_v3", True)):
        build = functools.partial(
            getattr(models, name), num_classes=10, init_weights=False, aux_logits=aux
        )
        title = name + ("_aux" if aux else "")
        size = 299 if name == "inception_v3" else 64
        yield Case("torchvision", title, build, image(3, size, size))
        if aux:
            yield Case(
                "torchvision", f"{title} --mode train", build, image(3, size, size),
                {"mode": "train"},
            )  # fmt: skip
    vit = functools.partial(
        models.VisionTransformer, image_size=32, patch_size=16, num_layers=4, num_heads=2,
        hidden_dim=32, mlp_dim=64, num_classes=10, dropout=0.1,
    )  # fmt: skip
    yield Case("torchvision", "vit", vit, image(3, 32, 32))
    maxvit = functools.partial(
        models.MaxVit, input_size=(64, 64), stem_channels=16, partition_size=2,
        block_channels=[16, 32], block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.2,
        num_classes=10,
    )  # fmt: skip
    yield Case("torchvision", "maxvit", maxvit, image(3, 64, 64))
    for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        build = functools.partial(
            getattr(models.segmentation, name), weights=None, weights_backbone=None, num_classes=4
        )
        yield Case("torchvision", name, build, image(3, 48, 48))
    for name in ("r3d_18", "mc3_18", "r2plus1d_18"):
        build = functools.partial(getattr(models.video, name), num_classes=5)
        yield Case("torchvision", name, build, image(3, 4, 32, 32))


def diffusers_models() -> Iterator[Case]:
    import diffusers

    def case(name: str, inputs: tuple[Callable[[], Inputs], ...], **config: Any) -> Case:
        kind = getattr(diffusers, name)
        return Case("diffusers", name, functools.partial(kind, **config), inputs)

    small = {"block_out_channels": (8, 16), "norm_num_groups": 4}
    noisy = batches(
        lambda batch, source: {
            "sample": torch.randn(batch, 3, 16, 16, generator=source),
            "timestep": torch.randint(0, 100, (batch,), generator=source),
        }
    )
    conditioned = batches(
        lambda batch, source: {
            "sample": torch.randn(batch, 4, 16, 16, generator=source),
            "timestep": torch.randint(0, 100, (batch,), generator=source),
            "encoder_hidden_states": torch.randn(batch, 5, 16, generator=source),
        }
    )
    hidden = batches(
        lambda batch, source: {
            "hidden_states": torch.randn(batch, 4, 8, 8, generator=source),
            "timestep": torch.randint(0, 100, (batch,), generator=source),
            "class_labels": torch.randint(0, 10, (batch,), generator=source),
        }
    )
    two = {"layers_per_block": 1, **small}
    yield case("UNet2DModel", noisy, sample_size=16, dropout=0.1,
               down_block_types=("DownBlock2D", "AttnDownBlock2D"),
               up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
               **two)  # fmt: skip
    yield case("UNet2DConditionModel", conditioned, sample_size=16, cross_attention_dim=16,
               down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
               up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=4,
               **two)  # fmt: skip
    yield case("ControlNetModel", batches(
        lambda batch, source: {
            **conditioned[0](), "sample": torch.randn(batch, 4, 16, 16, generator=source),
            "timestep": torch.randint(0, 100, (batch,), generator=source),
            "encoder_hidden_states": torch.randn(batch, 5, 16, generator=source),
            "controlnet_cond": torch.randn(batch, 3, 128, 128, generator=source),
        }), cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), **two)  # fmt: skip
    for kind in ("AutoencoderKL", "VQModel"):
        yield case(kind, image(3, 16, 16), down_block_types=("DownEncoderBlock2D",) * 2,
                   up_block_types=("UpDecoderBlock2D",) * 2, **two)  # fmt: skip
    yield case("AutoencoderTiny", image(3, 32, 32), encoder_block_out_channels=(8, 8),
               decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1),
               num_decoder_blocks=(1, 1))  # fmt: skip
    yield case("DiTTransformer2DModel", hidden, num_attention_heads=2, attention_head_dim=8,
               in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=2,
               num_embeds_ada_norm=10)  # fmt: skip
    yield case("SD3Transformer2DModel", batches(
        lambda batch, source: {
            "hidden_states": torch.randn(batch, 4, 8, 8, generator=source),
            "encoder_hidden_states": torch.randn(batch, 5, 16, generator=source),
            "pooled_projections": torch.randn(batch, 16, generator=source),
            "timestep": torch.randint(0, 100, (batch,), generator=source),
        }), sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16,
        pooled_projection_dim=16, out_channels=4)  # fmt: skip
    yield case("PriorTransformer", batches(
        lambda batch, source: {
            "hidden_states": torch.randn(batch, 8, generator=source),
            "timestep": torch.randint(0, 100, (batch,), generator=source),
            "proj_embedding": torch.randn(batch, 8, generator=source),
            "encoder_hidden_states": torch.randn(batch, 7, 8, generator=source),
        }), num_attention_heads=2, attention_head_dim=4, num_layers=2, embedding_dim=8,
        num_embeddings=7, additional_embeddings=4)  # fmt: skip
    yield case("UNet1DModel", batches(
        lambda batch, source: {
            "sample": torch.randn(batch, 2, 32, generator=source),
            "timestep": torch.randint(0, 100, (batch,), generator=source),
        }), sample_size=32, in_channels=2, out_channels=2, extra_in_channels=64,
        block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
        up_block_types=("UpBlock1D", "UpBlock1DNoSkip"))  # fmt: skip


def x_transformers_models() -> Iterator[Case]:
    from x_transformers import Decoder, Encoder, TransformerWrapper, ViTransformerWrapper

    def wrapped(layers: Any, options: dict[str, Any], wrapper: dict[str, Any]) -> nn.Module:
        attention = layers(dim=32, depth=4, heads=4, attn_dim_head=8, **options)
        return TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=attention, **wrapper)

    variants: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "decoder": (Decoder, {}, {}),
        "encoder_dropout": (
            Encoder,
            {"attn_dropout": 0.1, "ff_dropout": 0.1},
            {"emb_dropout": 0.1},
        ),
        "rotary": (Decoder, {"rotary_pos_emb": True}, {}),
        "alibi": (Decoder, {"alibi_pos_bias": True}, {}),
        "t5_bias": (Encoder, {"rel_pos_bias": True}, {}),
        "layer_dropout": (Encoder, {"layer_dropout": 0.1}, {}),
        "memory_tokens": (Encoder, {}, {"num_memory_tokens": 3}),
        "glu_rms": (Decoder, {"ff_glu": True, "use_rmsnorm": True}, {}),
        "gqa": (Decoder, {"attn_kv_heads": 2}, {}),
        "macaron": (Encoder, {"macaron": True}, {}),
        "sandwich": (Encoder, {"sandwich_norm": True}, {}),
        "talking_heads": (Encoder, {"attn_pre_talking_heads": True}, {}),
        "residual_attn": (Encoder, {"residual_attn": True}, {}),
        "qk_norm": (Decoder, {"attn_qk_norm": True}, {}),
        "shift_tokens": (Decoder, {"shift_tokens": 1}, {}),
    }
    for name, parts in variants.items():
        yield Case("x-transformers", name, functools.partial(wrapped, *parts), tokens(12))
    vit = functools.partial(
        lambda: ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=10,
            attn_layers=Encoder(dim=32, depth=4, heads=4),
        )
    )  # fmt: skip
    yield Case("x-transformers", "vit", vit, image(3, 32, 32))


def vit_pytorch_models() -> Iterator[Case]:
    square = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32}
    block = {"depth": 4, "heads": 2, "mlp_dim": 64}
    both = {**square, **block}
    drops = {"dropout": 0.1, "emb_dropout": 0.1}
    kinds: list[tuple[str, str, dict[str, Any], tuple[int, ...]]] = [
        ("vit", "ViT", {**both, **drops}, (3, 32, 32)),
        ("simple_vit", "SimpleViT", both, (3, 32, 32)),
        ("deepvit", "DeepViT", {**both, **drops}, (3, 32, 32)),
        ("cait", "CaiT", {**both, "cls_depth": 2, "layer_dropout": 0.05, **drops}, (3, 32, 32)),
        ("parallel_vit", "ViT", {**both, "num_parallel_branches": 2, **drops}, (3, 32, 32)),
        ("vit_for_small_dataset", "ViT", {**both, **drops}, (3, 32, 32)),
        ("vit_with_patch_dropout", "ViT", {**both, "patch_dropout": 0.25}, (3, 32, 32)),
        ("simple_vit_with_patch_dropout", "SimpleViT", {**both, "patch_dropout": 0.25},
         (3, 32, 32)),
        ("simple_vit_with_register_tokens", "SimpleViT", both, (3, 32, 32)),
        ("simple_vit_with_qk_norm", "SimpleViT", both, (3, 32, 32)),
        ("simple_vit_with_value_residual", "SimpleViT", both, (3, 32, 32)),
        ("vit_with_patch_merger", "ViT", {**both, "patch_merge_layer": 2,
                                          "patch_merge_num_tokens": 4}, (3, 32, 32)),
        ("normalized_vit", "nViT", both, (3, 32, 32)),
        ("rvt", "RvT", {**both, **drops}, (3, 32, 32)),
        ("pit", "PiT", {**square, "depth": (2, 2), "heads": 2, "mlp_dim": 64, **drops},
         (3, 32, 32)),
        ("cct", "CCT", {"img_size": 32, "embedding_dim": 32, "n_conv_layers": 1, "kernel_size": 3,
                        "num_layers": 3, "num_heads": 2, "mlp_ratio": 2, "num_classes": 10,
                        "stochastic_depth_rate": 0.1}, (3, 32, 32)),
        ("cross_vit", "CrossViT", {"image_size": 32, "num_classes": 10, "sm_dim": 16, "lg_dim": 32,
                                   "sm_patch_size": 8, "lg_patch_size": 16, "depth": 2},
         (3, 32, 32)),
        ("levit", "LeViT", {"image_size": 64, "num_classes": 10, "dim": (16, 24, 32), "stages": 3,
                            "depth": 2, "heads": (2, 2, 2), "mlp_mult": 2}, (3, 64, 64)),
        ("cvt", "CvT", {"num_classes": 10, "s1_emb_dim": 8, "s2_emb_dim": 16, "s3_emb_dim": 24,
                        "s1_heads": 1, "s2_heads": 2, "s3_heads": 2, "s3_depth": 2}, (3, 64, 64)),
        ("twins_svt", "TwinsSVT", {"num_classes": 10, "s1_emb_dim": 8, "s2_emb_dim": 16,
                                   "s3_emb_dim": 24, "s4_emb_dim": 32, "s3_depth": 1,
                                   "s1_local_patch_size": 2, "s2_local_patch_size": 2,
                                   "s3_local_patch_size": 2, "s4_local_patch_size": 1,
                                   "s4_global_k": 1, "s1_global_k": 2, "s2_global_k": 2,
                                   "s3_global_k": 2}, (3, 64, 64)),
        ("crossformer", "CrossFormer", {"num_classes": 10, "dim": (32, 48, 64, 96),
                                        "depth": (1, 1, 1, 1), "global_window_size": (4, 2, 1, 1),
                                        "local_window_size": 2}, (3, 64, 64)),
        ("scalable_vit", "ScalableViT", {"num_classes": 10, "dim": 16, "heads": (2, 2, 2, 2),
                                         "depth": (1, 1, 1, 1), "reduction_factor": (4, 2, 2, 1),
                                         "window_size": (2, 2, None, None)},
         (3, 64, 64)),
        ("max_vit", "MaxViT", {"num_classes": 10, "dim_conv_stem": 8, "dim": 16, "dim_head": 8,
                               "depth": (1, 1), "window_size": 4}, (3, 64, 64)),
        ("nest", "NesT", {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2,
                          "num_hierarchies": 2, "block_repeats": (1, 1), "num_classes": 10},
         (3, 32, 32)),
        ("mobile_vit", "MobileViT", {"image_size": (64, 64), "dims": [16, 24, 32],
                                     "channels": [8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64],
                                     "num_classes": 10}, (3, 64, 64)),
        ("xcit", "XCiT", {**square, "depth": 2, "cls_depth": 1, "heads": 2, "mlp_dim": 32,
                          "layer_dropout": 0.05}, (3, 32, 32)),
        ("regionvit", "RegionViT", {"dim": (8, 16, 24, 32), "depth": (1, 1, 1, 1),
                                    "window_size": 2, "num_classes": 10}, (3, 64, 64)),
        ("vit_1d", "ViT", {"seq_len": 32, "patch_size": 4, "num_classes": 10, "dim": 32, **block},
         (3, 32)),
        ("vit_3d", "ViT", {"image_size": 16, "image_patch_size": 8, "frames": 4,
                           "frame_patch_size": 2, "num_classes": 10, "dim": 32, **block},
         (3, 4, 16, 16)),
        ("simple_vit_with_fft", "SimpleViT", {**both, "freq_patch_size": 8}, (3, 32, 32)),
        ("simple_vit_with_hyper_connections", "SimpleViT", {**both, "num_residual_streams": 2},
         (3, 32, 32)),
        ("t2t", "T2TViT", {"dim": 32, "image_size": 32, "depth": 2, "heads": 2, "mlp_dim": 64,
                           "num_classes": 10}, (3, 32, 32)),
    ]  # fmt: skip
    for module, name, options, shape in kinds:
        title = f"{module}.{name}"

        def build(module: str, name: str, options: dict[str, Any]) -> nn.Module:
            return getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**options)

        yield Case("vit-pytorch", title, functools.partial(build, module, name, options),
                   image(*shape))  # fmt: skip


def torch_geometric_models() -> Iterator[Case]:
    from torch_geometric import nn as geometric
    from torch_geometric.nn import models

    sizes = {"in_channels": 8, "hidden_channels": 16, "num_layers": 4, "out_channels": 3}
    for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN"):
        build = functools.partial(lambda name: Graph(getattr(models, name)(**sizes)), name)
        yield Case("torch_geometric", name, build, graphs())
    dropped = functools.partial(lambda: Graph(models.GCN(**sizes, dropout=0.3, norm="BatchNorm")))
    yield Case("torch_geometric", "GCN_dropout_norm", dropped, graphs())
    jumping = functools.partial(lambda: Graph(models.GraphSAGE(**sizes, jk="cat")))
    yield Case("torch_geometric", "GraphSAGE_jumping", jumping, graphs())
    v2 = functools.partial(lambda: Graph(models.GAT(**sizes, v2=True, heads=2)))
    yield Case("torch_geometric", "GATv2", v2, graphs())

    def stacked(kind: str, **options: Any) -> nn.Module:
        layer = getattr(geometric, kind)
        return Graph(
            geometric.Sequential(
                "x, edge_index",
                [
                    (layer(8, 16, **options), "x, edge_index -> x"),
                    nn.ReLU(),
                    (layer(16, 16, **options), "x, edge_index -> x"),
                    nn.ReLU(),
                    (layer(16, 3, **options), "x, edge_index -> x"),
                ],
            )
        )

    for kind, options in (
        ("TransformerConv", {}), ("ChebConv", {"K": 2}), ("GraphConv", {}), ("TAGConv", {}),
        ("ARMAConv", {}), ("SGConv", {}), ("LEConv", {}), ("ResGatedGraphConv", {}),
        ("MFConv", {}), ("ClusterGCNConv", {}), ("GENConv", {}), ("FeaStConv", {}),
    ):  # fmt: skip
        build = functools.partial(stacked, kind, **options)
        yield Case("torch_geometric", kind, build, graphs())


def monai_models() -> Iterator[Case]:
    from monai.networks import nets

    flat = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    wide = {"channels": (4, 8, 16), "strides": (2, 2)}
    kinds: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
        ("UNet", {**flat, **wide, "num_res_units": 1, "dropout": 0.1}, (1, 32, 32)),
        ("BasicUNet", {**flat, "features": (4, 4, 8, 8, 16, 4)}, (1, 32, 32)),
        ("BasicUNetPlusPlus", {**flat, "features": (4, 4, 8, 8, 16, 4)}, (1, 32, 32)),
        ("DynUNet", {**flat, "kernel_size": [3, 3, 3], "strides": [1, 2, 2],
                     "upsample_kernel_size": [2, 2], "filters": [4, 8, 16],
                     "deep_supervision": True, "deep_supr_num": 1}, (1, 32, 32)),
        ("SegResNet", {**flat, "init_filters": 8, "dropout_prob": 0.1}, (1, 32, 32)),
        ("SegResNetVAE", {**flat, "input_image_size": (32, 32), "init_filters": 8}, (1, 32, 32)),
        ("UNETR", {**flat, "img_size": 32, "feature_size": 4, "hidden_size": 24, "mlp_dim": 32,
                   "num_heads": 2, "dropout_rate": 0.1}, (1, 32, 32)),
        ("SwinUNETR", {**flat, "feature_size": 12, "depths": (1, 1, 1, 1),
                       "num_heads": (1, 1, 1, 1), "drop_rate": 0.1}, (1, 64, 64)),
        ("VNet", {**flat, "dropout_prob_down": 0.1, "dropout_prob_up": (0.1, 0.1)}, (1, 32, 32)),
        ("AttentionUnet", {**flat, **wide}, (1, 32, 32)),
        ("DenseNet", {**flat, "init_features": 8, "growth_rate": 4, "block_config": (2, 2),
                      "dropout_prob": 0.1}, (1, 32, 32)),
        ("HighResNet", flat, (1, 16, 16)),
        ("ResNet", {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [4, 8, 8, 16],
                    "spatial_dims": 2, "n_input_channels": 1, "num_classes": 3}, (1, 32, 32)),
        ("ViT", {"in_channels": 1, "img_size": (16, 16), "patch_size": (8, 8), "hidden_size": 24,
                 "mlp_dim": 32, "num_layers": 4, "num_heads": 2, "classification": True,
                 "spatial_dims": 2, "dropout_rate": 0.1}, (1, 16, 16)),
        ("AutoEncoder", {**flat, **wide, "strides": (2, 2, 2)}, (1, 32, 32)),
        ("VarAutoEncoder", {"spatial_dims": 2, "in_shape": (1, 32, 32), "out_channels": 1,
                            "latent_size": 4, **wide, "strides": (2, 2, 2)}, (1, 32, 32)),
        ("Classifier", {"in_shape": (1, 32, 32), "classes": 3, "channels": (4, 8),
                        "strides": (2, 2), "dropout": 0.1}, (1, 32, 32)),
        ("Regressor", {"in_shape": (1, 32, 32), "out_shape": (1,), "channels": (4, 8),
                       "strides": (2, 2)}, (1, 32, 32)),
        ("FullyConnectedNet", {"in_channels": 8, "out_channels": 3, "hidden_channels": (16, 16),
                               "dropout": 0.1}, (8,)),
        ("VQVAE", {**flat, "out_channels": 1, "channels": (8, 8), "num_res_channels": (8, 8),
                   "num_res_layers": 1, "downsample_parameters": ((2, 4, 1, 1), (2, 4, 1, 1)),
                   "upsample_parameters": ((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
                   "num_embeddings": 16, "embedding_dim": 8}, (1, 16, 16)),
        ("MedNeXt", {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "init_filters": 8},
         (1, 32, 32)),
    ]  # fmt: skip
    for name, options, shape in kinds:
        build = functools.partial(getattr(nets, name), **options)
        yield Case("monai", name, build, image(*shape))


def segmentation_models() -> Iterator[Case]:
    import segmentation_models_pytorch as smp

    for name in ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3",
                 "DeepLabV3Plus", "UPerNet", "Segformer"):  # fmt: skip
        build = functools.partial(
            getattr(smp, name), encoder_name="resnet18", encoder_weights=None, classes=2
        )
        size = 128 if name == "PAN" else 64  # PAN averages the smallest feature map.
        yield Case("smp", name, build, image(3, size, size))
    for encoder in ("mobilenet_v2", "mit_b0", "efficientnet-b0"):
        build = functools.partial(smp.Unet, encoder_name=encoder, encoder_weights=None, classes=2)
        yield Case("smp", f"Unet_{encoder}", build, image(3, 64, 64))


def peft_models() -> Iterator[Case]:
    """Each kind of adapter of a tiny Llama; only its own parameters are trained."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    layers = {"target_modules": ["q_proj", "v_proj"]}
    words = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    options: dict[str, dict[str, Any]] = {
        "LoraConfig": {"r": 4, "lora_dropout": 0.1, **layers},
        "LoHaConfig": {"r": 4, **layers},
        "LoKrConfig": {"r": 4, **layers},
        "VeraConfig": {"r": 4, **layers},
        "HRAConfig": {"r": 4, **layers},
        "OFTConfig": {"r": 0, "oft_block_size": 4, **layers},
        "BOFTConfig": {"boft_block_size": 4, **layers},
        "FourierFTConfig": {"n_frequency": 10, **layers},
        "AdaLoraConfig": {"init_r": 4, "target_r": 2, "total_step": 10, **layers},
        "VBLoRAConfig": {"r": 4, "num_vectors": 8, "vector_length": 4, "topk": 2, **layers},
        "LNTuningConfig": {"target_modules": ["input_layernorm"]},
        "IA3Config": {
            "target_modules": ["k_proj", "v_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
        },
        "PrefixTuningConfig": words,
        "PromptTuningConfig": words,
        "PromptEncoderConfig": {"encoder_hidden_size": 8, **words},
        "AdaptionPromptConfig": {"adapter_len": 3, "adapter_layers": 1, "task_type": "CAUSAL_LM"},
    }

    def build(name: str) -> nn.Module:
        adapter = getattr(peft, name)(**options[name])
        return peft.get_peft_model(LlamaForCausalLM(config), adapter)

    named = batches(
        lambda batch, source: {"input_ids": torch.randint(0, 50, (batch, 12), generator=source)}
    )
    for name in options:
        yield Case("peft", name.removesuffix("Config"), functools.partial(build, name), named)


def ultralytics_models() -> Iterator[Case]:
    from ultralytics.nn import tasks

    for kind, files in (
        ("DetectionModel", ("yolov5n", "yolov8n", "yolo11n", "yolo12n")),
        ("SegmentationModel", ("yolov8n-seg",)),
        ("PoseModel", ("yolov8n-pose",)),
        ("ClassificationModel", ("yolov8n-cls",)),
    ):
        for file in files:
            build = functools.partial(getattr(tasks, kind), f"{file}.yaml", nc=4, verbose=False)
            yield Case("ultralytics", file, build, image(3, 64, 64))


def zuko_models() -> Iterator[Case]:
    """Normalizing flows."""
    from zuko import flows

    class Density(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.flow = getattr(flows, name)(3, 0, transforms=2)

        def forward(self, x: Tensor) -> Tensor:
            return -self.flow().log_prob(x)

    for name in ("MAF", "NSF", "NICE", "SOSPF", "BPF", "NCSF", "GF"):
        yield Case("zuko", name, functools.partial(Density, name), image(3))


def pykan_models() -> Iterator[Case]:
    from kan import KAN

    splines = functools.partial(KAN, width=[3, 4, 1], grid=3, k=3, auto_save=False)
    yield Case("pykan", "KAN", splines, image(3))


def other_models() -> Iterator[Case]:
    from denoising_diffusion_pytorch import GaussianDiffusion, KarrasUnet, Unet

    noisy = batches(
        lambda batch, source: (
            torch.randn(batch, 3, 16, 16, generator=source),
            torch.rand(batch, generator=source),
        )
    )
    unet = functools.partial(Unet, dim=8, dim_mults=(1, 2), flash_attn=False)
    yield Case("denoising-diffusion", "Unet", unet, noisy)
    karras = functools.partial(
        KarrasUnet, image_size=16, channels=3, dim=8, dim_max=16, num_downsamples=1, attn_res=(8,),
        attn_flash=False,
    )  # fmt: skip
    yield Case("denoising-diffusion", "KarrasUnet", karras, noisy)
    trained = functools.partial(lambda: GaussianDiffusion(unet(), image_size=16, timesteps=20))
    pixels = batches(lambda batch, source: (torch.rand(batch, 3, 16, 16, generator=source),))
    yield Case("denoising-diffusion", "GaussianDiffusion", trained, pixels)

    from perceiver_pytorch import Perceiver, PerceiverIO

    perceiver = functools.partial(
        Perceiver, num_freq_bands=2, depth=2, max_freq=4.0, input_channels=3, num_latents=4,
        latent_dim=16, num_classes=5, attn_dropout=0.1,
    )  # fmt: skip
    pixels_last = batches(lambda batch, source: (torch.randn(batch, 8, 8, 3, generator=source),))
    yield Case("perceiver", "Perceiver", perceiver, pixels_last)
    io = functools.partial(
        PerceiverIO, dim=8, queries_dim=8, logits_dim=5, depth=2, num_latents=4, latent_dim=16
    )
    queried = batches(
        lambda batch, source: {
            "data": torch.randn(batch, 6, 8, generator=source),
            "queries": torch.randn(batch, 3, 8, generator=source),
        }
    )
    yield Case("perceiver", "PerceiverIO", io, queried)

    from performer_pytorch import PerformerLM

    performer = functools.partial(
        PerformerLM, num_tokens=50, max_seq_len=16, dim=16, depth=2, heads=2, causal=False
    )
    yield Case("performer", "PerformerLM", performer, tokens(16))

    from mambapy.mamba import Mamba, MambaConfig

    mamba = functools.partial(lambda: Mamba(MambaConfig(d_model=16, n_layers=4)))
    yield Case("mambapy", "Mamba", mamba, image(8, 16))

    from pytorch_tabnet.tab_network import TabNet

    for rows in (128, 2):
        tabnet = functools.partial(
            lambda rows: TabNet(
                8, 3, n_d=4, n_a=4, n_steps=3, virtual_batch_size=rows,
                group_attention_matrix=torch.eye(8),
            ),
            rows,
        )  # fmt: skip
        yield Case("tabnet", f"TabNet_{rows}", tabnet, image(8))

    from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet

    common = {
        "input_channels": 1, "n_stages": 3, "features_per_stage": (4, 8, 16), "conv_op": nn.Conv2d,
        "kernel_sizes": 3, "strides": (1, 2, 2), "num_classes": 2, "n_conv_per_stage_decoder": 1,
        "conv_bias": True, "norm_op": nn.InstanceNorm2d, "nonlin": nn.LeakyReLU,
        "nonlin_kwargs": {"inplace": True},
    }  # fmt: skip
    plain = functools.partial(PlainConvUNet, **common, n_conv_per_stage=1, deep_supervision=True)
    yield Case("nnunet", "PlainConvUNet", plain, image(1, 32, 32))
    residual = functools.partial(ResidualEncoderUNet, **common, n_blocks_per_stage=1)
    yield Case("nnunet", "ResidualEncoderUNet", residual, image(1, 32, 32))


PACKAGES: dict[str, Callable[[], Iterator[Case]]] = {
    "timm": timm_models,
    "torchvision": torchvision_models,
    "diffusers": diffusers_models,
    "x-transformers": x_transformers_models,
    "vit-pytorch": vit_pytorch_models,
    "torch_geometric": torch_geometric_models,
    "monai": monai_models,
    "smp": segmentation_models,
    "peft": peft_models,
    "ultralytics": ultralytics_models,
    "zuko": zuko_models,
    "pykan": pykan_models,
    "others": other_models,
}
