"""What a person sees of a run: console, live display, options of commands, and the report."""
