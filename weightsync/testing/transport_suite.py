"""The contract of `SenderTransport` and `ReceiverTransport` as tests that any transport can be put to.

    class TestMine(TransportSuite):
        transport = "mine"

pytest collects the class from the test file in which it stands; `TestMine.failures()` runs it without pytest. The name has to
be known to the registry, by an entry point or by `register_transport`. Both classes stand at the top level of a module,
since some tests use them in processes of their own. A run takes about 10 s.
"""

from __future__ import annotations

from weightsync.testing.transport_bytes import MovesExactBytes
from weightsync.testing.transport_faults import EndsInABoundedError


class TransportSuite(MovesExactBytes, EndsInABoundedError):
    """Set `transport`; `settings`, `hold`, `num_tiny_tensors`, `settle_s` and `patience_s` may be set too."""
