"""What kernels are written in: nouns, whose verbs work on fragments (local arrays), shared memory and threads."""
