"""LiBai's Swin transformers V2."""
from libai_wb.config import LazyCall
from libai_wb.models.swin_v2 import SwinTransformerV2


def swinv2(embed_dim, depths, num_heads, drop_path_rate, window_size):
    "A description of these sizes."
    return LazyCall(SwinTransformerV2)(
        img_size=256, patch_size=4, in_chans=3, num_classes=1000, embed_dim=embed_dim, depths=depths,
        num_heads=num_heads, window_size=window_size, mlp_ratio=4.0, qkv_bias=True, drop_rate=0.0, attn_drop_rate=0.0,
        drop_path_rate=drop_path_rate, ape=False, patch_norm=True, pretrained_window_sizes=(0, 0, 0, 0))


tiny = 96, (2, 2, 6, 2), (3, 6, 12, 24), 0.2
small = 96, (2, 2, 18, 2), (3, 6, 12, 24), 0.3
base = 128, (2, 2, 18, 2), (4, 8, 16, 32), 0.5  # LiBai's files have a width of 96 with the heads of 128
swinv2_tiny_patch4_window8_256, swinv2_tiny_patch4_window16_256 = swinv2(*tiny, 8), swinv2(*tiny, 16)
swinv2_small_patch4_window8_256, swinv2_small_patch4_window16_256 = swinv2(*small, 8), swinv2(*small, 16)
swinv2_base_patch4_window8_256, swinv2_base_patch4_window16_256 = swinv2(*base, 8), swinv2(*base, 16)
