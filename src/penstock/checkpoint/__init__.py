"""Model folders: where they are, and what their small files and tensor headers say. No torch; tensors are read by `models/`."""

from penstock.checkpoint.config import Pooler, eos_ids, read_config, read_generation_config, read_pooler
from penstock.checkpoint.hub import resolve_folder
from penstock.checkpoint.identity import Fingerprint, sample
from penstock.checkpoint.tensors import dtype_of

__all__ = ["Fingerprint", "Pooler", "dtype_of", "eos_ids", "read_config", "read_generation_config", "read_pooler",
           "resolve_folder", "sample"]
