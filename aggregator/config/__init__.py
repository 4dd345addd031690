"""The task file and its scenario, as an operator writes them."""
