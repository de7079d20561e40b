"""Dialects, in a file for each maker or each way of writing calls. A file is found by being here, and lists its `Dialect`s in
DIALECTS."""
