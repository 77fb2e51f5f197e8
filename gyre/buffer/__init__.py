"""The durable ledger of a run."""
