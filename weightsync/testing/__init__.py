"""For tests: weight syncs within one process, faults at any message, and the suites that transports and engines must pass."""

from weightsync.testing.local import LocalFleet, LocalSync, in_process_party, module_engine

__all__ = ["LocalFleet", "LocalSync", "in_process_party", "module_engine"]
