"""Transports: one module each, imported only when chosen (`weightsync.registry`).

name            moves                                   receivers stage   across hosts   needs
shared_memory   handles; bytes stay where they are       nothing           no             Linux
broadcast       bytes, in buckets, to all at once        what is incomplete yes           torch.distributed (gloo)
"""
