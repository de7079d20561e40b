"""Constrained decoding: schemas, regexes and grammars become token masks and forced tokens. Knows no tensors and no HTTP."""
