"""A broker as a child process, for laptops, tests and small fields."""
