"""One world: the real coordinator and the real agents on a virtual clock, with a broker in one process."""
