"""Data that recipes share."""
