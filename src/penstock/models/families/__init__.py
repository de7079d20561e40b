"""One file a family, or a few families of one kind, and nothing else here. A file declares

* ARCHITECTURES, MODEL_TYPES: the names in config.json that mean it;
* DEFAULTS (optional): what its configuration class assumes of keys that a config leaves out;
* spec(config) -> ModelSpec, and RULES: checkpoint names to parameters;
* LIKE (optional): the same of families that are described with its help.

The registry lists this folder, so a new family is a new file."""
