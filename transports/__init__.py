"""Transports: one module each, imported only when chosen (`weightsync.registry`).

name            moves                                    receivers stage       across hosts   needs
shared_memory   handles; the bytes stay where they are   nothing *             no             Linux
cuda_ipc        the same, on the GPU                     nothing *             no             cupy
broadcast       bytes, in buckets, to all at once        what is incomplete    yes            gloo; NCCL and cupy on GPUs
sharded_rdt     slices, pulled from who holds them       what is incomplete    yes            Ray, NIXL; a sidecar beside each rank
sharded_...     slices, as that transport moves whole    as that               as that        as that

* what is incomplete, where the model exceeds staging_limit_bytes
"""
