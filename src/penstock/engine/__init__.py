"""The one loop, and what users of the engine without HTTP hold in their hands."""
