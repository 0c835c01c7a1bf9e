"""Masked autoencoders of the paper's sizes."""
from libai_wb.config import LazyCall
from libai_wb.models.mae import MaskedAutoencoder


def mae(patch_size, embed_dim, depth, num_heads):
    "A description of these sizes."
    return LazyCall(MaskedAutoencoder)(
        img_size=224, patch_size=patch_size, in_chans=3, embed_dim=embed_dim, depth=depth, num_heads=num_heads,
        decoder_embed_dim=512, decoder_depth=8, decoder_num_heads=16, mlp_ratio=4.0, mask_ratio=0.75,
        norm_pix_loss=True)


mae_vit_base_patch16 = mae(16, 768, 12, 12)
mae_vit_large_patch16 = mae(16, 1024, 24, 16)
mae_vit_huge_patch14 = mae(14, 1280, 32, 16)
