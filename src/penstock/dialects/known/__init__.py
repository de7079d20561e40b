"""One file for each dialect. A file here is found by being here, and has one or more `Dialect`s in DIALECTS."""
