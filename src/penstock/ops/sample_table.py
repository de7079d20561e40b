"""The table [rows, WIDTH] of what rows ask of the operation `sample`, the lists beside it, and constants of its random numbers
(ops/noise.py). No torch here: compiler processes import this module with the kernels."""

from enum import IntEnum, IntFlag


class Feature(IntFlag):
    """Functions that a row needs beyond greedy sampling. A step runs only those that its rows need."""

    NOTHING = 0
    RANDOM = 1
    FILTER = 2
    """top_k, top_p or min_p."""
    PENALTY = 4
    EDIT = 8
    """logit_bias, bad_words or min_tokens."""
    ALLOWED = 16
    """allowed_token_ids."""
    LOGPROBS = 32


class Column(IntEnum):
    """Columns of the parameters' table [rows, WIDTH] int32. A column marked f holds the bits of a float32."""

    FEATURES = 0
    PROMPT = 1
    """Length of the prompt."""
    SEED_KEY = 2
    """noise.seed_key of the row's seed."""
    INVERSE_TEMPERATURE = 3
    """f. Logits are scaled by it before filters and draw."""
    LOG_MIN_P = 4
    """f; -inf: no filter."""
    TOP_K = 5
    """0: no filter."""
    TOP_P = 6
    """f; 1: no filter."""
    PRESENCE = 7
    """f"""
    FREQUENCY = 8
    """f"""
    REPETITION = 9
    """f"""
    ALLOWED = 10
    """Where in the lists the row's allowed tokens begin: a bit for each token, 32 to a word."""
    ALLOWED_WORDS = 11
    """The number of words; tokens beyond them are not allowed."""
    EDITS = 12
    """Where in the lists the row's edits begin."""
    EDIT_COUNT = 13


WIDTH = 16


class Edit(IntEnum):
    """Words of an edit, EDIT_WIDTH in the lists: adds `VALUE` to the logit of `TOKEN` while fewer than `UNTIL` tokens were
    generated and the output ends in the `LENGTH` tokens at `SUFFIX`."""

    TOKEN = 0
    VALUE = 1
    """f"""
    UNTIL = 2
    LENGTH = 3
    SUFFIX = 4
    """Where in the lists, counted from the row's first edit."""


EDIT_WIDTH = 5

M1, M2, STEP, SALT = 0x7FEB352D, 0x846CA68B, 0x9E3779B9, 0x85EBCA6B
"""The finalizer's factors, the increment per position or token (2^32 / golden ratio), and a salt for seeds below 2^32."""
