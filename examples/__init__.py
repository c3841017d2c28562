"""Programs of the site's tutorials, and `ladder`: kernels to learn from."""
