"""What needs an NVIDIA GPU below the transports: one kernel that copies and digests, and its tables. cupy is imported on use."""
