"""Sources of completions: the engine, a function of the user, environments of several turns, NeMo Gym, Atropos."""
