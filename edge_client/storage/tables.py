"""The tables of a board's store, in the present schema."""

from __future__ import annotations

from hushfleet.edge_client.storage import answers, arrivals

# The digests of all public states that the device ever had: an aggregator holds one of them, or a newcomer's.
PUBLIC_DIGESTS = """
CREATE TABLE public_digests (task TEXT NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (task, digest)) WITHOUT ROWID;
"""

# The models of the last tasks with which the device predicts (`KeptModel`), the newest in the last row.
OWN_MODELS = "CREATE TABLE own_models (task TEXT PRIMARY KEY, kept BLOB NOT NULL);"

SCHEMA = f"""
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE blobs (digest BLOB PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE states (
    task TEXT PRIMARY KEY, round INTEGER NOT NULL, size INTEGER NOT NULL,
    public BLOB NOT NULL, own BLOB, private BLOB NOT NULL);
CREATE TABLE outbox (
    task TEXT NOT NULL, round INTEGER NOT NULL, digest BLOB NOT NULL, data BLOB,
    public_before BLOB NOT NULL, status TEXT NOT NULL, attached_digest BLOB, context BLOB,
    PRIMARY KEY (task, round));
{PUBLIC_DIGESTS}
{answers.SCHEMA}
{arrivals.SCHEMA};
{OWN_MODELS}
"""
