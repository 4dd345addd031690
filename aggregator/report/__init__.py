"""Shows a run to people: console, live display, options of commands, and the report."""
