"""What outlives rota itself, in SQLite in the state directory. For now: leases."""

from rota.store.leases import LeaseKeeper, LeaseRecord, LeaseStore

__all__ = ["LeaseKeeper", "LeaseRecord", "LeaseStore"]
