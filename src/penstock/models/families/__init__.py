"""One file a family, and nothing else here. A file declares

* ARCHITECTURES, MODEL_TYPES: the names in config.json that mean it;
* DEFAULTS (optional): what its configuration class assumes of keys that a config leaves out;
* spec(config) -> ModelSpec, and RULES: checkpoint names to parameters.

The registry lists this folder, so a new family is a new file."""
