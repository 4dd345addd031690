"""Names the files of a board's state directory; each writer takes the name of its file from here.

If the store is missing, and a file that only a client with a store writes is still there, the store is lost, and no
empty ledger replaces it (`storage.store_file`). This file uses only the standard library: `slots.pyz` contains it.
"""

from __future__ import annotations

STORE = "store.sqlite"
TRIAL_STORE = "trial.sqlite"
"""A copy of the store, which a release on trial upgrades."""
SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")
LOCK_SUFFIX = ".lock"

REMNANTS = (
    WAITING := "waiting.json",
    DATA_USE := "data.json",
    TRAINING := "training.txt",
    RETENTION := "retention.json",
    HELD_OUT_TESTS := "held_out.json",
    FEATURES := "own_features",
    TRAINED_SAMPLES := "trained_samples",
    TLS_KEY := "tls.key",
    TLS_CERTIFICATE := "tls.pem",
    OFFERS := "update.json",
    NEWEST_RELEASE := "newest.json",
    RELEASE_KEYS := "release_keys",
    CHARGED := "charged.txt",
    "data.txt",  # of earlier versions
    *(f"{TRIAL_STORE}{suffix}" for suffix in ("", *SQLITE_SUFFIXES, LOCK_SUFFIX)),
)
"""Only a client with a store writes these. A kill may also leave a part of one, with the suffix `.part`."""

BEFORE_THE_STORE = (
    ENROL_TOKEN := "enrol.token",  # of the card: `install.sh` writes it, and the client erases it
    INCOMING := "incoming",  # a release that a person has handed over
    HEALTHY := "healthy",  # of a release that is tried before the first start
)
"""These may be there although no client has had a store yet."""
