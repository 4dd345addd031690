"""Loads labelled images: public sets by name, class folders on a board, and the partitions of a simulation."""
