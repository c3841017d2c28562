"""What a release publishes in addition to dualops itself."""
