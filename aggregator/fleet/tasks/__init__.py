"""What a fleet trains: its tasks and seasons, what boards can pay for, and questions."""
