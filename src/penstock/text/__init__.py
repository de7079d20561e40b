"""Text to tokens and back: tokenizers, incremental detokenization, stop strings and chat templates. No tensors here."""

from penstock.text.detokenize import Detokenizer
from penstock.text.stops import StopStrings
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer"]
