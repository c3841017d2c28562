"""The nouns of kernels: their verbs work on fragments (local arrays), shared memory and threads."""
