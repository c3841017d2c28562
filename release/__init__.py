"""What a release publishes besides dualops itself."""
