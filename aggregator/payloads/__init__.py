"""What a round sends and receives: package, model and differences; updates, checked and added to exact sums."""
