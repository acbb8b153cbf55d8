"""For tests: weight syncs within one process, faults at any message, and the suites that transports and engines must pass."""

from weightsync.testing.engine_suite import EngineSuite
from weightsync.testing.local import LocalFleet, LocalSync, in_process_party, module_engine
from weightsync.testing.transport_suite import TransportSuite

__all__ = ["EngineSuite", "LocalFleet", "LocalSync", "TransportSuite", "in_process_party", "module_engine"]
