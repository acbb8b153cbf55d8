"""The parts of the reinforcement-learning demo; ``examples/rl_smollm2.py`` puts them together."""
