"""Drafters, one file each: they write the tokens that a step verifies (`worker/drafting.py`)."""
