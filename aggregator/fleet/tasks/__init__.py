"""The tasks and seasons of a fleet, what boards can pay for, and questions."""
