"""Audits: lower bounds on epsilon, measured on the code that devices run.

A ledger's epsilon is an upper bound that arithmetic gives. An audit plays the game that the bound is about, "was it in,
or not?", many times, and says with a stated confidence how much at least can be told. Where that is more than the
ledger says, the code does not do what is charged for.

bounds    from counts of errors to epsilon; nothing here knows a mechanism
claims    what a charge says about every delta, and what noise a measured point allows at most
canary    the worst case that is inserted: an update, or records' gradients
subject   the device that is audited
device    the game for a device's whole update
sums      the game for either of them, where a server sees sums alone
record    the games for one record, where each gradient is noised
finding   scores of a game against the claim
games     those that fit a task
"""
