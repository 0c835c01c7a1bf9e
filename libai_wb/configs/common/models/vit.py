"""LiBai's vision transformers."""
from libai_wb.config import LazyCall
from libai_wb.models.vit import VisionTransformer


def vit(patch_size, embed_dim, depth, num_heads, mlp_ratio=4.0):
    "A description of these sizes."
    return LazyCall(VisionTransformer)(
        img_size=224, patch_size=patch_size, in_chans=3, num_classes=1000, embed_dim=embed_dim, depth=depth,
        num_heads=num_heads, mlp_ratio=mlp_ratio, drop_rate=0.0, attn_drop_rate=0.0, drop_path_rate=0.0)


vit_tiny_patch16_224 = vit(16, 192, 12, 3)
vit_small_patch16_224, vit_small_patch32_224 = vit(16, 384, 12, 6), vit(32, 384, 12, 6)
vit_base_patch16_224, vit_base_patch32_224 = vit(16, 768, 12, 12), vit(32, 768, 12, 12)
vit_large_patch16_224, vit_large_patch32_224 = vit(16, 1024, 24, 16), vit(32, 1024, 24, 16)
vit_huge_patch14_224 = vit(14, 1280, 32, 16)  # LiBai's file has patches of 16 pixels, its name and the paper 14
vit_giant_patch14_224 = vit(14, 1408, 40, 16, 48 / 11)
vit_gigantic_patch14_224 = vit(14, 1664, 48, 16, 64 / 13)
