"""Pieces that recipes share."""
