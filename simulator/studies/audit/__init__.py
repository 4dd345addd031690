"""Audits: lower bounds on epsilon, measured on the code that devices run.

A ledger's epsilon is a computed upper bound. An audit plays the game on which the bound is defined, "was it in, or
not?", many times, and computes a lower bound on epsilon with a stated confidence. If the lower bound is above the
ledger's epsilon, the code does not add the noise that is charged.

bounds    computes epsilon from error counts, independent of any mechanism
claims    the epsilon of charges at each delta, and the largest noise that a measured point allows
canary    the inserted worst case: an update, or records' gradients
subject   the audited device
game      the game of two worlds
updates   the game for what a device sends: an update, an answer, its part of a sum
record    the game for records, if each gradient is noised
finding   compares the scores of a game with the claim
games     the games for a task
"""
