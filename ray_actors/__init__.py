"""The only part of weightsync that imports ray: coordinator, trainer side, engine side, vLLM worker extension."""
