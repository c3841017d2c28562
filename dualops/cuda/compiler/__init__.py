"""From Python to machine code: the dialect of kernels, the front end, the disk cache, kernels built ahead of time."""
