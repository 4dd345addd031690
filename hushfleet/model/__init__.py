"""The model as a flat vector, the loss as data, and how both are evaluated."""
