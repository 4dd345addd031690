"""Defines the tables of the aggregator's store, and the upgrade steps from each earlier version to the next."""

SCHEMA_VERSION = 5

SCHEMA = """
CREATE TABLE run (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE devices (
    id TEXT PRIMARY KEY, public_key BLOB NOT NULL, board TEXT NOT NULL, last_session INTEGER NOT NULL,
    public_digest BLOB, public_state BLOB
);
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, phase TEXT NOT NULL, cohort TEXT NOT NULL, global_digest BLOB NOT NULL,
    result_digest BLOB, opened_at REAL NOT NULL, closed_at REAL, metrics TEXT, secure BLOB
);
CREATE TABLE updates (
    round INTEGER NOT NULL, device TEXT NOT NULL, digest BLOB NOT NULL, payload_digest BLOB NOT NULL,
    bytes INTEGER NOT NULL, shared INTEGER NOT NULL, signal_square REAL NOT NULL, noise_square REAL NOT NULL,
    noise_variance REAL NOT NULL, data BLOB, public_before BLOB, summed_in INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (round, device)
);
CREATE INDEX updates_of_sum ON updates (summed_in);
CREATE TABLE answers (
    round INTEGER NOT NULL, device TEXT NOT NULL, digest BLOB NOT NULL, bytes INTEGER NOT NULL, data BLOB,
    PRIMARY KEY (round, device)
);
CREATE TABLE declines (
    round INTEGER NOT NULL, device TEXT NOT NULL, code TEXT NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (round, device)
) WITHOUT ROWID;
CREATE TABLE new_cards (round INTEGER NOT NULL, device TEXT NOT NULL, PRIMARY KEY (round, device)) WITHOUT ROWID;
CREATE TABLE refusals (
    device TEXT NOT NULL, code TEXT NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (device, code)
) WITHOUT ROWID;
CREATE TABLE faults (
    round INTEGER NOT NULL, device TEXT NOT NULL, code TEXT NOT NULL, PRIMARY KEY (round, device)
) WITHOUT ROWID;
CREATE TABLE privacy (
    round INTEGER NOT NULL, device TEXT NOT NULL, unit TEXT NOT NULL, adjacency TEXT NOT NULL,
    noise_multiplier REAL NOT NULL, noise_split INTEGER NOT NULL, sample_rate REAL NOT NULL,
    steps INTEGER NOT NULL, device_rounds INTEGER NOT NULL, device_epsilon REAL NOT NULL,
    raw TEXT NOT NULL DEFAULT '', PRIMARY KEY (round, device)
) WITHOUT ROWID;
"""
UPGRADES = {
    1: ("ALTER TABLE privacy ADD COLUMN raw TEXT NOT NULL DEFAULT ''",),
    2: (
        "ALTER TABLE rounds ADD COLUMN secure BLOB",
        "CREATE TABLE answers (round INTEGER NOT NULL, device TEXT NOT NULL, digest BLOB NOT NULL, "
        "bytes INTEGER NOT NULL, data BLOB, PRIMARY KEY (round, device))",
    ),
    3: (
        "CREATE TABLE new_cards (round INTEGER NOT NULL, device TEXT NOT NULL, PRIMARY KEY (round, device)) "
        "WITHOUT ROWID",
    ),
    4: (
        "ALTER TABLE updates ADD COLUMN summed_in INTEGER NOT NULL DEFAULT 0",
        "UPDATE updates SET summed_in = round",
        "CREATE INDEX updates_of_sum ON updates (summed_in)",
    ),
}
