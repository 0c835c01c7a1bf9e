"""Recipes: plain config files, one run each."""
