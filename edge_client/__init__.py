"""The client on a board: the agent, the trainer, and the store that survives power cuts."""
