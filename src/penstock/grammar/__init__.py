"""Constrained decoding: turns schemas, regexes and grammars into token masks and forced tokens. Uses no tensors and no HTTP."""
