"""LiBai's Swin transformers."""
from libai_wb.config import LazyCall
from libai_wb.models.swin import SwinTransformer


def swin(embed_dim, depths, num_heads, drop_path_rate, img_size=224, window_size=7):
    "A description of these sizes."
    return LazyCall(SwinTransformer)(
        img_size=img_size, patch_size=4, in_chans=3, num_classes=1000, embed_dim=embed_dim, depths=depths,
        num_heads=num_heads, window_size=window_size, mlp_ratio=4.0, qkv_bias=True, qk_scale=None, drop_rate=0.0,
        attn_drop_rate=0.0, drop_path_rate=drop_path_rate, ape=False, patch_norm=True)


shallow, deep = (2, 2, 6, 2), (2, 2, 18, 2)
swin_tiny_patch4_window7_224 = swin(96, shallow, (3, 6, 12, 24), 0.2)
swin_tiny_c24_patch4_window8_256 = swin(96, shallow, (4, 8, 16, 32), 0.2, 256, 8)
swin_small_patch4_window7_224 = swin(96, deep, (3, 6, 12, 24), 0.3)
swin_base_patch4_window7_224 = swin(128, deep, (4, 8, 16, 32), 0.5)
swin_base_patch4_window12_384 = swin(128, deep, (4, 8, 16, 32), 0.1, 384, 12)  # LiBai's file inherits windows of 7
swin_large_patch4_window7_224 = swin(192, deep, (6, 12, 24, 48), 0.1)
swin_large_patch4_window12_384 = swin(192, deep, (6, 12, 24, 48), 0.1, 384, 12)
