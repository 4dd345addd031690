"""The report of a run: its verdicts, its words, its tables and its page."""
