"""Models that recipes share, by LiBai's names."""
